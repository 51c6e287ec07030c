"""What engines report beyond what was reserved, in small numbers, and in much of own traffic."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from app.core.loads import Load, Loads, Reservation, Snapshot
from app.core.overlaps import Overlaps
from app.core.types import Incarnation, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, NO_READINGS, ForwardPassMetrics, WorkerInfo
from app.policy.choose import choose
from app.policy.cost import Candidates, RequestSize
from app.policy.view import View
from app.policy.workers import Measurement, Workers

BLOCK_SIZE, NUM_BLOCKS = 16, 10_000
NOW_MS = 1_000_000
SIZE = RequestSize(isl_tokens=1_600, block_size=BLOCK_SIZE)
BUSY = ForwardPassMetrics(
    request_active_slots=200,
    num_requests_waiting=200,
    kv_active_blocks=NUM_BLOCKS,
    kv_total_blocks=NUM_BLOCKS,
)
IDLE = ForwardPassMetrics(kv_total_blocks=NUM_BLOCKS)


def view_of(*workers, age_ms=100, max_requests=256):
    known = []
    for number, (metrics, _) in enumerate(workers, 1):
        info = WorkerInfo(
            WorkerKey(f"w{number}"), "http://w:1", BLOCK_SIZE, NUM_BLOCKS, max_requests
        )
        measured = Measurement(metrics, DEFAULT_SPEED, NO_READINGS, NOW_MS - age_ms)
        known.append((Incarnation(number), info, measured))
    loads = {inc: load for (inc, _, _), (_, load) in zip(known, workers, strict=True)}
    return View(Snapshot(NOW_MS, Loads.of(loads)), Workers(known))


def chosen(policy, view):
    return choose(
        policy,
        view.candidates(Overlaps()),
        SIZE,
        eligible=view.everybody,
        rng=np.random.default_rng(1),
    ).index


def rows(view, place):
    candidates = view.candidates(Overlaps())
    names = ("active_requests", "decoding_requests", "active_blocks", "prefill_s", "max_requests")
    return {name: float(getattr(candidates, name)[place]) for name in names}


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("policy", ["latency", "blocks", "least_loaded", "power_of_two"])
def test_what_others_have_in_an_engine_is_load_for_every_policy(policy, is_told):
    own = Load(requests=3, decoding=3, blocks=300)
    others = BUSY.beside(Load()) if is_told else BUSY
    assert chosen(policy, view_of((others, Load()), (IDLE, own))) == 1


def test_requests_of_others_count_as_if_they_were_reserved():
    """Of 30 that run, six are ours. Ten wait, of which one may be ours: it has no first token. Each
    prompt of theirs has 800 tokens, which are 50 blocks."""
    ours = Load(requests=7, decoding=6, blocks=100, prefill_us=50_000)
    report = ForwardPassMetrics(
        request_active_slots=30,
        num_requests_waiting=10,
        kv_active_blocks=5_000,
        kv_total_blocks=NUM_BLOCKS,
        mean_prefill_tokens=800.0,
    ).beside(ours)
    view = view_of((report, ours), (IDLE, Load()))
    waiting, running = 9, 40 - 7 - 1 - 9
    own_answers = 3 * 7 * 300 / 16
    prefill_s = 8.5e-5 * 800 + 1.1e-9 * 800**2 / 2
    assert rows(view, 0) == {
        "active_requests": 7 + waiting + running,
        "decoding_requests": 6 + running,
        "active_blocks": pytest.approx(5_000 - own_answers + waiting * 50),
        "prefill_s": pytest.approx(0.05 + waiting * prefill_s),
        "max_requests": 256 + waiting + running,
    }
    assert view.others_requests == [waiting + running, 0]
    assert rows(view, 1)["max_requests"] == 256


def test_blocks_in_use_that_nobody_asked_for_are_load_as_well():
    held = replace(IDLE, kv_active_blocks=NUM_BLOCKS).beside(Load())
    view = view_of((held, Load()), (IDLE, Load(requests=2, decoding=2, blocks=200)))
    assert rows(view, 0)["active_blocks"] == 0.9 * NUM_BLOCKS
    assert chosen("blocks", view) == 1


def test_a_report_that_is_old_counts_less_and_less():
    """Up to 3 s it counts in full; 5 s later by half. What was read before it was told is older."""
    told = BUSY.beside(Load())

    def others(metrics, age_ms):
        return view_of((metrics, Load()), age_ms=age_ms).others_requests[0]

    assert [others(told, age_ms) for age_ms in (0, 3_000, 8_000, 13_000)] == [
        399,
        399,
        pytest.approx(399 / 2),
        pytest.approx(399 / 4),
    ]
    assert others(replace(told, read_s_ago=10.0), 3_000) == pytest.approx(399 / 4)


def test_others_fill_no_worker():
    """Else all requests would be refused while others keep every engine busy."""
    view = view_of((BUSY.beside(Load()), Load()), max_requests=2)
    assert view.openings(float("inf")) == 2
    assert chosen("latency", view) == 0
    full = view_of((BUSY.beside(Load(requests=2)), Load(requests=2)), max_requests=2)
    assert full.openings(float("inf")) == 0


def test_a_reservation_leaves_what_others_have_as_it_is():
    view = view_of((BUSY.beside(Load()), Load()))
    before = rows(view, 0)
    view.add(0, Reservation("r", prefill_tokens=48, prefill_us=300_000, blocks=3))
    after = rows(view, 0)
    assert after["active_requests"] == before["active_requests"] + 1
    assert after["active_blocks"] == before["active_blocks"] + 3


def test_an_agent_that_does_not_say_what_was_reserved_is_believed_less():
    """Twelve have ended since it counted: of 30 that are reserved now, 45 may have been."""
    ours = Load(requests=30, decoding=30, blocks=300)
    counted = replace(IDLE, request_active_slots=42)
    assert view_of((counted, ours)).others_requests == [0]
    assert view_of((replace(counted, request_active_slots=60), ours)).others_requests == [13.5]


@dataclass
class Engine:
    """In virtual time. loads: what is reserved. running: requests in it."""

    load: Load = field(default_factory=Load)
    running: int = 0


def own_traffic(seed, rate, num_requests=3_000):
    """The requests that would be taken for others' in each of many reports of one engine, of which
    nobody else asks anything.

    A request is reserved, reaches the engine up to 20 ms later, runs for 2 s in the mean, and is
    given back up to 20 ms after its end. Its first token is told likewise. What is reserved is read
    up to 10 ms before the engine counts, and up to 10 ms after.
    """
    rng = random.Random(seed)
    events = []
    at_s = 0.0
    for number in range(num_requests):
        at_s += rng.expovariate(rate)
        arrives_s = at_s + rng.uniform(0.0, 0.02)
        ends_s = arrives_s + rng.expovariate(0.5)
        events += [(at_s, number, "reserve"), (arrives_s, number, "arrive")]
        events += [(ends_s, number, "end"), (ends_s + rng.uniform(0.0, 0.02), number, "release")]
    count_s = 0.0
    while count_s < at_s:
        count_s += 0.75
        before_s, after_s = count_s - rng.uniform(0, 0.01), count_s + rng.uniform(0, 0.01)
        events += [(before_s, -1, "before"), (count_s, -2, "count"), (after_s, -3, "after")]
    heapq.heapify(events)
    engine, beyond, reserved = Engine(), [], [Load()]
    metrics = IDLE
    while events:
        _, _, what = heapq.heappop(events)
        if what in ("reserve", "release"):
            engine.load.requests += 1 if what == "reserve" else -1
            engine.load.decoding = engine.load.requests
            engine.load.blocks = 100 * engine.load.requests
        elif what in ("arrive", "end"):
            engine.running += 1 if what == "arrive" else -1
        elif what == "count":
            used = 110 * engine.running  # prompts, and what was written of the answers
            metrics = replace(IDLE, request_active_slots=engine.running, kv_active_blocks=used)
        else:
            reserved = [*reserved[-1:], replace(engine.load)]
            if what == "after":
                view = view_of((metrics.beside(*reserved), engine.load))
                beyond += view.others_requests
                assert rows(view, 0)["active_blocks"] == engine.load.blocks
    return beyond


@pytest.mark.parametrize("rate", [2.0, 20.0, 60.0])
def test_nobodys_own_requests_are_counted_twice(rate):
    for seed in range(3):
        beyond = own_traffic(seed, rate)
        assert len(beyond) > 50
        assert max(beyond) <= 1.0, "of up to 150 that run at a time"
        assert np.mean(beyond) < 0.01


def test_a_view_of_workers_that_only_routers_use_adds_nothing():
    ours = Load(requests=5, decoding=4, blocks=500)
    report = replace(IDLE, request_active_slots=5, kv_active_blocks=600).beside(ours)
    view = view_of((report, ours), (IDLE, Load()))
    assert not view._workers.may_have_others  # so that it costs a decision nothing
    seen = view.candidates(Overlaps())
    assert isinstance(seen, Candidates)
    assert seen.others_requests.tolist() == [0, 0]
