import asyncio
from collections import Counter

import pytest

from app.core.loads import ROUND, Load, Reservation
from app.core.types import Incarnation
from app.state import reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.lua.conftest import LONG_MS, NO_LOAD


@pytest.mark.oldest_too
async def test_a_reservation_is_counted_on_its_worker(space, inc):
    before = await space.now_ms()
    assert await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7, ttl_ms=LONG_MS) is None
    load = await space.load(inc)
    assert before <= load.head_since_ms <= await space.now_ms()
    assert load == Load(
        prefill_tokens=100,
        prefill_us=5000,
        head_us=5000,
        head_since_ms=load.head_since_ms,
        blocks=7,
        requests=1,
        decoding=0,
        total=1,
    )
    assert await space.get("reservations", "r1") == str(inc)
    assert await space.get(f"requests:{inc}", "r1") == "100 5000 7 p -"
    assert await space.redis.lrange(space.keys[f"prefills:{inc}"], 0, -1) == [b"r1"]
    expires_ms = await space.expires_ms("expiry", "r1")
    assert before + LONG_MS <= expires_ms <= await space.now_ms() + LONG_MS


async def test_what_was_routed_to_a_worker_fades_alike_in_redis_and_in_a_router(space, a, b):
    routed, rounds = {a: Load(), b: Load()}, 0
    for n, inc in enumerate([a, a, b, a, *[b] * 28]):
        tokens = 1_000_000 // (n + 1)
        assert await space.reserve(inc, f"r{n}", tokens=tokens) is None
        rounds += ROUND // 2
        routed[inc].add(Reservation(f"r{n}", tokens, prefill_us=1, blocks=1), 0, rounds)
        await space.release(f"r{n}")
    snapshot = await space.loads()
    assert snapshot.rounds == rounds == 16 * ROUND
    for inc, load in snapshot.loads.items():
        assert (load.routed_tokens, load.routed_at) == (
            routed[inc].routed_tokens,
            routed[inc].routed_at,
        )
    # 1.75 million, 1.29 of which are 16 rounds old and the rest 14 and more.
    one, other = (snapshot.loads[inc].routed_lately(rounds) for inc in (a, b))
    assert 600_000 < one < 750_000 < other


@pytest.mark.parametrize("of_source_us", [0, 40_000_000])
async def test_what_two_workers_promise_ends_at_one_time(space, a, b, of_source_us):
    """Else a source would be booked for nobody, or left out of what it computes."""
    source = Reservation("", 9, of_source_us, 9, incarnation=b, max_requests=8)
    await space.reserve(a, "r", us=20_000_000, source=source, prefill_ttl_ms=1000, ttl_ms=10**6)
    began_ms = await space.now_ms()
    ends_ms = await space.expires_ms("expiry", "r")
    assert ends_ms == await space.expires_ms("expiry", "r source")
    assert ends_ms == pytest.approx(
        began_ms + 1000 + 4 * max(20_000_000, of_source_us) / 1000, abs=5000
    )


async def test_what_a_source_has_to_send_adds_up_alike_in_redis_and_in_a_router(space, a, b):
    source = Reservation("r", 0, 0, 9, sending_ms=30_000, incarnation=b, max_requests=8)
    before_ms = await space.now_ms()
    for name in ("r1", "r2"):
        assert await space.reserve(a, name, source=source) is None
    after_ms = await space.now_ms()
    loads = (await space.loads()).loads
    assert before_ms + 60_000 <= loads[b].sending_until_ms <= after_ms + 60_000
    assert loads[a].sending_until_ms == 0
    router = Load()
    router.add(source, before_ms, 0)
    router.add(source, after_ms, 0)
    assert router.sending_until_ms == before_ms + 60_000
    assert router.sending_s(before_ms + 20_000) == 40.0
    assert router.sending_s(before_ms + 60_001) == 0.0


async def test_a_prefix_on_its_way_is_known_alike_in_redis_and_in_a_router(space, inc):
    router = Load()
    for name, receiving_ms in (("r1", 30_000), ("r2", 20_000), ("r3", 0)):
        there = {"receiving_ms": receiving_ms, "incarnation": inc, "max_requests": 8}
        fetching = Reservation(name, 1, 1, 1, **there)
        before_ms = await space.now_ms()
        assert await space.reserve_all(fetching) == [None]
        router.add(fetching, await space.now_ms(), 0)
        if name == "r1":
            earliest_ms = before_ms + 30_000
    assert earliest_ms <= (await space.load(inc)).receiving_until_ms <= router.receiving_until_ms
    assert router.receiving_s(router.receiving_until_ms - 20_000) == 20.0
    assert router.receiving_s(router.receiving_until_ms + 1) == 0.0


async def test_a_redis_that_lost_its_count_of_rounds_lets_nothing_grow(space, a, b):
    await space.redis.hset(space.key("meta"), "rounds", 10**9)
    await space.reserve(a, "r1", tokens=1000)
    await space.redis.hdel(space.key("meta"), "rounds")
    await space.reserve(a, "r2", tokens=500)
    await space.reserve(b, "r3", tokens=1)
    snapshot = await space.loads()
    assert snapshot.rounds == ROUND
    assert snapshot.loads[a].routed_tokens == 1500
    assert snapshot.loads[a].routed_lately(snapshot.rounds) == pytest.approx(1500, rel=0.2)


async def test_the_oldest_prefill_is_the_head_and_drains(space, inc):
    await space.reserve(inc, "r1", us=5000)
    first = await space.load(inc)
    await space.reserve(inc, "r2", us=2000)
    second = await space.load(inc)
    assert (second.head_us, second.head_since_ms) == (5000, first.head_since_ms)
    # 3 ms after it began, 2 ms of the head and all of the next are left.
    assert second.queue_s(first.head_since_ms + 3) == pytest.approx(0.004)
    assert second.queue_s(first.head_since_ms + 60) == pytest.approx(0.002)


async def test_a_reservation_on_a_worker_that_only_decodes_becomes_the_head(space, inc):
    await space.reserve(inc, "r1", us=5000)
    await space.prefill_complete("r1")
    assert (await space.load(inc)).head_us == 0
    await space.reserve(inc, "r2", us=2000)
    assert (await space.load(inc)).head_us == 2000


async def test_a_lapsed_worker_is_refused_with_fresh_loads(space):
    a, b = await space.worker("a", ttl_ms=1), await space.worker("b")
    await space.reserve(b, "r0", tokens=30)
    await space.until_lease_lapses(a)
    refused = await space.reserve(a, "r1")
    assert refused.reason == "lapsed"
    assert refused.fresh.loads == {b: await space.load(b)}
    assert refused.fresh.loads[b].prefill_tokens == 30
    assert await space.get("reservations", "r1") is None


async def test_an_unknown_worker_is_refused(space, a):
    refused = await space.reserve(Incarnation(99), "r1")
    assert refused.reason == "lapsed"
    assert refused.fresh.loads == {a: NO_LOAD}


async def test_a_worker_whose_lease_was_lost_is_refused(space, inc):
    await space.redis.delete(space.key("leases"))
    assert (await space.reserve(inc, "r1")).reason == "lapsed"


async def test_a_full_worker_is_refused_even_when_the_router_insists(space, inc):
    assert await space.reserve(inc, "r1", max_requests=2) is None
    assert await space.reserve(inc, "r2", max_requests=2) is None
    refused = await space.reserve(inc, "r3", max_requests=2, seen_total=None)
    assert refused.reason == "full"
    assert refused.fresh.loads[inc].requests == 2


async def test_a_worker_that_finished_a_request_is_no_longer_full(space, inc):
    await space.reserve(inc, "r1", max_requests=1)
    await space.release("r1")
    assert await space.reserve(inc, "r2", max_requests=1) is None


async def test_a_worker_that_got_another_request_meanwhile_is_refused(space, inc):
    seen = (await space.load(inc)).total
    assert await space.reserve(inc, "r1", tokens=100, seen_total=seen) is None
    refused = await space.reserve(inc, "r2", seen_total=seen)
    assert refused.reason == "changed"
    fresh = refused.fresh.loads[inc]
    assert (fresh.total, fresh.prefill_tokens) == (1, 100)
    assert await space.reserve(inc, "r2", seen_total=fresh.total) is None


async def test_a_worker_that_only_finished_requests_meanwhile_is_not_refused(space, inc):
    await space.reserve(inc, "r1")
    seen = (await space.load(inc)).total
    await space.prefill_complete("r1")
    await space.release("r1")
    assert await space.reserve(inc, "r2", seen_total=seen) is None


async def test_a_worker_is_taken_as_it_is_when_the_router_insists(space, inc):
    await space.reserve(inc, "r1", seen_total=0)
    assert await space.reserve(inc, "r2", seen_total=None) is None
    assert (await space.load(inc)).requests == 2


async def test_reserving_again_replaces_the_first_reservation(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r1", tokens=40, us=1000, blocks=5)
    load = await space.load(inc)
    assert (load.prefill_tokens, load.prefill_us, load.head_us, load.blocks) == (40, 1000, 1000, 5)
    assert (load.requests, load.decoding, load.total) == (1, 0, 2)
    assert await space.redis.lrange(space.keys[f"prefills:{inc}"], 0, -1) == [b"r1"]


async def test_reserving_again_takes_the_request_from_another_worker(space, a, b):
    await space.reserve(a, "r1", blocks=7)
    await space.prefill_complete("r1")
    await space.reserve(b, "r1", blocks=5)
    load = await space.load(a)
    assert load == Load(head_since_ms=load.head_since_ms, total=1)
    assert (await space.load(b)).blocks == 5
    assert (await space.load(b)).decoding == 0
    assert not await space.redis.exists(space.keys[f"requests:{a}"])
    assert await space.get("reservations", "r1") == str(b)


async def test_a_try_that_began_before_the_reservation_it_would_replace_is_refused(space, a, b):
    assert await space.reserve(b, "r1", attempt="2000-bb") is None
    before = await space.contents()
    assert (await space.reserve(a, "r1", attempt="1999-aa", retry=True)).reason == "superseded"
    assert await space.contents() == before
    assert await space.reserve(b, "r1", attempt="2000-bb", retry=True) is None, (
        "Redis may be sent it twice"
    )
    assert await space.reserve(a, "r1", attempt="2001-cc", retry=True) is None
    assert await space.get("reservations", "r1") == str(a)


async def test_a_late_try_is_refused_although_the_later_one_only_decodes(space, inc):
    await space.reserve(inc, "r1", attempt="2000-bb")
    await space.prefill_complete("r1")
    assert await space.reserve(inc, "r1", attempt="1999-aa", retry=True, max_requests=1) is not None
    assert (await space.load(inc)).decoding == 1


async def test_a_reservation_lasts_as_long_as_fits_the_prefills_up_to_its_own(space, inc):
    lasts = {"r1": 1000 + 4 * 5000, "r2": 1000 + 4 * 7000, "r3": LONG_MS}
    for request_id, prefill_s in (("r1", 5), ("r2", 2), ("r3", 100)):
        before = await space.now_ms()
        await space.reserve(inc, request_id, us=prefill_s * 10**6, prefill_ttl_ms=1000)
        passed_ms = await space.now_ms() - before
        ends_ms = await space.expires_ms("expiry", request_id) - before
        assert lasts[request_id] <= ends_ms <= lasts[request_id] + passed_ms


async def test_expired_reservations_are_given_back_first(space, inc):
    await space.reserve(inc, "r0", blocks=9)
    await space.reserve(inc, "r1", blocks=7)
    await space.backdate_expiry("r0", "r1")
    assert await space.reserve(inc, "r2", blocks=5, max_requests=1) is None
    load = await space.load(inc)
    assert (load.requests, load.blocks) == (1, 5)
    assert not await space.release("r0")
    assert not await space.release("r1")


async def test_a_request_gives_back_two_expired_reservations_at_most(space, inc):
    ids = [f"r{i}" for i in range(6)]
    for request_id in ids:
        await space.reserve(inc, request_id)
    await space.redis.zadd(space.key("expiry"), dict.fromkeys(ids, 1))
    assert await space.reserve(inc, "new") is None
    assert (await space.load(inc)).requests == 6 - 2 + 1
    wishes = [Reservation(f"new{i}", 1, 1, 1, incarnation=inc, max_requests=256) for i in range(2)]
    assert await space.reserve_all(*wishes) == [None, None]
    assert (await space.load(inc)).requests == 1 + 2


async def test_each_request_of_a_call_is_granted_or_refused_separately_and_in_order(space, a, b):
    replies = await space.reserve_all(
        wish(a, "r1", seen_total=0),
        wish(a, "r2", seen_total=1),
        wish(a, "r3", seen_total=1),
        wish(b, "r4", max_requests=1),
        wish(b, "r5", max_requests=1),
        wish(Incarnation(99), "r6"),
    )
    reasons = [refused and refused.reason for refused in replies]
    assert reasons == [None, None, "changed", None, "full", "lapsed"]
    fresh = {a: await space.load(a), b: await space.load(b)}
    assert [refused.fresh.loads for refused in replies if refused] == [fresh] * 3
    assert (fresh[a].requests, fresh[b].requests) == (2, 1)
    assert await space.redis.lrange(space.keys[f"prefills:{a}"], 0, -1) == [b"r1", b"r2"]


async def test_a_request_that_counted_on_a_refused_one_is_refused_too(space, a, b):
    await space.reserve(a, "other", seen_total=0)
    replies = await space.reserve_all(
        wish(a, "r1", seen_total=0),
        # The total is right, but it counts `other`, not r1.
        wish(a, "r2", seen_total=1),
        wish(b, "r3", seen_total=0),
        wish(a, "r4"),
    )
    assert [refused and refused.reason for refused in replies] == ["changed", "changed", None, None]
    assert ((await space.load(a)).total, (await space.load(b)).total) == (2, 1)


async def test_a_request_that_comes_twice_in_one_call_keeps_its_last_reservation(space, a, b):
    replies = await space.reserve_all(wish(a, "r1", seen_total=0), wish(b, "r1", seen_total=0))
    assert replies == [None, None]
    assert await space.get("reservations", "r1") == str(b)
    assert ((await space.load(a)).requests, (await space.load(b)).requests) == (0, 1)


async def test_concurrent_requests_are_granted_no_more_than_a_worker_takes(
    redis_server, space, inc
):
    granted = await race(redis_server, space, inc, max_requests=20, seen_total=None)
    assert granted == {"made": 20, "full": 180}
    load = await space.load(inc)
    assert load == Load(
        prefill_tokens=20 * 100,
        prefill_us=20 * 5000,
        head_us=5000,
        head_since_ms=load.head_since_ms,
        blocks=20 * 7,
        requests=20,
        decoding=0,
        total=20,
    )
    for key, count in {"reservations": 20, f"requests:{inc}": 20}.items():
        assert await space.redis.hlen(space.keys[key]) == count
    assert await space.redis.zcard(space.keys["expiry"]) == 20
    assert await space.redis.llen(space.keys[f"prefills:{inc}"]) == 20


async def test_one_of_many_requests_that_saw_the_same_load_is_granted(redis_server, space, inc):
    granted = await race(redis_server, space, inc, max_requests=256, seen_total=0)
    assert granted == {"made": 1, "changed": 199}
    assert (await space.load(inc)).requests == 1


async def race(server, space, inc, *, max_requests, seen_total):
    """Outcomes of 200 concurrent requests from eight clients, two per call."""
    clients = [connect(server.url, timeout_s=10) for _ in range(8)]
    runners = [ScriptRunner(client, timeout_s=10) for client in clients]
    try:
        outcomes = await asyncio.gather(
            *(
                runners[i % 8].one(
                    reservations.reserve(
                        space.keys,
                        [wish(inc, f"r{2 * i + n}", max_requests, seen_total) for n in range(2)],
                        ttl_ms=LONG_MS,
                    )
                )
                for i in range(100)
            )
        )
    finally:
        for client in clients:
            await client.aclose()
    return Counter(
        "made" if refused is None else refused.reason for both in outcomes for refused in both
    )


def wish(inc, request_id, max_requests=256, seen_total=None):
    there = {"incarnation": inc, "max_requests": max_requests, "seen_total": seen_total}
    return Reservation(request_id, 100, 5000, 7, **there)


async def test_requests_with_one_id_have_a_reservation_each(space, inc):
    for attempt in ("2000-aa", "1000-bb", "3000-cc"):
        assert await space.reserve(inc, "r1", attempt=attempt) is None
    assert (await space.load(inc)).requests == 3
    held = await space.redis.hkeys(space.key("reservations"))
    assert set(held) == {b"r1", b"r1~bb", b"r1~cc"}


async def test_a_request_that_is_sent_again_keeps_to_its_place(space, a, b):
    await space.reserve(a, "r1", attempt="1000-aa")
    await space.reserve(a, "r1", attempt="1000-bb")
    for began_ms in (2000, 3000):
        for tag in ("aa", "bb"):
            assert await space.reserve(b, "r1", attempt=f"{began_ms}-{tag}") is None
        assert ((await space.load(a)).requests, (await space.load(b)).requests) == (0, 2)
        # Now only the second is left, whose id nobody else has any more.
        await space.release("r1")
        assert await space.reserve(a, "r1", attempt=f"{began_ms}-bb") is None
        assert ((await space.load(a)).requests, (await space.load(b)).requests) == (1, 0)
        assert await space.reserve(a, "r1", attempt=f"{began_ms}-aa") is None


async def test_a_late_sending_of_a_request_is_refused(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.reserve(inc, "r1", attempt="2000-bb")
    assert (await space.reserve(inc, "r1", attempt="1999-bb")).reason == "superseded"
    assert (await space.load(inc)).requests == 2


async def test_a_retry_takes_the_place_of_the_first_request_with_its_id(space, a, b):
    await space.reserve(a, "r1", attempt="1000-aa")
    await space.reserve(a, "r1", attempt="2000-bb")
    await space.reserve(b, "r1", attempt="3000-cc", retry=True)
    assert not await space.release("r1~aa")
    assert await space.release("r1~bb")
    assert await space.release("r1~cc")


async def test_an_id_that_looks_like_a_reservations_is_one_like_any_other(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.reserve(inc, "r1~bb", attempt="1000-dd", retry=True)
    await space.reserve(inc, "r1~cc", attempt="1000-ee")
    held = await space.redis.hkeys(space.key("reservations"))
    assert set(held) == {b"r1", b"r1~bb", b"r1~cc"}
    assert await space.release("r1~cc~ee")
    assert await space.release("r1~bb")
    assert await space.release("r1~aa")
