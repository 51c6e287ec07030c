"""What each policy proposes, and within which rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planner.rules.policies import POLICIES, Victim, propose
from app.planner.rules.policies import attained as share_attained
from app.planner.rules.state import (
    FleetState,
    Latencies,
    PastRequest,
    Phase,
    Prediction,
    Proposal,
    Reason,
    Rules,
    WorkerLoad,
    WorkerState,
)
from app.simulation.steps import SimRequest

NOW_S = 1000.0
RULES = Rules(min_workers=1, max_workers=8)
CALM = WorkerLoad(prefill_queue=0.3, queue_s=0.5, kv_usage=0.6, waiting=0.0, requests=4.0)


def worker(
    name: str, load: WorkerLoad | None = CALM, phase: Phase = Phase.LIVE, since_s: float = 0.0
) -> WorkerState:
    return WorkerState(name, phase, since_s, load)


def fleet(size: int, load: WorkerLoad | None = CALM, *others: WorkerState) -> FleetState:
    return FleetState(NOW_S, [*(worker(f"w{i}", load) for i in range(size)), *others])


def attained(**by_size: float) -> dict[int, float]:
    return {int(size[1:]): share for size, share in by_size.items()}


def run(
    policy: str, state: FleetState, by_size: dict[int, float] | None = None, rules: Rules = RULES
) -> Proposal:
    """by_size: the attainment predicted for each size; those absent must not be asked for."""

    def predict(size: int) -> Prediction:
        assert by_size is not None
        return Prediction(size, 100, by_size[size], 1.0, 0.5)

    first: Victim = lambda state: state.those(Phase.LIVE)[0].name  # noqa: E731
    return propose(policy, state, rules, predict, first)


def decided(proposal: Proposal) -> tuple[int, Reason]:
    return proposal.desired, proposal.reason


@pytest.mark.parametrize(
    ("load", "desired", "reason"),
    [
        (CALM, 4, Reason.ENOUGH),
        (replace(CALM, prefill_queue=0.51), 5, Reason.PREFILL_QUEUE),
        (replace(CALM, kv_usage=0.91), 5, Reason.KV_LOAD),
        # 0.85 and three waiting at 0.02 each.
        (replace(CALM, kv_usage=0.85, waiting=3.0), 5, Reason.KV_LOAD),
        (replace(CALM, prefill_queue=0.19, kv_usage=0.49), 3, Reason.LOW_LOAD),
        (replace(CALM, prefill_queue=0.19), 4, Reason.ENOUGH),
        (replace(CALM, kv_usage=0.49), 4, Reason.ENOUGH),
    ],
)
def test_threshold_adds_one_if_either_load_is_high_and_removes_one_if_both_are_low(
    load: WorkerLoad, desired: int, reason: Reason
) -> None:
    proposal = run("threshold", fleet(4, load))
    assert decided(proposal) == (desired, reason)
    assert proposal.victim == ("w0" if desired == 3 else None)


def test_threshold_judges_the_mean_over_the_workers() -> None:
    busy = worker("busy", replace(CALM, prefill_queue=2.0))
    proposal = run("threshold", fleet(3, replace(CALM, prefill_queue=0.0), busy))
    assert proposal.inputs["prefill_queue"] == 0.5
    assert proposal.reason is Reason.ENOUGH


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.DRAINING])
def test_threshold_does_nothing_while_a_change_is_under_way(phase: Phase) -> None:
    state = fleet(3, replace(CALM, prefill_queue=9.0), worker("x", None, phase))
    proposal = run("threshold", state)
    assert decided(proposal) == (state.size, Reason.CHANGE_UNDER_WAY)


@pytest.mark.parametrize(("since_s", "reason"), [(911.0, Reason.GRACE), (909.0, Reason.LOW_LOAD)])
def test_threshold_removes_none_for_three_intervals_after_one_was_added(
    since_s: float, reason: Reason
) -> None:
    idle = replace(CALM, prefill_queue=0.0, kv_usage=0.0)
    state = fleet(3, idle, worker("new", idle, since_s=since_s))
    assert run("threshold", state).reason is reason


def test_zero_traffic_shrinks_the_fleet_to_its_minimum() -> None:
    idle = WorkerLoad(0.0, 0.0, 0.0, 0.0, 0.0)
    rules = replace(RULES, min_workers=2)
    assert decided(run("threshold", fleet(3, idle), rules=rules)) == (2, Reason.LOW_LOAD)
    assert decided(run("threshold", fleet(2, idle), rules=rules)) == (2, Reason.AT_MINIMUM)


def past(at_s: float, needed: float, size: int = 4) -> Proposal:
    return Proposal(at_s, "waiting", size, size, Reason.ENOUGH, inputs={"needed": needed})


def test_waiting_asks_for_a_worker_per_five_waiting_requests() -> None:
    # 4 * 6.5 = 26 requests wait.
    state = fleet(4, replace(CALM, waiting=6.5))
    assert decided(run("waiting", state)) == (6, Reason.WAITING)


@pytest.mark.parametrize(
    ("proposals", "desired", "reason"),
    [
        ([past(NOW_S - 200, 1)], 4, Reason.COOL_DOWN),  # not observed for long enough
        ([past(NOW_S - 400, 1), past(NOW_S - 200, 4)], 4, Reason.COOL_DOWN),
        ([past(NOW_S - 400, 4), past(NOW_S - 200, 2)], 3, Reason.WAITING),
    ],
)
def test_waiting_removes_one_only_if_the_whole_cool_down_needed_fewer(
    proposals: list[Proposal], desired: int, reason: Reason
) -> None:
    proposal = run("waiting", replace(fleet(4), proposals=proposals))
    assert decided(proposal) == (desired, reason)


@pytest.mark.parametrize(
    ("by_size", "desired", "reason", "asked"),
    [
        (attained(n4=0.90, n5=0.96), 5, Reason.SLO_MISSED, [4, 5]),
        (attained(n4=0.90, n5=0.94, n6=0.97), 6, Reason.SLO_MISSED, [4, 5, 6]),
        (attained(n4=0.50, n5=0.60, n6=0.70), 6, Reason.SLO_MISSED, [4, 5, 6]),
        (attained(n4=0.97, n3=0.94), 4, Reason.ENOUGH, [3, 4]),
        (attained(n4=0.99, n3=0.95, n2=0.94), 4, Reason.COOL_DOWN, [2, 3, 4]),
    ],
)
def test_slo_takes_the_smallest_size_that_keeps_it(
    by_size: dict[int, float], desired: int, reason: Reason, asked: list[int]
) -> None:
    proposal = run("slo", fleet(4), by_size)
    assert decided(proposal) == (desired, reason)
    assert [prediction.size for prediction in proposal.candidates] == asked
    assert proposal.victim is None


def spare(*needed: int) -> list[Proposal]:
    """Proposals every 30 s, the last one now, for four workers of which so many are needed."""
    worth = [
        replace(worker(f"w{i}"), unique_value_s=value)
        for i, value in enumerate((40.0, 29.0, 90.0, 50.0))
    ]
    proposals: list[Proposal] = []
    for number, enough in enumerate(needed):
        now_s = NOW_S - 30.0 * (len(needed) - 1 - number)
        state = FleetState(now_s, worth, proposals=proposals, startup_s=60.0)
        by_size = {size: 0.99 if size >= enough else 0.5 for size in range(1, 5)}
        proposals = [*proposals, run("slo", state, by_size)]
    return proposals


def test_slo_removes_one_when_it_has_been_spare_for_as_long_as_its_return_would_cost() -> None:
    """A start of 60 s, a cache worth 29 s and 0.5 s of prefills that would move elsewhere."""
    *kept, last = spare(3, 3, 3, 3)
    assert [decided(proposal) for proposal in kept] == [(4, Reason.COOL_DOWN)] * 3
    assert decided(last) == (3, Reason.SLO_MET_BY_FEWER)
    assert last.inputs["change_s"] == 89.5


def test_slo_keeps_what_was_needed_meanwhile() -> None:
    assert decided(spare(3, 3, 4, 3)[-1]) == (4, Reason.COOL_DOWN)
    assert decided(spare(4, 3, 3, 3)[-1]) == (3, Reason.SLO_MET_BY_FEWER)


def test_slo_keeps_no_worker_for_longer_than_ten_minutes_whatever_its_cache_is_worth() -> None:
    dear = [replace(worker(f"w{i}"), unique_value_s=1e6) for i in range(4)]
    by_size = {1: 0.5, 2: 0.5, 3: 0.99, 4: 0.99}
    past = [run("slo", FleetState(NOW_S - 600.0, dear), by_size)]
    assert run("slo", FleetState(NOW_S - 1.0, dear, proposals=past), by_size).desired == 4
    assert run("slo", FleetState(NOW_S, dear, proposals=past), by_size).desired == 3


@pytest.mark.parametrize(("needed", "desired"), [(2, 2), (3, 3)])
def test_slo_removes_those_that_have_been_spare_as_long_one_after_the_other(
    needed: int, desired: int
) -> None:
    before = spare(needed, needed, needed, needed)
    assert before[-1].desired == 3
    state = replace(fleet(3), now_s=NOW_S + 30.0, proposals=before)
    by_size = {size: 0.99 if size >= needed else 0.5 for size in (1, 2, 3)}
    assert run("slo", state, by_size).desired == desired


def test_slo_counts_pending_workers_for_up_and_not_for_down() -> None:
    state = fleet(3, CALM, worker("p", None, Phase.PENDING))
    enough = attained(n4=0.96, n3=0.96, n2=0.5)
    assert decided(run("slo", state, enough)) == (4, Reason.CHANGE_UNDER_WAY)
    assert decided(run("slo", state, attained(n4=0.90, n5=0.96))) == (5, Reason.SLO_MISSED)


def test_slo_goes_up_while_a_worker_drains() -> None:
    state = fleet(3, CALM, worker("d", None, Phase.DRAINING))
    assert decided(run("slo", state, attained(n3=0.90, n4=0.96))) == (4, Reason.SLO_MISSED)


@pytest.mark.parametrize("policy", POLICIES)
def test_missing_metrics_hold_the_size_but_never_below_the_minimum(policy: str) -> None:
    state = fleet(2, CALM, worker("dumb", None))
    assert decided(run(policy, state)) == (3, Reason.NO_METRICS)
    rules = replace(RULES, min_workers=5)
    assert decided(run(policy, state, rules=rules)) == (5, Reason.BELOW_MINIMUM)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fleet_over_its_budget_loses_one_worker_at_a_time(policy: str) -> None:
    proposal = run(policy, fleet(5), rules=replace(RULES, max_workers=2))
    assert (*decided(proposal), proposal.victim) == (4, Reason.OVER_BUDGET, "w0")


@pytest.mark.parametrize(
    ("policy", "load"),
    [
        ("threshold", replace(CALM, prefill_queue=3.0)),
        ("waiting", replace(CALM, waiting=30.0)),
        ("slo", CALM),
    ],
)
def test_no_policy_goes_beyond_the_budget(policy: str, load: WorkerLoad) -> None:
    rules = replace(RULES, max_workers=3)
    missed = attained(n3=0.5, n4=0.5, n5=0.5)
    assert decided(run(policy, fleet(3, load), missed, rules)) == (3, Reason.AT_BUDGET)


@pytest.mark.parametrize(("size", "is_changed"), [(3, True), (4, False), (5, False), (6, True)])
def test_a_size_that_somebody_else_changed_is_accepted_for_an_interval(
    size: int, is_changed: bool
) -> None:
    """The last proposal saw four workers and asked for five."""
    last = Proposal(NOW_S - 30, "threshold", 4, 5, Reason.PREFILL_QUEUE)
    state = replace(fleet(size, replace(CALM, prefill_queue=3.0)), proposals=[last])
    proposal = run("threshold", state)
    assert (proposal.reason is Reason.FLEET_CHANGED) is is_changed
    assert proposal.desired == (size if is_changed else size + 1)
    again = replace(state, proposals=[last, proposal])
    assert decided(run("threshold", again)) == (size + 1, Reason.PREFILL_QUEUE)


def asked(at_s: float, came: Latencies | None) -> PastRequest:
    request = SimRequest(f"r{at_s}", (), (1,) * 8, 8, 4)
    return PastRequest(at_s, "w0", request, came=came)


GOOD, LATE, SLOW = Latencies(0.1, 0.01), Latencies(60.0, 0.01), Latencies(0.1, 0.11)


def test_attained_is_what_came_of_the_requests_that_somebody_told_of() -> None:
    slo = Rules().slo
    recent = [asked(900.0 + n, came) for n, came in enumerate((GOOD, LATE, SLOW, None, GOOD))]
    state = replace(fleet(1), recent=recent)
    assert share_attained(state, slo, 0.0) == (4, 0.5)
    assert share_attained(state, slo, 903.0) == (1, 1.0)
    assert share_attained(state, slo, 950.0) == (0, 1.0)


@pytest.mark.parametrize(
    ("met", "desired"),
    [
        (100, 4),  # all is well, and 96 % would do
        (93, 4),  # 95 + 2 * 2 would be 99, but 97 % are aimed at, and at most
        (95, 4),
    ],
)
def test_slo_aims_above_its_target_by_what_was_missed(met: int, desired: int) -> None:
    recent = [asked(900.0, GOOD)] * met + [asked(900.0, LATE)] * (100 - met)
    state = replace(fleet(4), recent=recent)
    proposal = run("slo", state, {3: 0.90, 4: 0.995, 5: 1.0})
    assert proposal.desired == desired
    assert proposal.inputs["attained"] == met / 100
    missed = max(0.0, 0.95 - met / 100)
    assert proposal.inputs["aim"] == pytest.approx(min(0.97, 0.95 + 2 * missed))
    if met == 93:
        assert run("slo", state, {4: 0.965, 5: 1.0}).desired == 5


def test_ongoing_wants_a_worker_for_two_requests_and_keeps_for_ten_minutes_what_it_needed() -> None:
    busy = fleet(2, replace(CALM, requests=5.0))
    assert decided(run("ongoing", busy)) == (5, Reason.ONGOING)
    calm = fleet(4, replace(CALM, requests=0.5))
    past = [
        Proposal(at_s, "ongoing", 4, 4, Reason.ENOUGH, inputs={"needed": needed})
        for at_s, needed in ((300.0, 4.0), (500.0, 2.0), (900.0, 3.0))
    ]
    assert decided(run("ongoing", replace(calm, proposals=past))) == (3, Reason.ONGOING)
    assert run("ongoing", replace(calm, proposals=past[1:])).reason is Reason.COOL_DOWN


IDLE = WorkerLoad(0.0, 0.0, 0.0, 0.0, 0.0)
SLEEPY = replace(RULES, min_workers=0, idle_s=300.0)


def idle(size: int, last_s: float, **more: bool) -> FleetState:
    """A fleet that was last asked at `last_s`."""
    asked = PastRequest(last_s, "w0", SimRequest("r", (), (), 1, 1))
    return replace(fleet(size, IDLE), recent=[asked], **({"may_sleep": True} | more))


@pytest.mark.parametrize("policy", ["threshold", "slo"])
def test_the_last_worker_leaves_only_after_it_was_idle_for_long(policy: str) -> None:
    short = run(policy, idle(1, NOW_S - 299.0), {1: 1.0}, SLEEPY)
    assert decided(short) == (1, Reason.AT_MINIMUM)
    proposal = run(policy, idle(1, NOW_S - 301.0), rules=SLEEPY)
    assert (decided(proposal), proposal.victim) == ((0, Reason.IDLE), "w0")
    assert decided(run(policy, idle(0, NOW_S - 301.0), rules=SLEEPY)) == (0, Reason.ASLEEP)


def test_none_leaves_whose_models_nobody_would_know_or_while_somebody_waits() -> None:
    for more in ({"may_sleep": False}, {"somebody_waits": True}):
        assert run("threshold", idle(1, NOW_S - 999.0, **more), rules=SLEEPY).desired == 1
    busy = replace(idle(1, NOW_S - 999.0), workers=[worker("w0", replace(IDLE, requests=0.1))])
    assert run("threshold", busy, rules=SLEEPY).desired == 1
    new = replace(idle(1, NOW_S - 999.0), workers=[worker("w0", IDLE, since_s=NOW_S - 1.0)])
    assert run("threshold", new, rules=SLEEPY).desired == 1


def test_a_request_that_waits_wakes_a_fleet() -> None:
    state = idle(0, NOW_S - 999.0, somebody_waits=True)
    assert decided(run("threshold", state, rules=SLEEPY)) == (1, Reason.WOKEN)
    unknown = idle(0, NOW_S - 999.0, may_sleep=False)
    assert decided(run("threshold", unknown, rules=SLEEPY)) == (1, Reason.BELOW_MINIMUM)
