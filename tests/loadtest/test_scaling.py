"""A fleet that grows and shrinks in virtual time."""

import pytest

from app.core.roles import Role
from app.planner.rules.state import Reason, Rules
from app.simulation.profiles import Link
from app.simulation.setting import Setting
from loadtest.scaling import Scaled, Scaling
from loadtest.traces import Session, Trace, TraceRequest
from loadtest.virtual import TracePrompts

END_S = 1200.0
RULES = Rules(window_s=90.0, lead_s=30.0)


def prompt(index, blocks):
    return TraceRequest(index, 1024 * len(blocks), 50, blocks, 1024)


def rush():
    """A prompt of 8,192 tokens, 0.75 s of prefill, every 5 s; from 300 s to 600 s two a second."""
    times = [*range(0, 300, 5), *(300 + i / 2 for i in range(600)), *range(600, 1200, 5)]
    return Trace(
        "made up",
        tuple(
            Session(float(at_s), (prompt(i, tuple(range(8 * i, 8 * i + 8))),))
            for i, at_s in enumerate(times)
        ),
    )


def play(policy, *, trace=None, num_workers=1, victim="unique_value", sizes=None):
    scaling = Scaling(policy, RULES, victim, startup_s=30.0, sizes=sizes)
    setting = Setting(num_workers=num_workers)
    return Scaled(scaling, setting, "latency", TracePrompts(256), END_S).run(trace or rush())


@pytest.mark.parametrize("policy", ["threshold", pytest.param("slo", marks=pytest.mark.slow)])
def test_each_policy_grows_in_a_rush_shrinks_after_it_and_loses_nothing(policy):
    played = play(policy)
    size = {proposal.at_s: proposal.desired for proposal in played.proposals}
    assert size[270.0] == 1
    assert max(size[at_s] for at_s in size if 300 < at_s <= 630) > 1
    assert size[1170.0] < max(size.values())
    assert len(played.outcomes) == len(rush().sessions)
    assert [outcome.failure for outcome in played.outcomes if outcome.failure] == []


@pytest.mark.slow
def test_two_pools_grow_in_a_rush_and_lose_nothing():
    scaling = Scaling("slo", RULES, startup_s=30.0)
    roles = (Role.PREFILL, Role.DECODE)
    setting = Setting(num_workers=2, roles=roles, link=Link(12.5e9))
    played = Scaled(scaling, setting, "latency", TracePrompts(256), END_S).run(rush())
    sizes = [proposal.desired_pools for proposal in played.proposals]
    assert all(pools is not None and pools.prefill and pools.decode for pools in sizes)
    assert max(pools.size for pools in sizes if pools is not None) > 2
    assert [outcome.failure for outcome in played.outcomes if outcome.failure] == []


def test_a_worker_costs_from_when_it_is_asked_for_until_it_has_left():
    idle = Trace("made up", (Session(0.0, (prompt(0, (1,)),)),))
    played = play("by hand", trace=idle, sizes=lambda at_s: 3 if 300 <= at_s < 600 else 2)
    # Two for 1,200 s, less what the second had not been asked for: from 30 s on.
    assert played.worker_s == 2 * END_S - 30.0 + 300.0
    assert {proposal.reason for proposal in played.proposals} == {Reason.SCHEDULED}


@pytest.mark.slow
def test_the_proposals_of_slo_say_what_they_predict():
    played = play("slo")
    up = next(p for p in played.proposals if p.desired > p.size)
    assert up.reason is Reason.SLO_MISSED
    assert [candidate.size for candidate in up.candidates[:2]] == [1, 2]
    assert up.candidates[0].ttft_p99_s > up.candidates[1].ttft_p99_s
    down = [p for p in played.proposals if p.desired < p.size]
    assert down
    for proposal in down:
        predicted = {one.size: one.attainment for one in proposal.candidates}
        assert predicted[proposal.desired] >= RULES.slo.target


def test_prefill_counts_as_recomputed_if_the_worker_that_left_would_have_spared_it():
    """Two prompts at once go to two workers; the newest leaves, and both are asked again."""
    pair = [tuple(range(40)), tuple(range(100, 140))]
    sessions = [Session(0.001 * i, (prompt(i, blocks),)) for i, blocks in enumerate(pair)]
    sessions += [Session(100.0 + 20 * i, (prompt(2 + i, b),)) for i, b in enumerate(pair)]
    trace = Trace("made up", tuple(sessions))
    kept = play("by hand", trace=trace, num_workers=2, sizes=lambda _: 2)
    assert kept.recomputed_s == 0.0
    lost = play("by hand", trace=trace, num_workers=2, victim="newest", sizes=lambda _: 1)
    cached = [outcome.cached_tokens for outcome in lost.outcomes]
    # One of the two prompts of 40,960 tokens; its last block is computed again anyway.
    assert sorted(cached) == [0, 0, 0, 40_960 - 256]
    assert lost.recomputed_s == pytest.approx(4.4, rel=0.1)


def test_the_least_valuable_worker_leaves():
    """One prompt is asked again and again, others once: nothing that the other holds comes back."""
    again = [Session(20.0 * i, (prompt(i, tuple(range(40))),)) for i in range(40)]
    once = [
        Session(20.0 * i + 0.01, (prompt(100 + i, tuple(range(1000 * i + 100, 1000 * i + 140))),))
        for i in range(40)
    ]
    trace = Trace("made up", tuple(sorted(again + once, key=lambda s: s.start_s)))
    played = play("by hand", trace=trace, num_workers=3, sizes=lambda at_s: 3 if at_s < 500 else 1)
    assert played.recomputed_s == 0.0
    hits = {o.worker for o in played.outcomes if o.cached_tokens}
    assert len(hits) == 1
