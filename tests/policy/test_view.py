"""The workers as decisions see them, from hand-made numbers."""

import math
from dataclasses import asdict, fields, replace

import pytest

from app.core.loads import ROUND, Load, Loads, Reservation, Snapshot
from app.core.overlaps import Overlaps, Resume
from app.core.types import Incarnation, TierOverlap, WorkerKey
from app.core.verdicts import Mark, Marks, MarksByWorker
from app.core.worker_report import DEFAULT_SPEED, NO_READINGS, ForwardPassMetrics, WorkerInfo
from app.policy.view import View, load_statistics
from app.policy.workers import UNMEASURED, Measurement, Workers

NO_METRICS = ForwardPassMetrics()
ONE, TWO, THREE = Incarnation(1), Incarnation(2), Incarnation(3)


def info(worker_id, max_requests=256):
    return WorkerInfo(
        WorkerKey(worker_id),
        f"http://{worker_id}:8081",
        block_size=16,
        kv_total_blocks=1000,
        max_requests=max_requests,
    )


def measured(metrics=NO_METRICS, at_ms=0, speed=DEFAULT_SPEED):
    return Measurement(metrics, speed, NO_READINGS, at_ms)


def column(candidates, position):
    return {f.name: float(getattr(candidates, f.name)[position]) for f in fields(candidates)}


def test_every_column_shows_what_its_name_says():
    reported = ForwardPassMetrics(
        request_active_slots=3,
        request_total_slots=8,
        kv_active_blocks=70,
        kv_total_blocks=900,
        num_requests_waiting=2,
        gpu_cache_usage_perc=0.5,
        kv_idle_before_evict_s=12.0,
    )
    load = Load(
        prefill_tokens=1000,
        prefill_us=5_000_000,
        head_us=2_000_000,
        head_since_ms=10_000,
        blocks=40,
        requests=4,
        decoding=1,
        total=9,
        routed_tokens=7_000_000,
        routed_at=2 * ROUND,
        sending_until_ms=11_250,
        receiving_until_ms=11_500,
    )
    workers = Workers([(ONE, info("a"), UNMEASURED), (TWO, info("b", 6), measured(reported))])
    view = View(Snapshot(11_000, Loads.of({ONE: Load(), TWO: load}), rounds=18 * ROUND), workers)
    seen = view.candidates(Overlaps({TWO: TierOverlap(5, 3, 1), THREE: TierOverlap(9)}))
    assert column(seen, 1) == {
        "overlap_device": 5,
        "overlap_host": 3,
        "overlap_disk": 1,
        "prefill_tokens": 1000,
        "prefill_s": 4.0,
        "active_blocks": 40,
        "active_requests": 4,
        "decoding_requests": 1,
        "max_requests": 6,
        "routed_tokens": pytest.approx(7_000_000 / math.e),
        "sending_s": 0.25,
        "receiving_s": 0.5,
        "others_requests": 0,
        "kv_active_blocks": 70,
        "kv_total_blocks": 900,
        "num_requests_waiting": 2,
        "gpu_cache_usage": 0.5,
        "request_active_slots": 3,
        "request_total_slots": 8,
        "kv_idle_before_evict_s": 12.0,
        **asdict(DEFAULT_SPEED),
    }
    assert seen.kv_total_blocks.tolist() == [1000, 900], "as registered, until it is reported"
    assert seen.overlap_device.tolist() == [0, 5]


def test_a_reservation_counts_for_later_decisions_but_not_for_earlier_ones():
    workers = Workers([(ONE, info("a"), UNMEASURED), (TWO, info("b"), UNMEASURED)])
    view = View(Snapshot(1000, Loads.of({ONE: Load(), TWO: Load()})), workers)
    before = view.candidates(Overlaps())
    view.add(1, Reservation("r1", prefill_tokens=48, prefill_us=300_000, blocks=3))
    assert before.active_requests.tolist() == [0, 0]
    after = column(view.candidates(Overlaps()), 1)
    assert (after["active_requests"], after["active_blocks"]) == (1, 3)
    assert (after["prefill_tokens"], after["prefill_s"]) == (48, 0.3)
    assert view.loads[1].total == 1


def test_what_was_routed_to_a_worker_fades_as_reservations_follow():
    workers = Workers([(ONE, info("a"), UNMEASURED), (TWO, info("b"), UNMEASURED)])
    view = View(Snapshot(0, Loads.of({ONE: Load(), TWO: Load()})), workers)
    view.add(0, Reservation("r", prefill_tokens=10**6, prefill_us=1, blocks=1))
    for n in range(32):
        view.add(1, Reservation(f"r{n}", prefill_tokens=0, prefill_us=0, blocks=1))
    # 32 reservations among two workers are 16 rounds.
    assert view.candidates(Overlaps()).routed_tokens == pytest.approx([10**6 / math.e, 0])
    again = View(
        Snapshot(0, Loads.of({ONE: view.loads[0], TWO: view.loads[1]}), rounds=view.rounds), workers
    )
    assert again.candidates(Overlaps()).routed_tokens == pytest.approx([10**6 / math.e, 0])


def test_a_worker_counts_as_fast_as_the_fastest_one_until_it_is_measured():
    slow, fast, own = (replace(DEFAULT_SPEED, prefill_s_per_token=s) for s in (3e-6, 1e-6, 5e-6))
    before = Workers(
        [
            (ONE, info("a"), UNMEASURED),
            (TWO, info("b"), measured(speed=slow)),
            (THREE, info("c"), measured(speed=fast)),
        ]
    )
    after = before.with_measured({ONE: measured(speed=own)})
    snapshot = Snapshot(0, Loads.of(dict.fromkeys((ONE, TWO, THREE), Load())))
    prefills = [
        View(snapshot, workers).candidates(Overlaps()).prefill_s_per_token.tolist()
        for workers in (before, after)
    ]
    assert prefills == [[1e-6, 3e-6, 1e-6], [5e-6, 3e-6, 1e-6]]


def test_a_view_without_workers_has_no_block_size_and_no_openings():
    view = View(Snapshot(0, Loads.of({})), Workers([]))
    assert view.block_size is None
    assert (view.openings(math.inf), view.shortest_queue_s) == (0, 0.0)
    assert view.candidates(Overlaps({ONE: TierOverlap(1)})).max_requests.size == 0


def test_a_full_or_overfull_worker_has_no_opening_and_takes_none_from_others():
    known = Workers([(inc, info(str(inc)), UNMEASURED) for inc in (ONE, TWO, THREE)])
    loads = {ONE: Load(requests=256), TWO: Load(requests=300), THREE: Load(requests=250)}
    view = View(Snapshot(now_ms=0, loads=Loads.of(loads)), known)
    assert (view.openings(math.inf), view.openings(10.0)) == (6, 1)
    loads[THREE].prefill_us = 10_000_000
    view = View(Snapshot(now_ms=0, loads=Loads.of(loads)), known)
    assert (view.openings(10.0), view.openings(9.9)) == (1, 0)


def test_a_prompt_may_fill_a_whole_worker_and_one_of_unknown_size_holds_any():
    sized, unknown = info("a"), replace(info("b"), kv_total_blocks=0)
    known = Workers([(ONE, sized, UNMEASURED), (TWO, unknown, UNMEASURED)])
    view = View(Snapshot(now_ms=0, loads=Loads.of({ONE: Load(), TWO: Load()})), known)
    assert [view.all_hold(blocks) for blocks in (1000, 1001)] == [True, False]


def test_the_spread_of_load_is_a_sample_standard_deviation():
    """Three workers use 0.1, 0.2 and 0.6 of their blocks: mean 0.3, and the squares of the
    deviations, 0.04 + 0.01 + 0.09, halved are 0.07. Workers that report no blocks, or reported
    them too long ago, are left out."""
    reports = [
        ForwardPassMetrics(kv_active_blocks=n, kv_total_blocks=1000) for n in (100, 200, 600)
    ]
    known = [measured(report, at_ms=9_500) for report in (*reports, ForwardPassMetrics())]
    known += [measured(reports[0], at_ms=8_000), UNMEASURED]
    workers = [(Incarnation(n), info(f"w{n}"), one) for n, one in enumerate(known)]

    def at(now_ms):
        loads = {inc: Load() for inc, _, _ in workers}
        return load_statistics(View(Snapshot(now_ms, Loads.of(loads)), Workers(workers)))

    mean, std = at(10_000)
    assert mean == pytest.approx(0.3)
    assert std == pytest.approx(0.07**0.5)
    assert at(12_000) == (0.0, 0.0), "all stale by then"


def test_one_worker_has_a_mean_load_but_no_spread():
    report = ForwardPassMetrics(kv_active_blocks=250, kv_total_blocks=1000)
    view = View(Snapshot(0, Loads.of({ONE: Load()})), Workers([(ONE, info("a"), measured(report))]))
    assert load_statistics(view) == (0.25, 0.0)
    assert load_statistics(View(Snapshot(0, Loads.of({})), Workers([]))) == (0.0, 0.0)


def view_of(*infos):
    known = [(Incarnation(n), info, UNMEASURED) for n, info in enumerate(infos, 1)]
    return View(Snapshot(0, Loads.of({inc: Load() for inc, _, _ in known})), Workers(known))


@pytest.mark.parametrize(
    ("held", "isl_tokens", "reused"),
    [
        (TierOverlap(device=7), 200, TierOverlap(device=4)),
        (TierOverlap(device=8), 200, TierOverlap(device=8)),
        (TierOverlap(device=3), 200, None),
        # The slowest blocks are the last ones.
        (TierOverlap(device=2, host=3, disk=2), 200, TierOverlap(device=2, host=2)),
        # The last token is always computed, and with it all of its engine's block.
        (TierOverlap(device=8), 8 * 16, TierOverlap(device=4)),
        (TierOverlap(device=8), 8 * 16 + 1, TierOverlap(device=8)),
    ],
)
def test_an_engine_reuses_only_whole_blocks_of_its_own(held, isl_tokens, reused):
    view = view_of(info("a"), replace(info("b"), reuse_blocks=4))
    overlaps = view.reusable(Overlaps({ONE: held, TWO: held}), isl_tokens)
    assert overlaps == {ONE: held} | ({TWO: reused} if reused else {})


@pytest.mark.parametrize(
    ("reuse_blocks", "recomputed_blocks", "num_held", "num_reused"),
    [(1, 1, 5, 4), (1, 1, 1, 0), (4, 4, 11, 4), (4, 4, 7, 0)],
)
def test_an_engine_that_looks_ahead_computes_its_last_blocks_again(
    reuse_blocks, recomputed_blocks, num_held, num_reused
):
    worker = replace(info("a"), reuse_blocks=reuse_blocks, recomputed_blocks=recomputed_blocks)
    overlaps = view_of(worker).reusable(Overlaps({ONE: TierOverlap(num_held)}), 1000)
    assert overlaps.get(ONE, TierOverlap()) == TierOverlap(num_reused)


@pytest.mark.parametrize(
    ("resume", "isl_tokens", "reused"),
    [
        (Resume(9, 5, 5), 1000, TierOverlap(5)),
        (Resume(9, 8, 8), 1000, TierOverlap(6, 2)),
        (Resume(9, 9, 4), 1000, TierOverlap(6, 3)),
        (Resume(9, 9, 4), 9 * 16, TierOverlap(4)),
        (Resume(9, 9, 4), 9 * 16 + 1, TierOverlap(6, 3)),
        (Resume(9, 0, 0), 1000, None),
    ],
)
def test_where_the_index_says_that_an_engine_goes_on_counts_before_its_numbers(
    resume, isl_tokens, reused
):
    view = view_of(replace(info("a"), reuse_blocks=4), info("b"))
    held = Overlaps(dict.fromkeys((ONE, TWO), TierOverlap(6, 3)), resumes={ONE: resume})
    found = view.reusable(held, isl_tokens)
    assert found.get(ONE) == reused
    assert found[TWO] == TierOverlap(6, 3)


def test_where_more_is_foreseen_than_held_the_numbers_count():
    view = view_of(replace(info("a"), reuse_blocks=4))
    foreseen = Overlaps({ONE: TierOverlap(11)}, resumes={ONE: Resume(9, 5, 5)})
    assert view.reusable(foreseen, 1000) == {ONE: TierOverlap(8)}


def test_overlaps_of_workers_that_reuse_every_block_are_passed_on():
    overlaps = Overlaps({ONE: TierOverlap(5, 3, 1), THREE: TierOverlap(9)})
    assert view_of(info("a"), info("b")).reusable(overlaps, 1000) is overlaps


def test_what_many_hold_alike_is_shown_as_if_it_were_of_each():
    known = Workers([(Incarnation(n), info(f"w{n}"), UNMEASURED) for n in range(1, 101)])
    view = View(Snapshot(0, Loads.of({inc: Load() for inc in known.incarnations})), known)
    many = frozenset(map(Incarnation, range(1, 90)))
    fewer = frozenset(map(Incarnation, [*range(20, 60), 200]))
    overlaps = Overlaps(
        {Incarnation(7): TierOverlap(9), Incarnation(95): TierOverlap(1)},
        [(many, TierOverlap(4)), (fewer, TierOverlap(4, 3, 2))],
    )
    each = Overlaps(overlaps.flat())
    assert dict(each) == {inc: overlaps[inc] for inc in overlaps}
    assert (len(overlaps), overlaps.longest) == (91, 9)
    assert Incarnation(99) not in overlaps
    for one, other in zip(
        asdict(view.candidates(overlaps)).values(),
        asdict(view.candidates(each)).values(),
        strict=True,
    ):
        assert one.tolist() == other.tolist()


def test_late_first_tokens_are_a_price_that_fades_but_while_its_next_try_is_overdue():
    marks = Marks(late=Mark(late_ms=8000, at_ms=100_000))

    def late_s(now_ms, load, metrics=None):
        workers = Workers(
            [
                (ONE, info("a"), UNMEASURED),
                (TWO, info("b"), UNMEASURED if metrics is None else measured(metrics)),
            ]
        )
        loads = Loads.of({ONE: load, TWO: Load()})
        snapshot = Snapshot(now_ms, loads, marks=MarksByWorker({ONE: marks}))
        late = View(snapshot, workers).late_s
        return [] if late is None else [round(value, 1) for value in late.tolist()]

    trying = Load(requests=1, head_since_ms=160_000, prefill_us=500_000, head_us=500_000)
    assert late_s(100_000, Load()) == [8.0, 0.0]
    assert late_s(107_000, Load()) == [2.9, 0.0]
    assert late_s(160_000, trying) == []
    assert late_s(162_500, trying) == [2.0, 0.0]
    assert late_s(199_000, trying) == [8.0, 0.0]
    assert late_s(199_000, replace(trying, decoding=1)) == []
    # And what an agent says of its own engine counts as before.
    assert late_s(100_000, Load(), ForwardPassMetrics(late_s=9.0)) == [0.0, 1.0]
