"""What each policy proposes, and within which rules: a row is a fleet, and what it should have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from app.core.roles import Role
from app.planner.rules.policies import POLICIES, attained, propose
from app.planner.rules.state import (
    FleetState,
    Latencies,
    PastRequest,
    Phase,
    Pools,
    Prediction,
    Proposal,
    Reason,
    Rules,
    WorkerLoad,
    WorkerState,
)
from app.simulation.steps import SimRequest

R, MET = Reason, Reason.SLO_MET_BY_FEWER
NOW_S = 1000.0
LATELY_S, BEFORE_S = 911.0, 910.0
"""Less than the three intervals of grace ago, and just as long ago."""
CALM, IDLE = WorkerLoad(0.3, 0.5, 0.6, 0.0, 4.0), WorkerLoad(0.0, 0.0, 0.0, 0.0, 0.0)
SHORT, FULL = replace(CALM, prefill_queue=0.9), replace(CALM, kv_usage=0.95)
Shares = Mapping[Any, float]
"""The attainment predicted for each size; those absent must not be asked for."""


def worker(name, load=CALM, phase=Phase.LIVE, since_s=0.0, worth_s=0.0, role=Role.BOTH):
    return WorkerState(name, phase, since_s, load, worth_s, role=role)


def fleet(size, *others, past=(), now_s=NOW_S, **load):
    """load: what differs from CALM."""
    workers = [worker(f"w{n}", replace(CALM, **load)) for n in range(size)]
    return FleetState(now_s, [*workers, *others], proposals=past)


def pools(
    prefill,
    decode,
    prefills=CALM,
    decodes=CALM,
    *others,
    role=Role.DECODE,
    p_since_s=0.0,
    d_since_s=0.0,
    past=(),
):
    first = [
        worker(f"p{n}", prefills, since_s=p_since_s, role=Role.PREFILL) for n in range(prefill)
    ]
    then = [worker(f"d{n}", decodes, since_s=d_since_s, role=role) for n in range(decode)]
    return FleetState(NOW_S, [*first, *then, *others], proposals=past, wants_roles=True)


def sleepy(size, idle_s, load=IDLE, since_s=0.0, **more):
    """A fleet that was last asked so long ago, and may sleep."""
    workers = [worker(f"w{n}", load, since_s=since_s) for n in range(size)]
    recent = [asked(NOW_S - idle_s)]
    return FleetState(NOW_S, workers, recent, **({"may_sleep": True} | more))


def asked(at_s=900.0, came=None):
    return PastRequest(at_s, "w0", SimRequest("r", (), (1,) * 8, 8, 4), came=came)


def past(at_s, needed, size=4):
    return Proposal(at_s, "slo", size, size, R.ENOUGH, inputs={"needed": needed})


def of(size):
    return Pools(0, size) if isinstance(size, int) else Pools(*size)


def run(policy, state, shares=None, **rules):
    """The victim is the last worker of its pool."""

    def predict(asked):
        key = (asked.prefill, asked.decode) if state.has_roles else asked.decode
        assert shares is not None
        return Prediction(
            asked.size, 100, shares[key], 1.0, 0.5, asked if state.has_roles else None
        )

    rules = {"min_workers": 1, "max_workers": 8} | rules
    return propose(
        policy, state, Rules(**rules), predict, lambda state: state.those(Phase.LIVE)[-1].name
    )


PENDING, DRAINING = worker("p", None, Phase.PENDING), worker("d", None, Phase.DRAINING)
P_PENDING = replace(PENDING, role=Role.PREFILL)
DUMB = worker("dumb", None)
BUSY = worker("busy", replace(CALM, prefill_queue=2.0))
SLEEPY = {"min_workers": 0, "idle_s": 300.0}
TIGHT = {"max_workers": 4}
LAST = Proposal(NOW_S - 30, "threshold", 4, 5, R.PREFILL_QUEUE)
"""It saw four workers, and asked for five."""
NOT_YET, LONG_AGO = [past(NOW_S - 59.0, 3)], [past(NOW_S - 61.0, 3), past(NOW_S - 59.0, 3)]
"""A step down costs the start of 60 s and 0.5 s of prefills, so it is kept for so long."""
MADE = Proposal(0.0, "slo", 4, 4, R.ENOUGH, None, {"needed": 3.0}, (), Pools(2, 2), Pools(2, 2))

CASES = [
    # threshold: one more if either load is high, one less if both are low
    ("threshold", fleet(4), {}, 4, R.ENOUGH),
    ("threshold", fleet(4, prefill_queue=0.5), {}, 4, R.ENOUGH),
    ("threshold", fleet(4, prefill_queue=0.51), {}, 5, R.PREFILL_QUEUE),
    ("threshold", fleet(4, kv_usage=0.9), {}, 4, R.ENOUGH),
    ("threshold", fleet(4, kv_usage=0.91), {}, 5, R.KV_LOAD),
    ("threshold", fleet(4, kv_usage=0.85, waiting=3.0), {}, 5, R.KV_LOAD),  # 0.85 + 3 * 0.02
    ("threshold", fleet(4, prefill_queue=0.19, kv_usage=0.49), {}, 3, R.LOW_LOAD),
    ("threshold", fleet(4, prefill_queue=0.2, kv_usage=0.49), {}, 4, R.ENOUGH),
    ("threshold", fleet(4, prefill_queue=0.19, kv_usage=0.5), {}, 4, R.ENOUGH),
    ("threshold", fleet(3, BUSY, prefill_queue=0.0), {}, 4, R.ENOUGH),  # a mean of 0.5
    ("threshold", fleet(3, PENDING, prefill_queue=9.0), {}, 4, R.CHANGE_UNDER_WAY),
    ("threshold", fleet(3, DRAINING, prefill_queue=9.0), {}, 3, R.CHANGE_UNDER_WAY),
    *(
        ("threshold", fleet(3, new, prefill_queue=0.0, kv_usage=0.0), {}, desired, reason)
        for since_s, desired, reason in ((LATELY_S, 4, R.GRACE), (BEFORE_S, 3, R.LOW_LOAD))
        for new in [worker("new", IDLE, since_s=since_s)]
    ),
    ("threshold", fleet(3, prefill_queue=0.0, kv_usage=0.0), {"min_workers": 2}, 2, R.LOW_LOAD),
    ("threshold", fleet(2, prefill_queue=0.0, kv_usage=0.0), {"min_workers": 2}, 2, R.AT_MINIMUM),
    ("threshold", fleet(3, prefill_queue=3.0), TIGHT, 4, R.PREFILL_QUEUE),
    ("threshold", fleet(4, prefill_queue=3.0), TIGHT, 4, R.AT_BUDGET),
    # with roles each pool has its own signal; both short: one that decodes
    ("threshold", pools(2, 2), {}, (2, 2), R.ENOUGH),
    ("threshold", pools(2, 2, SHORT), {}, (3, 2), R.PREFILL_QUEUE),
    ("threshold", pools(2, 2, CALM, FULL), {}, (2, 3), R.KV_LOAD),
    ("threshold", pools(2, 2, SHORT, FULL), {}, (2, 3), R.KV_LOAD),
    ("threshold", pools(2, 2, SHORT, IDLE), {}, (3, 2), R.PREFILL_QUEUE),
    ("threshold", pools(2, 2, SHORT, replace(CALM, kv_usage=0.9)), {}, (3, 2), R.PREFILL_QUEUE),
    ("threshold", pools(2, 2, IDLE, FULL), {}, (2, 3), R.KV_LOAD),
    ("threshold", pools(2, 2, FULL, SHORT), {}, (2, 2), R.ENOUGH),
    ("threshold", pools(1, 2, CALM, FULL, role=Role.BOTH), {}, (1, 3), R.KV_LOAD),
    ("threshold", pools(2, 2, IDLE), {}, (1, 2), R.LOW_LOAD),
    ("threshold", pools(2, 2, CALM, IDLE), {}, (2, 1), R.LOW_LOAD),
    ("threshold", pools(1, 2, CALM, FULL, P_PENDING), {}, (2, 2), R.CHANGE_UNDER_WAY),
    ("threshold", pools(1, 2, CALM, IDLE, d_since_s=LATELY_S), {}, (1, 2), R.GRACE),
    ("threshold", pools(1, 2, CALM, IDLE, d_since_s=BEFORE_S), {}, (1, 1), R.LOW_LOAD),
    ("threshold", pools(2, 1, IDLE, p_since_s=LATELY_S), {}, (2, 1), R.GRACE),
    ("threshold", pools(2, 1, IDLE, d_since_s=LATELY_S), {}, (1, 1), R.LOW_LOAD),
    ("threshold", pools(1, 1, IDLE, IDLE), {}, (1, 1), R.AT_MINIMUM),
    ("threshold", pools(2, 1, IDLE, IDLE), {"min_workers": 3}, (2, 1), R.AT_MINIMUM),
    # without budget, the pool that has too many makes room
    ("threshold", pools(2, 2, SHORT, IDLE), TIGHT, (2, 1), R.LOW_LOAD),
    ("threshold", pools(2, 2, IDLE, FULL), TIGHT, (1, 2), R.LOW_LOAD),
    ("threshold", pools(2, 2, CALM, FULL), TIGHT, (2, 2), R.AT_BUDGET),
    # slo: up at once, by two at most
    ("slo", fleet(4), {"shares": {4: 0.90, 5: 0.95}}, 5, R.SLO_MISSED),
    ("slo", fleet(4), {"shares": {4: 0.90, 5: 0.94, 6: 0.97}}, 6, R.SLO_MISSED),
    ("slo", fleet(4), {"shares": {4: 0.50, 5: 0.60, 6: 0.70}}, 6, R.SLO_MISSED),
    ("slo", fleet(4), {"shares": {4: 0.5, 5: 0.6}, "max_workers": 5}, 5, R.SLO_MISSED),
    ("slo", fleet(4), TIGHT | {"shares": {4: 0.5}}, 4, R.AT_BUDGET),
    ("slo", fleet(3, PENDING), {"shares": {4: 0.90, 5: 0.96}}, 5, R.SLO_MISSED),
    ("slo", fleet(3, DRAINING), {"shares": {3: 0.90, 4: 0.96}}, 4, R.SLO_MISSED),
    # down to the smallest that keeps it, looked for in steps of one, one, two
    ("slo", fleet(4), {"shares": {4: 0.97, 3: 0.94}}, 4, R.ENOUGH),
    ("slo", fleet(4), {"shares": {4: 0.95, 3: 0.95, 2: 0.94}}, 4, R.COOL_DOWN),
    ("slo", fleet(5), {"shares": {5: 1, 4: 1, 3: 1, 1: 1}}, 5, R.COOL_DOWN),
    ("slo", fleet(4), {"shares": {4: 1, 3: 1, 2: 1}, "min_workers": 2}, 4, R.COOL_DOWN),
    ("slo", fleet(2), {"shares": {2: 1.0}, "min_workers": 2}, 2, R.AT_MINIMUM),
    ("slo", fleet(3, PENDING), {"shares": {4: 1, 3: 1, 2: 0.5}}, 4, R.CHANGE_UNDER_WAY),
    (
        "slo",
        fleet(3, worker("new", since_s=LATELY_S)),
        *({"shares": {4: 1, 3: 1, 2: 0.5}}, 4, R.GRACE),
    ),
    ("slo", fleet(4, past=NOT_YET), {"shares": {4: 1, 3: 1, 2: 0.5}}, 4, R.COOL_DOWN),
    ("slo", fleet(4, past=[past(NOW_S - 60.5, 3)]), {"shares": {4: 1, 3: 1, 2: 0}}, 3, MET),
    ("slo", fleet(4, past=LONG_AGO), {"shares": {4: 1, 3: 1, 2: 0.5}}, 3, MET),
    (
        "slo",
        fleet(4, past=[*LONG_AGO, past(NOW_S - 30.0, 4)]),
        *({"shares": {4: 1, 3: 1, 2: 0.5}}, 4, R.COOL_DOWN),
    ),
    # with roles, one more where that helps most
    (
        "slo",
        pools(1, 2),
        *({"shares": {(1, 2): 0.8, (2, 1): 0.5, (2, 2): 0.99, (1, 3): 0.85}}, (2, 2), R.SLO_MISSED),
    ),
    (
        "slo",
        pools(1, 1),
        *({"shares": {(1, 1): 0.1, (2, 1): 0.2, (1, 2): 0.3, (2, 2): 0.6, (1, 3): 0.4}}, (2, 2)),
        R.SLO_MISSED,
    ),
    # another role for a worker where that suffices, but not while anything changes or one is new
    ("slo", pools(1, 3), {"shares": {(1, 3): 0.8, (2, 2): 0.95}}, (2, 2), R.OTHER_ROLE),
    ("slo", pools(3, 1), {"shares": {(3, 1): 0.8, (2, 2): 0.95}}, (2, 2), R.OTHER_ROLE),
    *(
        ("slo", state, {"shares": {(1, 3): 0.8, (2, 3): 0.96, (1, 4): 0.85}}, (2, 3), R.SLO_MISSED)
        for state in (
            pools(1, 2, CALM, CALM, replace(PENDING, role=Role.DECODE)),
            pools(1, 3, d_since_s=LATELY_S),
        )
    ),
    # at the budget only if that helps by one of a hundred requests
    *(
        (
            "slo",
            pools(2, 3),
            {"shares": {(2, 3): 0.8, (1, 4): 0.5, (3, 2): share}, "max_workers": 5},
            *wanted,
        )
        for share, wanted in (
            (0.82, ((3, 2), R.OTHER_ROLE)),
            (0.81, ((3, 2), R.OTHER_ROLE)),
            (0.80, ((2, 3), R.AT_BUDGET)),
        )
    ),
    # down where that costs least
    *(
        ("slo", pools(2, 2, past=proposals), {"shares": shares}, *wanted)
        for shares in [{(2, 2): 1, (1, 2): 0.9, (2, 1): 0.97, (1, 1): 0.5}]
        for proposals, wanted in (
            ((), ((2, 2), R.COOL_DOWN)),
            ([replace(MADE, at_s=NOW_S - 600.0)], ((2, 1), MET)),
        )
    ),
    ("slo", pools(2, 2), {"shares": {(2, 2): 1, (1, 2): 0.9, (2, 1): 0.9}}, (2, 2), R.ENOUGH),
    ("slo", pools(1, 1), {"shares": {(1, 1): 1.0}}, (1, 1), R.AT_MINIMUM),
    # all: without metrics nothing, but never below the minimum, nor beyond the budget
    *((p, fleet(2, DUMB), {}, 3, R.NO_METRICS) for p in POLICIES),
    *((p, fleet(2, DUMB), {"min_workers": 5}, 5, R.BELOW_MINIMUM) for p in POLICIES),
    *((p, fleet(5), {"max_workers": 2}, 4, R.OVER_BUDGET) for p in POLICIES),
    ("threshold", fleet(0), {}, 1, R.BELOW_MINIMUM),
    # each pool keeps a worker, whatever the budget
    ("threshold", pools(0, 3), {}, (1, 3), R.BELOW_MINIMUM),
    ("threshold", pools(2, 0), {}, (2, 1), R.BELOW_MINIMUM),
    ("threshold", pools(0, 0), {"min_workers": 3}, (1, 2), R.BELOW_MINIMUM),
    ("threshold", pools(2, 3), TIGHT, (2, 2), R.OVER_BUDGET),
    ("threshold", pools(3, 2), TIGHT, (2, 2), R.OVER_BUDGET),
    ("threshold", pools(2, 2), {"max_workers": 3}, (2, 1), R.OVER_BUDGET),
    ("threshold", fleet(2), {"max_workers": 1}, 1, R.OVER_BUDGET),
    ("threshold", pools(1, 1), {"max_workers": 1}, (1, 1), R.ENOUGH),
    # a size that somebody else changed is accepted for an interval
    *(
        ("threshold", fleet(size, prefill_queue=3.0, past=[LAST]), {}, desired, reason)
        for size, desired, reason in (
            *((3, 3, R.FLEET_CHANGED), (4, 5, R.PREFILL_QUEUE), (5, 6, R.PREFILL_QUEUE)),
            (6, 6, R.FLEET_CHANGED),
        )
    ),
    ("threshold", fleet(3, past=[LAST, past(999.0, 0, 3)]), {}, 3, R.ENOUGH),
    ("threshold", pools(2, 2, SHORT, past=[MADE]), {}, (3, 2), R.PREFILL_QUEUE),
    ("threshold", pools(1, 3, SHORT, past=[MADE]), {}, (1, 3), R.FLEET_CHANGED),
    # sleep: the last leaves only after it was idle for long, and if its models stay known
    *(
        case
        for p in POLICIES
        for case in (
            (p, sleepy(1, 299.0), SLEEPY | {"shares": {1: 1.0}}, 1, R.AT_MINIMUM),
            (p, sleepy(1, 301.0), SLEEPY, 0, R.IDLE),
            (p, sleepy(0, 301.0), SLEEPY, 0, R.ASLEEP),
        )
    ),
    ("threshold", sleepy(2, 301.0), SLEEPY, 1, R.IDLE),
    ("threshold", sleepy(1, 999.0, may_sleep=False), SLEEPY, 1, R.AT_MINIMUM),
    ("threshold", sleepy(1, 999.0, somebody_waits=True), SLEEPY, 1, R.AT_MINIMUM),
    ("threshold", sleepy(1, 999.0, replace(IDLE, requests=0.1)), SLEEPY, 1, R.AT_MINIMUM),
    ("threshold", sleepy(1, 999.0, since_s=999.0), SLEEPY, 1, R.AT_MINIMUM),
    ("threshold", sleepy(0, 999.0, somebody_waits=True), SLEEPY, 1, R.WOKEN),
    ("threshold", sleepy(0, 999.0, may_sleep=False), SLEEPY, 1, R.BELOW_MINIMUM),
    *(
        ("threshold", replace(state, may_sleep=True), SLEEPY, wanted, R.IDLE)
        for state, wanted in (
            *((pools(1, 1, IDLE, IDLE), (0, 1)), (pools(0, 1, IDLE, IDLE), (0, 0))),
        )
    ),
    ("threshold", replace(pools(0, 0), somebody_waits=True), SLEEPY, (1, 1), R.WOKEN),
    ("threshold", replace(pools(1, 0), somebody_waits=True), SLEEPY, (1, 1), R.BELOW_MINIMUM),
]


@pytest.mark.parametrize(("policy", "state", "given", "desired", "reason"), CASES)
def test_a_fleet_gets_the_size_that_its_policy_wants(policy, state, given, desired, reason):
    proposal = run(policy, state, **given)
    before, after = state.pools, of(desired)
    assert (proposal.after, proposal.reason) == (after, reason)
    assert (proposal.size, proposal.desired) == (before.size, after.size)
    assert (proposal.pools, proposal.desired_pools) == (
        (before, after) if state.has_roles else (None, None)
    )
    less = Role.PREFILL if after.prefill < before.prefill else Role.DECODE
    leaves = after.prefill < before.prefill or after.decode < before.decode
    assert proposal.victim == (state.live_in(less)[-1].name if leaves else None)
    more = {Role.PREFILL: after.prefill - before.prefill}
    more[Role.DECODE if state.has_roles else Role.BOTH] = after.decode - before.decode
    assert proposal.starts == {role: count for role, count in more.items() if count > 0}
    # All that may be asked for was, and is told.
    told = {(p.fleet.prefill, p.fleet.decode) if p.pools else p.size for p in proposal.candidates}
    assert told == given.get("shares", {}).keys() or not proposal.candidates


def spare(*needed):
    """Proposals every 30 s, the last one now, for four workers of which so many are needed."""
    worth_s = (40.0, 29.0, 90.0, 50.0)
    workers = [worker(f"w{n}", worth_s=each_s) for n, each_s in enumerate(worth_s)]
    made = []
    for number, enough in enumerate(needed):
        now_s = NOW_S - 30.0 * (len(needed) - 1 - number)
        state = FleetState(now_s, workers, proposals=made, startup_s=60.0)
        shares = {size: 0.99 if size >= enough else 0.5 for size in range(1, 5)}
        made = [*made, run("slo", state, shares)]
    return made


@pytest.mark.parametrize(
    ("needed", "desired", "reason"),
    [
        ((3, 3, 3), 4, R.COOL_DOWN),
        # a start of 60 s, a cache worth 29 s, and 0.5 s of prefills that would move elsewhere
        ((3, 3, 3, 3), 3, MET),
        ((3, 3, 4, 3), 4, R.COOL_DOWN),
        ((4, 3, 3, 3), 3, MET),
    ],
)
def test_slo_removes_one_when_it_has_been_spare_for_as_long_as_its_return_would_cost(
    needed, desired, reason
):
    last = spare(*needed)[-1]
    assert (last.desired, last.reason, last.inputs["change_s"]) == (desired, reason, 89.5)


@pytest.mark.parametrize(("needed", "desired"), [(2, 2), (3, 3)])
def test_slo_removes_those_that_have_been_spare_as_long_one_after_the_other(needed, desired):
    before = spare(*[needed] * 4)
    assert before[-1].desired == 3
    shares = {size: 0.99 if size >= needed else 0.5 for size in (1, 2, 3)}
    state = fleet(3, now_s=NOW_S + 30.0, past=before)
    assert run("slo", state, shares).desired == desired


def test_slo_keeps_no_worker_for_longer_than_ten_minutes_whatever_its_cache_is_worth():
    dear = [worker(f"w{n}", worth_s=1e6) for n in range(4)]
    shares = {1: 0.5, 2: 0.5, 3: 1.0, 4: 1.0}
    before = [run("slo", FleetState(NOW_S - 600.0, dear), shares)]
    for now_s, desired in ((NOW_S - 1.0, 4), (NOW_S, 3)):
        assert run("slo", FleetState(now_s, dear, proposals=before), shares).desired == desired


def test_equal_shares_are_told_apart_by_the_time_to_the_first_token():
    late = {(1, 2): 9.0, (2, 1): 1.0}

    def predict(asked):
        p99_s = late.get((asked.prefill, asked.decode), 5.0)
        return Prediction(asked.size, 100, 0.99 if asked.size > 2 else 0.5, p99_s, 0.5, asked)

    proposal = propose("slo", pools(1, 1), Rules(), predict, lambda _: "")
    assert proposal.desired_pools == Pools(2, 1)


GOOD, LATE, SLOW = Latencies(0.1, 0.01), Latencies(60.0, 0.01), Latencies(0.1, 0.11)


@pytest.mark.parametrize(
    ("since_s", "found"), [(0.0, (4, 0.5)), (903.0, (1, 1.0)), (904.0, (1, 1.0)), (950.0, (0, 1.0))]
)
def test_attained_is_what_came_of_the_requests_that_somebody_told_of(since_s, found):
    recent = [asked(900.0 + n, came) for n, came in enumerate((GOOD, LATE, SLOW, None, GOOD))]
    assert attained(replace(fleet(1), recent=recent), Rules().slo, since_s) == found


@pytest.mark.parametrize(
    ("met", "aim", "share", "desired"),
    [
        *((200, 0.95, 0.96, 4), (190, 0.95, 0.96, 4), (189, 0.96, 0.96, 4), (188, 0.97, 0.96, 5)),
        *((186, 0.97, 0.965, 5), (186, 0.97, 0.995, 4)),
    ],
)
def test_slo_aims_above_its_target_by_what_was_missed(met, aim, share, desired):
    recent = [asked(came=GOOD)] * met + [asked(came=LATE)] * (200 - met)
    recent += [asked(NOW_S - 1800.1, LATE)] * 50  # too long ago
    proposal = run("slo", replace(fleet(4), recent=recent), {3: 0.90, 4: share, 5: 1.0})
    assert proposal.desired == desired
    inputs = proposal.inputs
    assert (inputs["attained"], inputs["aim"]) == (met / 200, pytest.approx(aim))
    assert (inputs["requests"], inputs["known"], inputs["attainment"]) == (100, 200, share)


def test_workers_that_are_not_there_have_no_load():
    assert run("threshold", fleet(0, PENDING)).inputs == {"prefill_queue": 0.0, "kv_load": 0.0}
