"""Decisions from hand-made numbers: which worker, and what is reserved on it."""

from dataclasses import replace

import numpy as np
import pytest

from app.core.errors import AllWorkersBusy, NoWorkers, PromptTooLarge
from app.core.loads import Load, Loads, Snapshot
from app.core.overlaps import Overlaps
from app.core.pace import Pace
from app.core.settings.kinds import PRIORITIES
from app.core.settings.router import RouterSettings
from app.core.trust import Trust
from app.core.types import SequenceHash, TierOverlap
from app.core.worker_report import NO_READINGS, ForwardPassMetrics, Speed
from app.policy.cost import latency
from app.policy.decision import Query, RouteRequest
from app.policy.locality import Best, Locality
from app.policy.plan import WorkerSelector
from app.policy.record import OTHER_TERMS, record_of
from app.policy.view import View
from app.policy.workers import Measurement, Workers
from tests.policy.test_view import ONE, THREE, TWO, info

SPEED = Speed(
    prefill_s_per_token=0.001,
    prefill_s_per_token2=0.0,
    decode_s_per_kv_token=0.0,
    decode_s_per_seq=0.0,
    host_s_per_token=0.0,
    disk_s_per_token=0.0,
    mean_output_tokens=0.0,
)
"""A millisecond for each token that is not cached, and nothing else."""


def view_of(*loads, max_requests=4, now_ms=5000):
    """Workers a, b, c with these loads, a thousand blocks of 16 tokens each."""
    measured = Measurement(ForwardPassMetrics(kv_total_blocks=1000), SPEED, NO_READINGS, at_ms=0)
    incarnations = [ONE, TWO, THREE][: len(loads)]
    workers = [
        (inc, info(name, max_requests), measured)
        for inc, name in zip(incarnations, "abc", strict=False)
    ]
    return View(
        Snapshot(now_ms, Loads.of(dict(zip(incarnations, loads, strict=True)))), Workers(workers)
    )


def query(overlaps=None, *, policy="latency", tokens=100, session_at=None, **options):
    chain = [SequenceHash(n) for n in range(1, tokens // 16 + 1)]
    request = RouteRequest("r1", chain, tokens, policy, **options)
    held = Overlaps(overlaps or {})
    return Query(request, "aa", 1000, held, session_at=session_at, tries=1, waited_ms=7)


def plan(asked, view, *, degraded=False, **settings):
    return WorkerSelector(RouterSettings(seed=1, **settings)).plan(asked, view, degraded=degraded)


def worker(planned):
    return planned.decision.worker.key.worker_id


def test_the_worker_that_holds_the_prompt_is_chosen_and_only_the_rest_is_reserved():
    """Of 100 tokens, 7 blocks, b holds 3 blocks: 52 tokens are left, 52 ms."""
    planned = plan(query({TWO: TierOverlap(2, 1)}), view_of(Load(total=5), Load(total=8)))
    assert (worker(planned), planned.position, planned.reservation.incarnation) == ("b", 1, TWO)
    reserved = planned.reservation
    assert (reserved.prefill_tokens, reserved.prefill_us, reserved.blocks) == (52, 52_000, 7)
    assert (reserved.request_id, reserved.attempt) == ("r1", "1000-aa")
    assert planned.reservation.seen_total == 8
    decision = planned.decision
    assert (decision.isl_tokens, decision.isl_blocks, decision.overlap.total) == (100, 7, 3)
    assert (decision.locality, decision.best) == (Locality.KEPT, Best("b:0", 3))
    assert (decision.tries, decision.waited_ms, decision.reserved) == (1, 7, True)


def test_a_fully_cached_prompt_still_reserves_the_token_that_engines_compute():
    planned = plan(query({ONE: TierOverlap(6)}, tokens=96), view_of(Load()))
    assert planned.reservation.prefill_tokens == 1


@pytest.mark.parametrize(
    ("queued_s", "chosen"),
    [(0.0, "a"), (0.05, "a"), (0.2, "b")],
    ids=["idle", "queue shorter than what is saved", "queue longer"],
)
def test_a_cached_prompt_waits_for_its_worker_only_while_that_is_quicker(queued_s, chosen):
    """A cache of 96 of 100 tokens saves 96 ms of prefill, and as much again to those behind it."""
    queue = Load(prefill_us=round(queued_s * 1e6), requests=1 if queued_s else 0)
    planned = plan(query({ONE: TierOverlap(6)}), view_of(queue, Load()))
    assert worker(planned) == chosen
    assert planned.decision.best == Best("a:0", 6)
    assert planned.decision.locality == (Locality.KEPT if chosen == "a" else Locality.LOAD)


def test_the_load_drains_with_the_time_of_the_view():
    """The queue of 200 ms began at 4.8 s: by 5 s it is empty."""
    head = Load(prefill_us=200_000, head_us=200_000, head_since_ms=4800, requests=1)
    overlaps = {ONE: TierOverlap(6)}
    assert worker(plan(query(overlaps), view_of(head, Load(), now_ms=5000))) == "a"
    assert worker(plan(query(overlaps), view_of(head, Load(), now_ms=4800))) == "b"


def test_a_worker_that_is_excluded_or_full_is_passed_over_and_the_reason_is_kept():
    overlaps = {ONE: TierOverlap(6)}
    for exclude in ("a", "a:0"):
        planned = plan(query(overlaps, exclude=frozenset({exclude})), view_of(Load(), Load()))
        assert (worker(planned), planned.decision.locality) == ("b", Locality.EXCLUDED)
    planned = plan(query(overlaps), view_of(Load(requests=4), Load()))
    assert (worker(planned), planned.decision.locality) == ("b", Locality.FULL)


def test_overlap_of_a_worker_past_its_lease_is_named_by_its_incarnation():
    planned = plan(query({THREE: TierOverlap(6)}), view_of(Load(), Load()))
    assert planned.decision.locality == Locality.LEASE
    assert planned.decision.best == Best("#3", 6)


def test_a_prompt_that_nobody_holds_has_no_locality_to_lose():
    planned = plan(query(), view_of(Load(), Load()))
    assert (planned.decision.locality, planned.decision.best) == (Locality.NONE, Best("", 0))


def test_a_draw_between_workers_that_cost_the_same_is_a_tie():
    asked, view = query({ONE: TierOverlap(6)}, policy="random"), view_of(Load(), Load())
    selectors = [WorkerSelector(RouterSettings(seed=seed)) for seed in range(20)]
    plans = [selector.plan(asked, view) for selector in selectors]
    found = {(worker(planned), planned.decision.locality) for planned in plans}
    assert found == {("a", Locality.KEPT), ("b", Locality.TIE)}


def test_a_session_pulls_its_request_to_where_it_last_went():
    """Half of what b lacks is assumed to be there: 50 tokens of prefill less than on a."""
    asked = query({ONE: TierOverlap(1)}, session_at=TWO)
    planned = plan(asked, view_of(Load(), Load()), session_affinity=0.5)
    assert (worker(planned), planned.decision.locality) == ("b", Locality.SESSION)
    gone = query({ONE: TierOverlap(1)}, session_at=THREE)
    assert worker(plan(gone, view_of(Load(), Load()), session_affinity=0.5)) == "a"


def test_no_decision_is_possible_without_workers_room_or_a_worker_that_is_large_enough():
    with pytest.raises(NoWorkers, match="no worker is alive"):
        plan(query(), view_of())
    with pytest.raises(NoWorkers, match=r"excludes all live workers \(1\)"):
        plan(query(exclude=frozenset({"a"})), view_of(Load()))
    full = view_of(*[Load(requests=4, prefill_us=us) for us in (3_000_000, 2_000_000)])
    with pytest.raises(AllWorkersBusy, match=r"all eligible workers \(2\) are full") as busy:
        plan(query(), full)
    assert busy.value.retry_after_s == 2.0
    with pytest.raises(PromptTooLarge, match="fills 1,001 blocks"):
        plan(query(tokens=16_001), view_of(Load()))


def test_a_request_waits_for_a_short_queue_unless_it_reserves_nothing():
    view = view_of(Load(prefill_us=3_000_000, requests=1))
    selector = WorkerSelector(RouterSettings(seed=1))
    assert worker(selector.plan(query(), view)) == "a"
    selector.max_queue_s = 2.0
    with pytest.raises(AllWorkersBusy, match="or have over 2 s of prefills queued"):
        selector.plan(query(), view)
    assert worker(selector.plan(query(reserve=False), view)) == "a"


def test_without_redis_the_least_loaded_worker_is_taken_however_full_it_looks():
    view = view_of(Load(requests=9), Load(requests=8))
    decision = plan(query({}, policy="latency"), view, degraded=True).decision
    assert (decision.worker.key.worker_id, decision.policy) == ("b", "least_loaded")
    assert (decision.locality, decision.degraded, decision.reserved) == (
        Locality.DEGRADED,
        True,
        False,
    )
    assert decision.trust is Trust.DEGRADED


def test_an_overlap_that_is_not_all_published_is_a_bound():
    view = view_of(Load())
    [holder] = view.incarnations
    asked = query({holder: TierOverlap(2)})
    assert plan(asked, view).decision.trust is Trust.EXACT
    asked.bound = {holder: 1}
    assert plan(asked, view).decision.trust is Trust.BOUND
    asked.trust = Trust.BLIND
    assert plan(asked, view).decision.trust is Trust.BLIND


def test_round_robin_takes_turns_that_only_reservations_use_up():
    selector, view = WorkerSelector(RouterSettings()), view_of(Load(), Load(), Load())
    turns = [
        worker(selector.plan(query(policy="round_robin", reserve=reserve), view))
        for reserve in (True, False, True, True, False, True)
    ]
    assert turns == ["a", "b", "b", "c", "a", "a"]


def test_an_explanation_lists_every_candidate_as_it_was_before_the_reservation():
    view = view_of(Load(requests=2, prefill_us=40_000), Load())
    planned = plan(query({ONE: TierOverlap(6)}, explain=True), view)
    planned.count()
    a, b = planned.decision.candidates
    assert (a.load.requests, a.queue_s, a.overlap.total, a.eligible) == (2, 0.04, 6, True)
    assert a.cost == pytest.approx(sum(a.terms.values()))
    assert (b.load.requests, b.overlap.total) == (0, 0)


def test_a_record_has_all_that_was_seen_as_often_as_its_rate_allows():
    view, details = view_of(Load(), Load()), Pace(per_s=2)
    planned = plan(query({TWO: TierOverlap(2)}), view)
    full, brief, later = (record_of(planned, details, now_s) for now_s in (10.0, 10.4, 10.5))
    assert full.seen is not None
    assert (full.seen.workers, full.seen.block_size) == (["a:0", "b:0"], 16)
    assert full.seen.candidates.overlap_device.tolist() == [0, 2]
    assert (brief.seen, later.seen is None) == (None, False)
    assert (brief.at_ms, brief.worker, brief.full_blocks, brief.best) == (
        5000,
        "b:0",
        6,
        Best("b:0", 2),
    )
    explained = record_of(plan(query(explain=True), view), details, 10.5)
    assert explained.seen is not None, "on request, whatever the rate"


def test_a_record_is_priced_again_with_what_does_not_follow_from_its_candidates():
    view = view_of(Load(requests=1, prefill_us=80_000), Load(), Load())
    view.late_s = np.array([0.0, 0.5, 0.0])
    view.failed_shares = np.array([0.0, 0.0, 0.4])
    view.away = {TWO: 0}
    asked = query({ONE: TierOverlap(6), TWO: TierOverlap(4)}, explain=True)
    planned = plan(replace(asked, computing=[ONE], published=Overlaps({})), view)
    record = record_of(planned, Pace(per_s=1), 10.0)
    for candidate, cost in zip(planned.decision.candidates, record.costs.cost, strict=True):
        assert cost == pytest.approx(candidate.cost)
    assert all(record.costs.terms[name].any() for name in OTHER_TERMS)
    assert record.seen is not None
    assert record.seen.workers[record.costs.cost.argmin()] == record.worker


def test_a_priority_counts_in_the_price_and_in_what_is_recorded_of_it():
    # The first worker is busy, and the second one has more to compute of the prompt.
    view = view_of(Load(requests=1, prefill_us=1_500_000), Load())
    held = {ONE: TierOverlap(6)}
    taken = {}
    for priority in PRIORITIES:
        planned = plan(query(held, tokens=400, priority=priority, explain=True), view)
        taken[priority] = worker(planned)
        record = record_of(planned, Pace(per_s=1), 10.0)
        assert record.seen is not None
        priced = latency(record.seen.candidates, record.size)
        told = [one.cost for one in planned.decision.candidates]
        assert priced.cost.tolist() == pytest.approx(told)
    assert taken == {"high": "b", "normal": "b", "low": "a"}
