import asyncio
import logging
import math
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from app.core import registration
from app.core.errors import NoWorkers, RedisRecovering, RedisUnavailable
from app.core.loads import Load, Loads, Reservation, Snapshot
from app.core.overlaps import Overlaps
from app.core.types import Incarnation, TierOverlap, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, NO_READINGS, ForwardPassMetrics, Speed
from app.policy.policies import POLICIES
from app.policy.workers import Measurement
from app.router import fleet as fleets
from app.router import measurements
from app.router.fleet import Fleet
from app.state import leases, reservations
from app.state.columns import Columns
from app.state.connect import connect
from tests.eventually import eventually
from tests.lua.conftest import Namespace, info
from tests.redis_servers import stopped

ONE, TWO, THREE = Incarnation(1), Incarnation(2), Incarnation(3)


@pytest.fixture
def space(redis):
    return Namespace(redis)


def fleet_of(space):
    return Fleet(space.redis, space.keys, timeout_s=2)


async def publish(space, inc, measured, speed=DEFAULT_SPEED, entry_id="*"):
    """Publish metrics as an agent does."""
    entry = {
        "worker": "a:0",
        "incarnation": str(inc),
        **registration.encode_metrics(measured, speed),
    }
    await space.redis.xadd(space.keys["metrics"], entry, id=entry_id)


@asynccontextmanager
async def following(fleet):
    task = asyncio.create_task(fleet.measurements.follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def learned(fleet, inc, waiting):
    """What the fleet has learnt of `inc`, once that includes `waiting` requests."""

    async def look():
        return fleet.measured(inc)

    return await eventually(look, lambda m: m.metrics.num_requests_waiting == waiting)


def waiting(requests):
    return ForwardPassMetrics(num_requests_waiting=requests)


async def test_a_view_shows_the_live_workers_and_their_reservations(space):
    fleet = fleet_of(space)
    assert fleet.block_size is None
    a, b = await space.worker("a"), await space.worker("b")
    await space.reserve(b, "r1", tokens=100, us=5000, blocks=7)
    view = await fleet.view(await space.loads())
    assert dict(zip(view.incarnations, view.infos, strict=True)) == {a: info("a"), b: info("b")}
    assert [load.requests for load in view.loads] == [0, 1]
    assert fleet.block_size == 4
    assert fleet.last_view is view


async def test_redis_is_asked_only_about_new_workers(space):
    fleet = fleet_of(space)
    await space.worker("a")
    await fleet.view(await space.loads())
    snapshot = await space.loads()
    await space.redis.config_resetstat()
    await fleet.view(snapshot)
    assert "cmdstat_hmget" not in await space.redis.info("commandstats")
    await space.redis.delete(space.keys["workers"])
    b = await space.worker("b")
    view = await fleet.view(await space.loads())
    assert [str(known.key) for known in view.infos] == ["a:0", "b:0"]
    assert view.incarnations == [ONE, b]


async def test_of_a_thousand_workers_only_the_new_one_is_decoded(space, monkeypatch):
    fleet = fleet_of(space)
    await space.worker("a")
    await fleet.view(await space.loads())
    before = await space.get("meta", "workers_ms")
    await eventually(space.now_ms, lambda now: str(now) != before)
    decoded = []
    decode = registration.decode_info
    monkeypatch.setattr(
        registration, "decode_info", lambda text: decoded.append(text) or decode(text)
    )
    b = await space.worker("b")
    assert (await fleet.view(await space.loads())).incarnations == [ONE, b]
    assert [decode(text).key for text in decoded] == [WorkerKey("b")]


async def test_of_forty_workers_only_the_entry_of_a_new_one_or_a_changed_one_is_read(space):
    fleet, known = fleet_of(space), Columns()

    async def entries_read():
        """By the view that follows."""
        snapshot = await space.do(reservations.changes(space.keys, known))
        assert snapshot is not None
        async with space.redis.monitor() as seen:
            await fleet.view(snapshot)
            await space.redis.ping()
            words = (await seen.next_command())["command"].split()
        return set(words[2:]) if words[0] == "HMGET" else set()

    incs = [await space.worker(f"w{n}") for n in range(40)]
    assert len(await entries_read()) == 40
    await space.reserve(incs[0], "r1")
    assert await entries_read() == set()
    b = await space.worker("b")
    assert await entries_read() == {str(b), str(incs[0])}
    before = await space.get("meta", "workers_ms")
    await eventually(space.now_ms, lambda now: str(now) != before)
    await space.redis.hdel(space.keys["workers"], str(incs[7]))
    assert await space.renew(incs[7])
    assert await entries_read() == {str(incs[7])}


async def test_a_changed_entry_that_could_not_be_read_is_read_by_a_later_view(space, monkeypatch):
    """While another view reads those that had changed before."""
    fleet, known = fleet_of(space), Columns()

    async def seen():
        snapshot = await space.do(reservations.changes(space.keys, known))
        assert snapshot is not None
        return snapshot

    async def register_again(inc, kv_total_blocks):
        before = await space.get("meta", "workers_ms")
        await eventually(space.now_ms, lambda now: str(now) != before)
        space.infos[inc] = replace(space.infos[inc], kv_total_blocks=kv_total_blocks)
        assert await space.renew(inc)

    a, b, *_ = [await space.worker(f"w{n}") for n in range(40)]  # with few, all are told
    await fleet.view(await seen())
    await register_again(b, 66)
    hmget, is_asked, may_go_on = space.redis.hmget, asyncio.Event(), asyncio.Event()

    async def slow(*args):
        found = await hmget(*args)
        is_asked.set()
        await may_go_on.wait()
        return found

    async def failing(*_):
        raise RedisUnavailable("for once")

    monkeypatch.setattr(space.redis, "hmget", slow)
    first = asyncio.create_task(fleet.view(await seen()))
    await is_asked.wait()
    await register_again(a, 77)
    monkeypatch.setattr(space.redis, "hmget", failing)
    with pytest.raises(RedisUnavailable):
        await fleet.view(await seen())
    may_go_on.set()
    await first
    monkeypatch.setattr(space.redis, "hmget", hmget)
    view = await fleet.view(await seen())
    assert view.infos[view.incarnations.index(a)].kv_total_blocks == 77


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_worker_that_says_something_new_is_heard_though_the_answer_that_told_it_is_not(
    space, is_lost
):
    """As another one retires, which that answer cannot tell, or as it comes too late."""
    fleet, known = fleet_of(space), Columns()
    incs = [await space.worker(f"w{n}") for n in range(40)]  # with few, all are told

    async def seen():
        return await space.do(reservations.changes(space.keys, known))

    first = await seen()
    assert first is not None
    await fleet.view(first)
    space.infos[incs[3]] = replace(space.infos[incs[3]], adapters=("new",))
    assert await space.renew(incs[3])
    if not is_lost:
        assert await space.retire("w7", incs[7])
    assert (await seen() is None) is not is_lost
    later = await seen()
    assert later is not None
    view = await fleet.view(later)
    assert view.infos[view.incarnations.index(incs[3])].adapters == ("new",)


async def test_an_incarnation_without_a_worker_entry_is_not_routed_to(space):
    await space.worker("a")
    await space.worker("b")
    await space.redis.hdel(space.keys["workers"], "1")
    view = await fleet_of(space).view(await space.loads())
    assert view.incarnations == [TWO]


@pytest.mark.parametrize("spoilt", ["spoilt", "{}", "[]"])
async def test_an_incarnation_whose_worker_entry_is_corrupted_is_not_routed_to(
    space, caplog, spoilt
):
    await space.worker("a")
    await space.worker("b")
    await space.redis.hset(space.keys["workers"], "1", spoilt)
    view = await fleet_of(space).view(await space.loads())
    assert view.incarnations == [TWO]
    assert "ignoring the worker of incarnation 1" in caplog.text


async def test_forget_except_drops_all_other_workers(space):
    fleet = fleet_of(space)
    a, b = await space.worker("a"), await space.worker("b")
    await publish(space, a, waiting(7))
    await fleet.measurements.poll(None)
    await fleet.view(await space.loads())
    fleet.forget_except([])
    assert fleet.measured(a).metrics == ForwardPassMetrics()
    assert (await fleet.view(await space.loads())).incarnations == [a, b]
    fleet.forget_except([b])
    await space.redis.hdel(space.keys["workers"], str(a), str(b))
    assert (await fleet.view(await space.loads())).incarnations == [b]


async def test_a_namespace_created_again_may_give_old_numbers_to_other_workers(space):
    fleet = fleet_of(space)
    await space.worker("a")
    await space.worker("b")
    assert [str(i.key) for i in (await fleet.view(await space.loads())).infos] == ["a:0", "b:0"]
    before = await space.get("meta", "workers_ms")
    await space.redis.flushall()
    await eventually(space.now_ms, lambda now: str(now) != before)
    await space.worker("b")
    await space.worker("a")
    assert [str(i.key) for i in (await fleet.view(await space.loads())).infos] == ["b:0", "a:0"]


async def test_without_redis_a_view_with_new_workers_raises_redis_unavailable(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        space = Namespace(redis)
        await space.worker("a")
        fleet = fleet_of(space)
        own_redis_server.kill()
        with pytest.raises(RedisUnavailable, match="ConnectionError"):
            await fleet.view(Snapshot(now_ms=0, loads=Loads.of({ONE: Load()})))


async def test_a_redis_that_hangs_is_not_waited_for_longer_than_the_timeout(
    space, one_redis_server
):
    fleet = Fleet(space.redis, space.keys, timeout_s=0.02)
    queries = (
        fleet.view(Snapshot(now_ms=0, loads=Loads.of({ONE: Load()}))),
        fleet.measurements.poll(None),
        fleet.measurements.poll(b"1-0"),
    )
    with stopped(one_redis_server.pid):
        for query in queries:
            with pytest.raises(RedisUnavailable, match="no answer within 20 ms"):
                await query


async def test_after_an_outage_the_last_view_holds_until_leases_are_renewed(space):
    fleet = fleet_of(space)
    for name in ("a", "b"):
        await space.worker(name)
    await fleet.view(await space.loads())
    fleet.note(RedisUnavailable("cannot save"))
    assert fleet.recovers
    await space.redis.zadd(space.keys["leases"], {"1": 1, "2": 1})
    with pytest.raises(
        RedisRecovering, match=r"^2 workers are yet to be heard of \(cannot save\)$"
    ):
        await fleet.view(await space.loads())
    assert await space.renew(ONE)
    with pytest.raises(RedisRecovering, match=r"^1 workers are"):
        await fleet.view(await space.loads())
    assert fleet.last_view is not None
    assert fleet.last_view.incarnations == [ONE, TWO]
    assert await space.renew(TWO)
    assert (await fleet.view(await space.loads())).incarnations == [ONE, TWO]
    # From then on, a lease that runs out means that its worker is gone.
    await space.redis.zadd(space.keys["leases"], {"2": 1})
    assert (await fleet.view(await space.loads())).incarnations == [ONE]


async def test_a_worker_that_does_not_renew_soon_after_an_outage_is_gone(space, monkeypatch):
    fleet = fleet_of(space)
    await space.worker("a")
    await fleet.view(await space.loads())
    monkeypatch.setattr(fleets, "RECOVERY_S", 0.0)
    fleet.note(RedisUnavailable("unreachable"))
    assert not fleet.recovers
    await space.redis.zadd(space.keys["leases"], {"1": 1})
    assert (await fleet.view(await space.loads())).incarnations == []


@pytest.mark.parametrize("error", [NoWorkers("none"), RedisRecovering("coming back")])
async def test_only_a_redis_that_does_not_answer_counts_as_an_outage(space, error):
    fleet = fleet_of(space)
    # Otherwise each RedisRecovering would prolong the recovery.
    fleet.note(error)
    assert not fleet.recovers


async def test_candidates_show_overlaps_loads_and_measurements(space):
    fleet = fleet_of(space)
    a, b = await space.worker("a"), await space.worker("b")
    await space.reserve(b, "r1", tokens=100, us=5000, blocks=7)
    await publish(
        space,
        a,
        ForwardPassMetrics(
            request_active_slots=3,
            request_total_slots=64,
            kv_active_blocks=250,
            kv_total_blocks=900,
            num_requests_waiting=2,
            gpu_cache_usage_perc=0.25,
            kv_idle_before_evict_s=60.0,
        ),
        Speed(prefill_s_per_token=1e-5, mean_output_tokens=50),
    )
    async with following(fleet):
        await learned(fleet, a, waiting=2)
    view = await fleet.view(await space.loads())
    seen = view.candidates(
        Overlaps({a: TierOverlap(device=4, host=2, disk=1), Incarnation(99): TierOverlap(9)})
    )
    assert seen.overlap_device.tolist() == [4, 0]
    assert seen.overlap_host.tolist() == [2, 0]
    assert seen.overlap_disk.tolist() == [1, 0]
    assert seen.prefill_tokens.tolist() == [0, 100]
    assert 0 <= seen.prefill_s[1] <= 0.005
    assert seen.active_blocks.tolist() == [0, 7]
    assert seen.active_requests.tolist() == [0, 1]
    assert seen.max_requests.tolist() == [256, 256]
    assert seen.kv_active_blocks.tolist() == [250, 0]
    assert seen.kv_total_blocks.tolist() == [900, 1000], "as registered, where not measured"
    assert seen.kv_idle_before_evict_s.tolist() == [60, 0]
    assert seen.prefill_s_per_token.tolist() == [
        1e-5,
        1e-5,
    ]  # as fast as the fastest, until measured
    assert view.candidates(Overlaps()).overlap_device.tolist() == [0, 0]

    view.add(0, Reservation("r2", prefill_tokens=40, prefill_us=2000, blocks=3))
    after = view.candidates(Overlaps())
    assert after.prefill_tokens.tolist() == [40, 100]
    assert after.prefill_s[0] == 0.002
    assert after.active_blocks.tolist() == [3, 7]
    assert seen.active_blocks.tolist() == [0, 7], "arrays handed out before must not change"


async def test_openings_are_free_slots_or_one_per_worker_if_queues_are_limited(space):
    # Each takes up to 256 requests.
    a, b = await space.worker("a"), await space.worker("b")
    fleet = fleet_of(space)
    await space.reserve(a, "r1", us=30_000_000)
    await space.reserve(b, "r2", us=90_000_000)
    view = await fleet.view(await space.loads())
    assert view.openings(math.inf) == 510
    assert [view.openings(limit) for limit in (20.0, 60.0, 100.0)] == [0, 1, 2]
    assert 20.0 < view.shortest_queue_s <= 30.0
    await space.retire("a", a)
    await space.retire("b", b)
    empty = await fleet_of(space).view(await space.loads())
    assert (empty.openings(math.inf), empty.shortest_queue_s) == (0, 0.0)


async def test_the_latest_entry_of_each_worker_counts(space):
    fleet = fleet_of(space)
    before = await space.now_ms()
    await publish(space, ONE, waiting(1))
    await publish(space, TWO, waiting(5))
    await publish(space, ONE, waiting(2), Speed(mean_output_tokens=77))
    async with following(fleet):
        measured = await learned(fleet, ONE, waiting=2)
        assert measured.speed == Speed(mean_output_tokens=77)
        assert before <= measured.at_ms <= await space.now_ms()
        assert fleet.measured(TWO).metrics == waiting(5)
        await publish(space, TWO, waiting(6))
        await learned(fleet, TWO, waiting=6)
    assert fleet.measured(THREE).metrics == ForwardPassMetrics()
    assert 0 <= fleet.measurements.age_s < 5


@pytest.mark.parametrize(
    ("entries", "pages", "known"),
    [
        ("12 32", 3, {1: 0, 2: 3, 3: 2}),
        # A worker that has long been silent is not searched for.
        ("1 22 22", 2, {2: 4}),
        # If a worker's newest entry makes no sense, an earlier one counts.
        ("x1 1x", 2, {1: 2}),
    ],
)
async def test_the_stream_is_read_back_only_while_pages_name_further_workers(
    space, monkeypatch, entries, pages, known
):
    monkeypatch.setattr(measurements, "PAGE", 2)
    fleet = fleet_of(space)
    for number, inc in enumerate(entries.replace(" ", "")):
        if inc == "x":
            await space.redis.xadd(
                space.keys["metrics"], {"incarnation": "1", "kv_total_blocks": "x"}
            )
        else:
            await publish(space, Incarnation(int(inc)), waiting(number))
    await space.redis.config_resetstat()
    await fleet.measurements.poll(None)
    stats = await space.redis.info("commandstats")
    assert stats["cmdstat_xrevrange"]["calls"] == pages
    for inc in (1, 2, 3):
        measured = fleet.measured(Incarnation(inc))
        assert measured.metrics == (waiting(known[inc]) if inc in known else waiting(0))


async def test_the_newest_entry_of_each_worker_since_the_last_poll_is_read_however_many(
    space, monkeypatch
):
    monkeypatch.setattr(measurements, "PAGE", 2)
    fleet = fleet_of(space)
    await publish(space, Incarnation(1), waiting(1))
    position = await fleet.measurements.poll(None)
    for inc in range(2, 7):
        await publish(space, Incarnation(inc), waiting(0))
        await publish(space, Incarnation(inc), waiting(inc))
    await space.redis.config_resetstat()
    position = await fleet.measurements.poll(position)
    assert await fleet.measurements.poll(position) == position
    stats = await space.redis.info("commandstats")
    assert stats["cmdstat_xrevrange"]["calls"] == 7
    for inc in range(1, 7):
        assert fleet.measured(Incarnation(inc)).metrics == waiting(inc)


async def test_the_next_view_shows_what_was_measured_since(space):
    fleet = fleet_of(space)
    inc = await space.worker("a")
    assert (await fleet.view(await space.loads())).measured[0].metrics == ForwardPassMetrics()
    await publish(space, inc, waiting(7))
    async with following(fleet):
        await learned(fleet, inc, waiting=7)
    view = await fleet.view(await space.loads())
    assert view.measured[0].metrics == waiting(7)
    assert view.candidates(Overlaps()).num_requests_waiting.tolist() == [7]


async def test_of_known_workers_only_every_third_report_is_read_unless_the_policy_goes_by_them(
    space,
):
    fleet = fleet_of(space)
    a, b = await space.worker("a"), await space.worker("b")
    await fleet.view(await space.loads())
    await publish(space, a, waiting(1))
    await fleet.measurements.poll(None)
    assert (fleet.measurements._pause_s(1), fleet.measurements._pause_s(3)) == (0.1, 0.1)
    await publish(space, b, waiting(1))
    await fleet.measurements.poll(None)
    assert (fleet.measurements._pause_s(1), fleet.measurements._pause_s(3)) == (
        0.1,
        pytest.approx(0.3),
    )
    assert {name for name, policy in POLICIES.items() if policy.reads_reports} == {
        *("balance", "logit")
    }


async def test_a_metrics_entry_that_makes_no_sense_is_skipped_and_logged(space, caplog):
    fleet = fleet_of(space)
    key = space.keys["metrics"]
    await space.redis.xadd(key, {"worker": "a:0", "incarnation": "None"})
    await space.redis.xadd(key, {"worker": "b:0"})
    await space.redis.xadd(key, {"worker": "c:0", "incarnation": "1", "kv_total_blocks": "lots"})
    await space.redis.xadd(key, {"worker": "d:0", "incarnation": "1", "kv_total_blocks": "inf"})
    await space.redis.xadd(key, {b"worker": b"e:0", b"incarnation": b"\xff"})
    await publish(space, TWO, waiting(3))
    async with following(fleet):
        await learned(fleet, TWO, waiting=3)
    assert fleet.measured(ONE).metrics == ForwardPassMetrics()
    for worker in ("a:0", "b:0", "c:0", "d:0", "e:0"):
        assert f"ignoring a metrics entry of {worker}" in caplog.text


async def test_a_stream_that_is_created_later_is_followed_too(space):
    fleet = fleet_of(space)
    async with following(fleet):
        await publish(space, ONE, waiting(4))
        await learned(fleet, ONE, waiting=4)


async def test_a_redis_that_was_emptied_and_restarted_is_followed_from_its_beginning(
    own_redis_server, caplog
):
    """Even if its clock is behind, so that its entries seem older than those seen before."""
    caplog.set_level(logging.DEBUG, "app.router.measurements")
    async with connect(own_redis_server.url) as redis:
        space = Namespace(redis)
        fleet = fleet_of(space)
        await publish(space, ONE, waiting(1), entry_id="2000000000000-0")
        async with following(fleet):
            await learned(fleet, ONE, waiting=1)
            own_redis_server.kill()

            async def log():
                return caplog.text

            await eventually(log, lambda text: "metrics not read" in text)
            own_redis_server.start()
            await publish(space, ONE, waiting(2), entry_id="1500000000000-0")
            measured = await learned(fleet, ONE, waiting=2)
    assert measured.at_ms == 1_500_000_000_000


def test_measurements_older_than_a_second_are_stale():
    measured = Measurement(ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS, at_ms=10_000)
    assert not measured.is_stale(11_000, workers=256)
    assert measured.is_stale(11_001, workers=256)
    # They publish every 0.4 s each.
    assert not measured.is_stale(14_000, workers=1024)
    assert measured.is_stale(14_001, workers=1024)


async def test_a_reused_incarnation_belongs_to_the_new_worker_at_once(space):
    """A failover may lose the last registrations. The old worker's metrics are dropped as well."""
    fleet = fleet_of(space)
    inc = await space.worker("a")
    await publish(space, inc, waiting(7))
    async with following(fleet):
        await learned(fleet, inc, waiting=7)
    assert [str(i.key) for i in (await fleet.view(await space.loads())).infos] == ["a:0"]
    before = await space.get("meta", "workers_ms")
    await space.retire("a", inc)
    await space.redis.hset(space.key("meta"), "incarnations", str(inc - 1))
    await space.redis.delete(space.shard["applied"])
    await eventually(space.now_ms, lambda now: str(now) != before)
    assert await space.worker("b") == inc
    view = await fleet.view(await space.loads())
    assert [str(known.key) for known in view.infos] == ["b:0"]
    assert view.measured[0].metrics == ForwardPassMetrics()


async def test_a_reused_incarnation_belongs_to_the_new_worker_also_if_that_is_activated_later(
    space,
):
    fleet = fleet_of(space)
    await space.worker("a")
    inc = await space.worker("b")
    await fleet.view(await space.loads())
    before = await space.get("meta", "workers_ms")
    await space.retire("b", inc)
    await space.redis.hset(space.key("meta"), "incarnations", str(inc - 1))
    await eventually(space.now_ms, lambda now: str(now) != before)
    staged = await space.do(leases.register(space.keys, info("c"), "nonce", ttl_ms=60_000))
    assert staged.incarnation == inc
    assert (await fleet.view(await space.loads())).incarnations == [ONE]
    assert await space.do(leases.activate(space.keys, WorkerKey("c"), inc, "nonce"))
    view = await fleet.view(await space.loads())
    assert [str(known.key) for known in view.infos] == ["a:0", "c:0"]


async def test_a_worker_entry_that_was_repaired_is_read_again(space):
    fleet = fleet_of(space)
    a, b = await space.worker("a"), await space.worker("b")
    other = await space.get("workers", b)
    await space.redis.hset(space.key("workers"), str(a), other or "")
    assert [str(i.key) for i in (await fleet.view(await space.loads())).infos] == ["b:0", "b:0"]
    before = await space.get("meta", "workers_ms")
    await eventually(space.now_ms, lambda now: str(now) != before)
    assert await space.renew(a)
    view = await fleet.view(await space.loads())
    assert {inc: str(i.key) for inc, i in zip(view.incarnations, view.infos, strict=True)} == {
        a: "a:0",
        b: "b:0",
    }


async def test_deleting_worker_entries_does_not_stop_routing_to_known_workers(space):
    fleet = fleet_of(space)
    a, b = await space.worker("a"), await space.worker("b")
    await fleet.view(await space.loads())
    await space.redis.delete(space.key("workers"))
    await space.redis.hset(space.key("meta"), "workers_ms", "1")
    assert (await fleet.view(await space.loads())).incarnations == [a, b]


async def test_a_changed_number_of_shards_is_seen_at_once(space):
    fleet = fleet_of(space)
    await space.worker("a")
    await fleet.view(await space.loads())
    await space.redis.hset(space.key("meta"), "shards", "3")
    await fleet.view(await space.loads())
    assert fleet.shards == 3


async def test_later_entries_are_read_even_after_one_from_the_far_future(space):
    fleet = fleet_of(space)
    await space.worker("a")
    await fleet.view(await space.loads())
    await publish(space, ONE, waiting(1), entry_id="99999999999999-0")
    async with following(fleet):
        await learned(fleet, ONE, waiting=1)
        # As the worker's heartbeat does.
        await space.redis.delete(space.key("metrics"))
        await publish(space, ONE, waiting(2))
        await learned(fleet, ONE, waiting=2)
