"""The fleet in virtual time: what decisions see, and when."""

import numpy as np
import pytest

from app.core.loads import Load, Reservation
from app.policy.cost import Candidates
from app.simulation.books import Booking, Books
from app.simulation.profiles import PROFILES, USUAL
from app.simulation.setting import Setting, Sharing
from app.simulation.steps import SimRequest
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace
from loadtest.virtual import Simulation

SMALL = Setting(num_workers=4, seed=1)


def request(index, blocks, *, think_s=0.0):
    """A prompt of 1,024 tokens for each of `blocks`, and 10 tokens of output."""
    return TraceRequest(index, 1024 * len(blocks), 10, blocks, 1024, think_s)


def open_loop(*requests, every_s):
    sessions = [Session(i * every_s, (one,)) for i, one in enumerate(requests)]
    return Trace("made up", tuple(sessions))


def workers_of(trace, setting, policy="latency"):
    return [outcome.worker for outcome in Simulation(policy, setting).run(trace)]


def test_a_prompt_goes_where_its_prefix_is_cached():
    # Far enough apart to find every worker idle, so that workers differ only in their caches.
    trace = open_loop(*(request(i, (7, 8, 9)) for i in range(6)), every_s=10.0)
    outcomes = Simulation("latency", SMALL).run(trace)
    assert len({outcome.worker for outcome in outcomes}) == 1
    # Of 12 blocks of 256 tokens the last is computed again: its logits give the first new token.
    assert [outcome.cached_tokens for outcome in outcomes] == [0, *[11 * 256] * 5]


def test_a_seed_moves_sessions_and_keeps_a_burst_of_them_together():
    bursts = [request(i, (i,)) for i in range(60)]
    starts = [100.0 * (i // 20) + 0.005 * (i % 20) for i in range(60)]
    trace = Trace("bursts", tuple(Session(s, (r,)) for s, r in zip(starts, bursts, strict=True)))

    def shifts(seed):
        outcomes = Simulation("latency", Setting(seed=seed)).run(trace)
        return np.reshape([o.arrival_s for o in outcomes], (3, 20)) - np.reshape(starts, (3, 20))

    assert not shifts(0).any()
    assert all(np.ptp(shifts(seed), axis=1).max() < 0.005 for seed in (1, 2))
    assert (abs(shifts(1) - shifts(2)).max(axis=1) > 0.05).all()


@pytest.mark.parametrize("sharing", list(Sharing))
def test_everything_reserved_is_released(sharing):
    trace = read_trace(DEMO_TRACE).cut(0.0, None, 200)
    simulation = Simulation(
        "latency", Setting(num_workers=3, replicas=4, sharing=sharing, host_pool_tokens=100_000)
    )
    assert len(simulation.run(trace)) == 200
    replicas = simulation.fleet.replicas
    for replica in replicas:
        for books in replica.books:
            load = books.load
            assert load == Load(head_since_ms=load.head_since_ms, total=load.total)
    for worker in simulation.fleet.workers:
        assert worker.engine.metrics().kv_active_blocks == 0
        worker.engine.check()
    made = [
        sum(books.load.total for books in replica.books) for replica in simulation.fleet.replicas
    ]
    assert made == ([50] * 4 if sharing is Sharing.NONE else [200] * 4)


def test_a_turn_follows_the_answer_before_it_by_its_think_time():
    turns = (request(0, (1,)), request(1, (1, 2), think_s=5.0))
    trace = Trace("made up", (Session(2.0, turns),))
    setting = Setting(num_workers=2, profiles=(PROFILES["8b-1xh100"],))
    first, second = Simulation("latency", setting).run(trace)
    assert first.arrival_s == 2.0
    assert first.end_s is not None
    assert second.arrival_s == pytest.approx(first.end_s + 5.0)
    assert second.cached_tokens == 1024


def test_replicas_that_do_not_know_of_each_other_send_a_burst_to_one_worker():
    """Each replica gets one request of the burst, whose prefix is cached on one worker."""
    first = Session(0.0, (request(0, (7, 8, 9, 10)),))
    burst = [Session(30.0, (request(i, (7, 8, 9, 10, 100 + i)),)) for i in range(1, 9)]
    trace = Trace("made up", (first, *burst))

    def on_owner(sharing):
        setting = Setting(num_workers=4, replicas=8, sharing=sharing)
        owner, *rest = workers_of(trace, setting)
        return rest.count(owner)

    assert on_owner(Sharing.NONE) == on_owner(Sharing.LATE) == 8
    assert on_owner(Sharing.EXACT) < 8


def test_each_replica_takes_its_own_turns_of_round_robin():
    trace = open_loop(*(request(i, (i,)) for i in range(6)), every_s=10.0)
    workers = workers_of(trace, Setting(num_workers=3, replicas=2), "round_robin")
    assert workers == ["w0:0", "w0:0", "w1:0", "w1:0", "w2:0", "w2:0"]


def test_replicas_with_exact_sharing_retry_if_another_reserved_first():
    burst = open_loop(*(request(i, (i,)) for i in range(8)), every_s=0.0)
    simulation = Simulation("latency", Setting(num_workers=8, replicas=8))
    workers = [outcome.worker for outcome in simulation.run(burst)]
    assert len(set(workers)) == 8
    assert simulation.fleet.conflicts > 0
    assert max(outcome.attempts for outcome in simulation.outcomes) > 1


def test_a_refusal_delays_only_later_requests_for_the_same_worker():
    # One replica has requests 0, 2, 4, the other 1, 3, 5. Each decides its first alone, both for
    # w0: the other's is refused. Then one decides the rest for w1, w2; the other for w1, w2, w0.
    burst = open_loop(*(request(i, (i,)) for i in range(6)), every_s=0.0)
    simulation = Simulation("round_robin", Setting(num_workers=3, replicas=2))
    simulation.run(burst)
    attempts = {outcome.request_id: outcome.attempts for outcome in simulation.outcomes}
    assert attempts == {"0": 1, "2": 1, "4": 1, "1": 3, "3": 2, "5": 1}
    assert simulation.fleet.conflicts == 3


def test_blocks_count_only_after_their_events_have_arrived():
    trace = open_loop(*(request(i, (7, 8, 9)) for i in range(2)), every_s=5.0)

    def owners(event_delay_s):
        # Ties are broken at random: under some seed, a prefix not seen yet goes elsewhere.
        settings = [
            Setting(num_workers=4, event_delay_s=event_delay_s, seed=seed) for seed in range(8)
        ]
        return max(len(set(workers_of(trace, setting))) for setting in settings)

    assert owners(0.0) == 1
    assert owners(60.0) == 2


@pytest.mark.parametrize(("num_blocks", "every_s"), [(12, 0.4), (3, 0.1)])
def test_what_is_computed_for_another_counts_where_that_takes_long(num_blocks, every_s):
    # One worker begins with another prompt. The third request comes during both prefills.
    other, prompt = tuple(range(100, 100 + num_blocks)), tuple(range(num_blocks))
    trace = open_loop(request(0, other), request(1, prompt), request(2, prompt), every_s=every_s)
    _, second, third = workers_of(trace, Setting(num_workers=2))
    assert (second == third) == (num_blocks > 4)


def test_blocks_in_the_host_tier_count_as_cached():
    filler = [request(1 + i, tuple(range(100 * i, 100 * i + 60))) for i in range(1, 8)]
    trace = open_loop(request(0, (1, 2, 3)), *filler, request(99, (1, 2, 3)), every_s=60.0)
    kept = Setting(num_workers=1, host_pool_tokens=1_000_000)
    cached = [outcome.cached_tokens for outcome in Simulation("latency", kept).run(trace)]
    assert cached[-1] == 11 * 256
    lost = Simulation("latency", Setting(num_workers=1)).run(trace)
    assert lost[-1].cached_tokens == 0


def test_decisions_see_how_long_evicted_blocks_were_idle_in_virtual_time():
    # A KV pool of 400k tokens, which the requests fill every 98 s.
    blocks = [tuple(range(100 * i, 100 * i + 4)) for i in range(300)]
    simulation = Simulation("latency", Setting(num_workers=1))
    simulation.run(open_loop(*(request(i, b) for i, b in enumerate(blocks)), every_s=1.0))
    (worker,) = simulation.fleet.workers
    seen = Candidates(*np.array(worker.column(Load(), 0, [], now_s=300.0))[:, np.newaxis])
    assert seen.kv_idle_before_evict_s == pytest.approx(98, rel=0.05)


def test_metrics_are_as_old_as_their_interval_even_if_the_engine_only_decoded_since():
    trace = Trace("made up", (Session(0.0, (TraceRequest(0, 1024, 200, (1,), 1024),)),))
    (alone,) = Simulation("latency", Setting(num_workers=1)).run(trace)
    assert alone.end_s is not None
    # They are due once, while the request decodes.
    simulation = Simulation("latency", Setting(num_workers=1, metrics_interval_s=0.6 * alone.end_s))
    simulation.run(trace)
    (worker,) = simulation.fleet.workers
    assert worker.engine.metrics().request_active_slots == 0
    assert worker.metrics.request_active_slots == 1


def test_a_request_that_finds_all_slots_taken_fails():
    trace = open_loop(*(request(i, (i,)) for i in range(300)), every_s=0.0)
    outcomes = Simulation("random", Setting(num_workers=1)).run(trace)
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    # A worker has 256 slots; a request that waits for KV blocks holds a slot all the same.
    assert len(failed) == 300 - 256


def test_books_follow_the_head_of_the_queue():
    fleet = []
    books = Books(fleet)
    fleet.append(books)
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        reservation = Reservation(name, 100, round(seconds * 1e6), 4)
        books.reserve(Booking(reservation, SimRequest(name, (), (), 100, 1)), now_s=10.0)
    assert books.load.queue_s(11_000) == 4.0
    books.prefill_complete("a", now_s=12.0)
    assert books.load.queue_s(13_000) == 2.0
    books.release("a", 14.0)
    assert (books.load.requests, books.load.blocks, books.load.prefill_tokens) == (1, 4, 100)


def test_a_faster_worker_gets_more_requests_once_its_speed_is_learned():
    trace = open_loop(*(request(i, tuple(range(8 * i, 8 * i + 8))) for i in range(240)), every_s=1)
    setting = Setting(num_workers=2, profiles=(USUAL, PROFILES["8b-1xh100"]))
    workers = workers_of(trace, setting)[120:]
    assert workers.count("w1:0") > 2 * workers.count("w0:0")
