"""Cells in virtual time: who gets which request, and what a cell is."""

import math
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

from app.simulation.setting import Setting
from loadtest.experiments.cells import CellSimulation, Door, first_blocks, first_turn, main, play
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace
from loadtest.virtual import Simulation, TracePrompts

RNG = np.random.default_rng(0)


def request(index, blocks, think_s=0.0):
    return TraceRequest(index, 256 * len(blocks), 10, blocks, 256, think_s)


def chosen(door, session, under_way, turn=0):
    made = TracePrompts(256).of(session.turns[turn])
    return door.choose(session, made, under_way, RNG)


def test_turns_of_a_session_and_prompts_that_begin_alike_have_one_cell():
    sessions = [
        Session(0.0, tuple(request(4 * n + turn, (1, n, *range(turn))) for turn in range(4)))
        for n in range(40)
    ]
    by_turn, by_block = Door(first_turn), Door(partial(first_blocks, 1))
    by_two = Door(partial(first_blocks, 2))
    for door, number in ((by_turn, 2), (by_two, 2), (by_block, 1)):
        cells = [{chosen(door, each, [0, 0], turn) for turn in range(4)} for each in sessions]
        assert all(len(of_session) == 1 for of_session in cells)
        assert len(set.union(*cells)) == number


@pytest.mark.parametrize(("under_way", "is_moved"), [([5, 3], True), ([4, 4], False)])
def test_a_cell_with_more_than_its_bound_passes_requests_on(under_way, is_moved):
    session = Session(0.0, (request(0, (1,)),))
    usual = chosen(Door(first_turn), session, [0, 0])
    # Nine requests with this one: one cell may have five at most.
    seen = under_way if usual == 0 else under_way[::-1]
    assert chosen(Door(first_turn, 1.1), session, seen) == (1 - usual if is_moved else usual)
    assert chosen(Door(first_turn), session, seen) == usual


def test_by_a_bound_of_one_the_cell_with_the_fewest_requests_is_chosen():
    session = Session(0.0, (request(0, (1,)),))
    assert {chosen(Door(bound=1.0), session, [3, 2]) for _ in range(20)} == {1}
    assert {chosen(Door(bound=1.0), session, [2, 2]) for _ in range(20)} == {0, 1}


def test_one_cell_is_the_fleet_itself_and_two_know_nothing_of_each_other():
    trace = read_trace(DEMO_TRACE).cut(requests=60)
    setting = Setting(num_workers=4)
    alone = Simulation("latency", setting).run(trace)
    assert CellSimulation("latency", setting, TracePrompts(256), 1, Door()).run(trace) == alone
    prompt = tuple(range(20))
    hot = Trace("hot", tuple(Session(60.0 * n, (request(n, prompt),)) for n in range(8)))
    cells = CellSimulation("latency", setting, TracePrompts(256), 2, Door(bound=1.0))
    cached = [outcome.cached_tokens for outcome in cells.run(hot)]
    # Each computes the prompt once, all but the block whose last token is always computed.
    assert sorted(cached) == [0, 0, *[19 * 256] * 6]


def test_cells_of_unequal_size_are_not_compared():
    refused = CliRunner().invoke(main, ("--workers", "5"))
    assert (refused.exit_code, "5 workers are no 2 cells" in refused.output) == (2, True)


def test_nothing_is_lost_on_the_way_and_the_busiest_cell_is_told():
    trace = read_trace(DEMO_TRACE).cut(requests=100)
    door = Door(partial(first_blocks, 4), 1.25)
    figures = play(trace, Setting(num_workers=4), 2, door, 1.0, seed=1)
    assert figures["failed"] == 0
    assert math.isfinite(figures["ttft_p99_s"])
    assert 1.0 <= figures["busiest"] < 1.25
    one_first_block = play(trace, Setting(num_workers=4), 2, Door(partial(first_blocks, 1)), 1.0, 1)
    assert one_first_block["busiest"] == 2.0
