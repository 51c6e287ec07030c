from itertools import pairwise

import pytest

from app.simulation.setting import Setting
from loadtest.experiments.quiet import MOST, TRAFFIC, TURNS, WORKING_SET, Traffic, play

SHARED = Traffic(20480, 1536, 48)
JOINED = Traffic(8192, 1536, 48, joins=True)


@pytest.mark.parametrize(
    ("replicas", "idle_reported"),
    [(1, True), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, False), (4, True)))],
)
def test_a_quiet_fleet_uses_its_memory_as_one(replicas, idle_reported):
    setting = Setting(num_workers=4, replicas=replicas, idle_reported=idle_reported)
    figures = play(SHARED, "latency", setting, seed=1)
    assert figures["computed"] < 1.2
    assert figures["least"] > 0.5


def test_a_policy_that_does_not_spread_does_not():
    """Else the test above could not fail."""
    setting = Setting(num_workers=4)
    figures = play(SHARED, "blocks", setting, seed=1)
    assert figures["computed"] > 1.5 or figures["least"] < 0.2


def test_a_worker_that_joins_a_quiet_fleet_gets_its_share():
    assert play(JOINED, "latency", Setting(num_workers=4), seed=1)["joined"] > 0.5


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_each_turn_of_a_conversation_extends_the_one_before(traffic):
    trace = traffic.trace(3_200_000, seed=0)
    turns = [turn for session in trace.sessions for turn in session.turns]
    assert len({turn.index for turn in turns}) == len(turns)
    shared = traffic.shared_tokens // 256
    conversations = {}
    for turn in turns:
        conversations.setdefault(turn.blocks[shared], []).append(turn.blocks)
    assert {len(its) for its in conversations.values()} == {TURNS}
    for its in conversations.values():
        assert all(b[: len(a)] == a for a, b in pairwise(its))
    own_tokens = len(conversations) * TURNS * traffic.turn_tokens
    if len(conversations) not in (traffic.conversations, MOST):
        filled = own_tokens + traffic.shared_tokens
        assert filled == pytest.approx(3_200_000 * WORKING_SET, rel=0.05)
