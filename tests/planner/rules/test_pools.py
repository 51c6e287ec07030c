"""What is proposed for two pools under one budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from app.core.roles import Role
from app.planner.rules.pools import RolesNotPlanned, propose_pools
from app.planner.rules.state import (
    FleetState,
    Phase,
    Pools,
    Prediction,
    Proposal,
    Reason,
    Rules,
    WorkerLoad,
    WorkerState,
)

NOW_S = 1000.0
RULES = Rules(min_workers=1, max_workers=5)
CALM = WorkerLoad(prefill_queue=0.3, queue_s=0.5, kv_usage=0.6, waiting=0.0, requests=4.0)
IDLE = WorkerLoad(0.0, 0.0, 0.0, 0.0, 0.0)
SHORT, FULL = replace(CALM, prefill_queue=0.9), replace(CALM, kv_usage=0.95)


def pool(role: Role, size: int, load: WorkerLoad = CALM, since_s: float = 0.0) -> list[WorkerState]:
    return [
        WorkerState(f"{role.value[0]}{n}", Phase.LIVE, since_s, load, role=role)
        for n in range(size)
    ]


def fleet(prefill: list[WorkerState], decode: list[WorkerState]) -> FleetState:
    return FleetState(NOW_S, [*prefill, *decode])


def run(
    policy: str,
    state: FleetState,
    attainments: Mapping[tuple[int, int], float] | None = None,
    rules: Rules = RULES,
) -> Proposal:
    """attainments: predicted for each pair of pools; those absent must not be asked for."""

    def predict(pools: Pools) -> Prediction:
        assert attainments is not None
        share = attainments[pools.prefill, pools.decode]
        return Prediction(pools.size, 100, share, 1.0, 0.5, pools)

    return propose_pools(policy, state, rules, predict, lambda state: state.workers[-1].name)


def decided(proposal: Proposal) -> tuple[int, int, Reason]:
    assert proposal.desired_pools is not None
    assert proposal.desired_pools.size == proposal.desired
    return proposal.desired_pools.prefill, proposal.desired_pools.decode, proposal.reason


@pytest.mark.parametrize(
    ("prefills", "decodes", "wanted"),
    [
        (CALM, CALM, (2, 2, Reason.ENOUGH)),
        (replace(CALM, prefill_queue=0.51), CALM, (3, 2, Reason.PREFILL_QUEUE)),
        (CALM, replace(CALM, kv_usage=0.91), (2, 3, Reason.KV_LOAD)),
        # 0.85 and three waiting at 0.02 each.
        (CALM, replace(CALM, kv_usage=0.85, waiting=3.0), (2, 3, Reason.KV_LOAD)),
        (replace(CALM, prefill_queue=0.19), CALM, (1, 2, Reason.LOW_LOAD)),
        (CALM, replace(CALM, kv_usage=0.49), (2, 1, Reason.LOW_LOAD)),
        # Each pool has a signal of its own.
        (replace(CALM, kv_usage=0.99), replace(CALM, prefill_queue=9.0), (2, 2, Reason.ENOUGH)),
        # Up first, and where both are short, one that decodes.
        (SHORT, replace(CALM, kv_usage=0.1), (3, 2, Reason.PREFILL_QUEUE)),
        (replace(CALM, prefill_queue=0.1), FULL, (2, 3, Reason.KV_LOAD)),
        (SHORT, FULL, (2, 3, Reason.KV_LOAD)),
    ],
)
def test_threshold_sizes_each_pool_by_its_own_signal_and_changes_one_at_a_time(
    prefills: WorkerLoad, decodes: WorkerLoad, wanted: tuple[int, int, Reason]
) -> None:
    state = fleet(pool(Role.PREFILL, 2, prefills), pool(Role.DECODE, 2, decodes))
    proposal = run("threshold", state)
    assert decided(proposal) == wanted
    leaves = {(1, 2): "p1", (2, 1): "d1"}.get(wanted[:2])
    assert proposal.victim == leaves


def test_without_budget_the_pool_that_has_too_many_makes_room() -> None:
    rules = replace(RULES, max_workers=4)
    idle, empty = replace(CALM, prefill_queue=0.1), replace(CALM, kv_usage=0.1)
    for prefills, decodes, wanted in (
        (SHORT, empty, (2, 1, Reason.LOW_LOAD)),
        (idle, FULL, (1, 2, Reason.LOW_LOAD)),
        (CALM, FULL, (2, 2, Reason.AT_BUDGET)),
    ):
        state = fleet(pool(Role.PREFILL, 2, prefills), pool(Role.DECODE, 2, decodes))
        assert decided(run("threshold", state, rules=rules)) == wanted


def test_both_pools_share_one_budget() -> None:
    busy = replace(CALM, prefill_queue=2.0, kv_usage=0.99)
    state = fleet(pool(Role.PREFILL, 2, busy), pool(Role.DECODE, 3, busy))
    assert decided(run("threshold", state)) == (2, 3, Reason.AT_BUDGET)
    over = run("threshold", state, rules=replace(RULES, max_workers=4))
    assert decided(over) == (2, 2, Reason.OVER_BUDGET)
    assert over.victim == "d2"


def test_each_pool_keeps_a_worker() -> None:
    state = fleet(pool(Role.PREFILL, 1, IDLE), pool(Role.DECODE, 1, IDLE))
    assert decided(run("threshold", state)) == (1, 1, Reason.ENOUGH)
    assert decided(run("threshold", fleet([], pool(Role.DECODE, 3)))) == (
        1,
        3,
        Reason.BELOW_MINIMUM,
    )
    started = run("threshold", fleet([], []), rules=replace(RULES, min_workers=3))
    assert started.starts == {Role.PREFILL: 1, Role.DECODE: 2}


def test_a_worker_that_does_both_counts_as_one_that_decodes() -> None:
    state = fleet(pool(Role.PREFILL, 1), pool(Role.BOTH, 2, replace(CALM, kv_usage=0.95)))
    assert decided(run("threshold", state)) == (1, 3, Reason.KV_LOAD)


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.DRAINING])
def test_threshold_does_nothing_while_either_pool_changes(phase: Phase) -> None:
    changing = WorkerState("x", phase, 0.0, role=Role.PREFILL)
    busy = replace(CALM, kv_usage=0.99)
    state = fleet([*pool(Role.PREFILL, 1), changing], pool(Role.DECODE, 2, busy))
    assert run("threshold", state).reason is Reason.CHANGE_UNDER_WAY


def test_no_decoding_worker_leaves_for_three_intervals_after_one_was_added() -> None:
    lately, before = NOW_S - 89.0, NOW_S - 91.0
    for since_s, wanted in ((lately, (1, 2, Reason.GRACE)), (before, (1, 1, Reason.LOW_LOAD))):
        state = fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 2, IDLE, since_s))
        assert decided(run("threshold", state)) == wanted
    # One that prefills may.
    state = fleet(pool(Role.PREFILL, 2, IDLE, lately), pool(Role.DECODE, 1))
    assert decided(run("threshold", state)) == (1, 1, Reason.LOW_LOAD)


def test_slo_adds_a_worker_where_it_helps_most() -> None:
    state = fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 2))
    shares = {(1, 2): 0.8, (2, 1): 0.5, (2, 2): 0.99, (1, 3): 0.85}
    proposal = run("slo", state, shares)
    assert decided(proposal) == (2, 2, Reason.SLO_MISSED)
    assert (proposal.victim, proposal.starts) == (None, {Role.PREFILL: 1})


def test_slo_prefers_another_role_for_a_worker_where_that_suffices() -> None:
    state = fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 3))
    proposal = run("slo", state, {(1, 3): 0.8, (2, 2): 0.97})
    assert decided(proposal) == (2, 2, Reason.OTHER_ROLE)
    assert (proposal.victim, proposal.starts) == ("d2", {Role.PREFILL: 1})


def test_slo_gives_no_worker_another_role_while_anything_changes_or_one_is_new() -> None:
    coming = WorkerState("x", Phase.PENDING, 0.0, role=Role.DECODE)
    shares = {(1, 3): 0.8, (2, 3): 0.9, (1, 4): 0.85}
    assert decided(
        run("slo", fleet(pool(Role.PREFILL, 1), [*pool(Role.DECODE, 2), coming]), shares)
    ) == (
        2,
        3,
        Reason.SLO_MISSED,
    )
    state = fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 3, since_s=NOW_S - 1.0))
    assert decided(run("slo", state, shares)) == (2, 3, Reason.SLO_MISSED)


def test_slo_at_its_budget_gives_a_worker_another_role_only_if_that_helps() -> None:
    state = fleet(pool(Role.PREFILL, 2), pool(Role.DECODE, 3))
    shares = {(2, 3): 0.8, (1, 4): 0.5, (3, 2): 0.85}
    assert decided(run("slo", state, shares)) == (3, 2, Reason.OTHER_ROLE)
    assert decided(run("slo", state, shares | {(3, 2): 0.8})) == (2, 3, Reason.AT_BUDGET)


def test_slo_takes_a_worker_from_the_pool_that_misses_it_least_after_a_cool_down() -> None:
    state = fleet(pool(Role.PREFILL, 2), pool(Role.DECODE, 2))
    shares = {(2, 2): 1.0, (1, 2): 0.9, (2, 1): 0.97}
    first = run("slo", state, shares)
    assert decided(first) == (2, 2, Reason.COOL_DOWN)
    past = [replace(first, at_s=NOW_S - 600.0), replace(first, at_s=NOW_S - 30.0)]
    proposal = run("slo", replace(state, proposals=past), shares)
    assert decided(proposal) == (2, 1, Reason.SLO_MET_BY_FEWER)
    assert proposal.victim == "d1"
    assert decided(run("slo", state, shares | {(2, 1): 0.9})) == (2, 2, Reason.ENOUGH)


def test_a_role_that_somebody_else_has_changed_is_accepted() -> None:
    busy = replace(CALM, prefill_queue=0.9)
    before = run("threshold", fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 3)))
    state = fleet(pool(Role.PREFILL, 2, busy), pool(Role.DECODE, 2))
    proposal = run("threshold", replace(state, proposals=[before]))
    assert decided(proposal) == (2, 2, Reason.FLEET_CHANGED)


@pytest.mark.parametrize("policy", ["waiting", "ongoing"])
def test_policies_that_know_no_roles_say_so(policy: str) -> None:
    with pytest.raises(RolesNotPlanned, match=f"scaling_policy {policy} knows no roles"):
        run(policy, fleet(pool(Role.PREFILL, 1), pool(Role.DECODE, 1)))


def test_pools_fall_asleep_one_worker_at_a_time_and_wake_with_one_each() -> None:
    rules = replace(RULES, min_workers=0)
    state = replace(fleet(pool(Role.PREFILL, 1, IDLE), pool(Role.DECODE, 1, IDLE)), may_sleep=True)
    first = run("threshold", state, rules=rules)
    assert (decided(first), first.victim) == ((0, 1, Reason.IDLE), "p0")
    second = run("threshold", replace(state, workers=state.workers[1:]), rules=rules)
    assert (decided(second), second.victim) == ((0, 0, Reason.IDLE), "d0")
    none = replace(state, workers=[])
    assert decided(run("threshold", none, rules=rules)) == (0, 0, Reason.ASLEEP)
    woken = run("threshold", replace(none, somebody_waits=True), rules=rules)
    assert decided(woken) == (1, 1, Reason.WOKEN)
