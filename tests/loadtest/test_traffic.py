from collections import Counter
from itertools import pairwise

import pytest
from click.testing import CliRunner

from loadtest.traffic import SESSIONS, TRAFFIC, lines, made_trace, main


@pytest.mark.parametrize("name", [name for name in TRAFFIC if name != "short"])
def test_each_kind_is_a_trace_of_requests_that_a_worker_can_hold(name):
    trace = made_trace(name)
    assert trace.num_requests >= 400
    for session in trace.sessions:
        (turn,) = session.turns
        assert turn.input_tokens + turn.output_tokens < 400_000
        assert len(turn.blocks) * turn.block_tokens <= turn.input_tokens


def test_sub_agents_come_eight_at_once_on_a_prompt_of_their_own():
    trace = made_trace("sub-agents")
    together = Counter((session.start_s, session.turns[0].blocks) for session in trace.sessions)
    assert set(together.values()) == {8}
    assert len({blocks for _, blocks in together}) == len(together)


def test_a_crowd_comes_within_two_seconds_on_a_prefix_of_its_own():
    trace = made_trace("crowd")
    crowds = {}
    for session in trace.sessions:
        if session.turns[0].priority == "low":
            crowds.setdefault(session.turns[0].blocks[0], []).append(session.start_s)
    assert [len(starts_s) for starts_s in crowds.values()] == [200] * 3
    assert all(max(starts_s) - min(starts_s) <= 2.0 for starts_s in crowds.values())


@pytest.mark.parametrize("name", SESSIONS)
def test_each_turn_of_a_session_begins_with_the_last_one(name):
    trace = made_trace(name)
    assert len(trace.sessions) == sum(kind.number for kind in SESSIONS[name])
    assert trace.num_requests > 2 * len(trace.sessions)
    for session in trace.sessions:
        for before, after in pairwise(session.turns):
            whole = before.input_tokens // 256
            assert after.blocks[:whole] == before.blocks[:whole]


def test_sessions_share_their_system_prompt_and_nothing_else():
    prompts = [set(session.turns[-1].blocks) for session in made_trace("mixed").sessions[:20]]
    shared = {len(one & other) for one in prompts for other in prompts if one is not other}
    assert shared <= {0, 2, 16}


@pytest.mark.parametrize("name", ["crowd", "mixed"])
def test_the_command_prints_the_same_trace_each_time(name):
    printed = CliRunner().invoke(main, [name], catch_exceptions=False).output
    assert printed.encode() == b"".join(line + b"\n" for line in lines(name))
