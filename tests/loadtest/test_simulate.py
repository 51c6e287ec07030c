"""The offline comparison of policies: what it plays, and that its books balance."""

from __future__ import annotations

import pytest

from app.core.reservations import Load
from loadtest.report import summarise
from loadtest.simulate import Simulation, simulate
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace


def request(index: int, blocks: tuple[int, ...], *, think_s: float = 0.0) -> TraceRequest:
    """Of 1,024 tokens a block, and 10 tokens of output."""
    return TraceRequest(index, 1024 * len(blocks), 10, blocks, 1024, think_s)


def open_loop(*requests: TraceRequest, every_s: float) -> Trace:
    sessions = [Session(i * every_s, (one,)) for i, one in enumerate(requests)]
    return Trace("made up", tuple(sessions))


def test_a_prompt_goes_where_its_prefix_lies() -> None:
    # Far enough apart to find every worker idle, so only the cache tells them apart.
    trace = open_loop(*(request(i, (7, 8, 9)) for i in range(6)), every_s=10.0)
    outcomes = Simulation("latency", num_workers=4, profile="70b-4xh100", seed=1).run(trace)
    assert len({outcome.worker for outcome in outcomes}) == 1
    # Of 48 blocks of 64 tokens the last is computed again: its logits give the first new token.
    assert [outcome.cached_tokens for outcome in outcomes] == [0, *[47 * 64] * 5]


def test_all_that_was_reserved_is_given_back() -> None:
    trace = read_trace(DEMO_TRACE).cut(0.0, None, 200)
    simulation = Simulation("latency", num_workers=3, profile="70b-4xh200", seed=1)
    assert len(simulation.run(trace)) == 200
    for worker in simulation.workers:
        load = worker.load
        assert load == Load(head_since_ms=load.head_since_ms, total=load.total)
        assert worker.engine.metrics().kv_active_blocks == 0
        worker.engine.check()
    assert sum(worker.load.total for worker in simulation.workers) == 200


def test_a_turn_follows_the_answer_before_it_by_its_think_time() -> None:
    turns = (request(0, (1,)), request(1, (1, 2), think_s=5.0))
    trace = Trace("made up", (Session(2.0, turns),))
    first, second = Simulation("latency", num_workers=2, profile="8b-1xh100", seed=1).run(trace)
    assert first.arrival_s == 2.0
    assert first.end_s is not None
    assert second.arrival_s == pytest.approx(first.end_s + 5.0)
    assert second.cached_tokens == 1024


def test_a_run_can_be_repeated_and_ranks_the_policies_as_they_are() -> None:
    trace = read_trace(DEMO_TRACE).cut(0.0, None, 500)
    ttft = {}
    for policy in ("random", "blocks", "latency"):
        mean = summarise(simulate(trace, policy, load=1.1, seed=3)).ttft_mean_s
        assert mean is not None
        ttft[policy] = mean
    assert ttft["latency"] < ttft["blocks"] < ttft["random"]
    again = summarise(simulate(trace, "latency", load=1.1, seed=3))
    assert again.ttft_mean_s == ttft["latency"]
