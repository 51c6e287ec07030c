import re
from dataclasses import replace

import orjson
import pytest

from app.core import registration
from app.core.errors import NamespaceMissing
from app.core.keys import DATA_VERSION
from app.core.loads import Load, Reservation
from app.core.roles import Role
from app.core.types import Incarnation
from app.state import leases
from tests.eventually import eventually
from tests.lua.conftest import LONG_MS, info


@pytest.mark.oldest_too
async def test_renewing_extends_the_lease_from_now(space):
    inc = await space.worker("a", ttl_ms=5_000)
    before = await space.now_ms()
    assert await space.renew(inc, ttl_ms=LONG_MS)
    expires_ms = await space.expires_ms("leases", inc)
    assert before + LONG_MS <= expires_ms <= await space.now_ms() + LONG_MS


async def test_a_renewal_tells_how_many_incarnations_have_a_lease(space):
    a, b = await space.worker("a"), await space.worker("b", ttl_ms=1)
    await space.until_lease_lapses(b)
    nonces = (space.keys, info("a"), a, "nonce-a")
    assert await space.do(leases.renew(*nonces, ttl_ms=LONG_MS)) == leases.Renewal(2)
    await space.retire_lapsed()
    assert await space.do(leases.renew(*nonces, ttl_ms=LONG_MS)) == leases.Renewal(1)


async def test_a_lapsed_lease_is_revived_with_its_reservations(space, a):
    await space.reserve(a, "r1", tokens=100, us=5000, blocks=7)
    await space.renew(a, ttl_ms=1)
    await space.until_lease_lapses(a)
    assert (await space.loads()).loads == {}
    assert await space.retire_lapsed(grace_ms=60_000) == 0
    assert await space.renew(a)
    assert (await space.load(a)).requests == 1


async def test_a_retired_incarnation_cannot_renew_its_lease(space):
    inc = await space.worker("a", ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await space.retire_lapsed() == 1
    assert not await space.renew(inc)
    assert (await space.loads()).loads == {}


async def test_another_process_cannot_renew_a_lease(space):
    inc = await space.worker("a", ttl_ms=5_000)
    expires_ms = await space.expires_ms("leases", inc)
    assert not await space.renew(inc, nonce="stranger")
    assert await space.expires_ms("leases", inc) == expires_ms


async def test_an_unknown_incarnation_cannot_renew_a_lease(space):
    await space.worker("a")
    assert not await space.renew(Incarnation(99), nonce="nonce-a")
    assert await space.redis.zscore(space.keys["leases"], "99") is None


async def test_a_staged_incarnation_renews_its_lease_like_any_other(space):
    old = await space.worker("a")
    staged = await space.worker("a", resync=True)
    assert await space.renew(old)
    assert await space.renew(staged)


RECORDS = {"r1": "100 5000 7 p -", "r2": "60 2000 4 p -", "r3": "30 1000 2 d -"}
"""The requests of `inc`."""
BUSY_LOAD = Load(
    prefill_tokens=160, prefill_us=7000, head_us=5000, blocks=13, requests=3, decoding=1
)


@pytest.fixture
async def inc(space):
    """Worker a with two requests that prefill and one that decodes."""
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r2", tokens=60, us=2000, blocks=4)
    await space.reserve(inc, "r3", tokens=30, us=1000, blocks=2)
    await space.prefill_complete("r3")
    return inc


async def repaired_load(space, inc):
    """The load without its time and total, once all other keys agree with `RECORDS`."""
    records = await space.redis.hgetall(space.keys[f"requests:{inc}"])
    assert {k.decode(): v.decode() for k, v in records.items()} == RECORDS
    reservations = await space.redis.hgetall(space.key("reservations"))
    assert reservations == dict.fromkeys(records, str(inc).encode())
    assert set(await space.redis.zrange(space.key("expiry"), 0, -1)) == set(records)
    assert sorted(await space.redis.lrange(space.keys[f"prefills:{inc}"], 0, -1)) == [b"r1", b"r2"]
    return replace(await space.load(inc), head_since_ms=0, total=0)


async def test_renewing_an_intact_worker_changes_only_its_lease(space, inc):
    async def everything():
        expiry = await space.redis.zrange(space.key("expiry"), 0, -1, withscores=True)
        return await space.contents(), expiry

    async def writes():
        return int((await space.redis.info("persistence"))["rdb_changes_since_last_save"])

    before, written = await everything(), await writes()
    assert await space.renew(inc)
    assert await everything() == before
    assert await writes() <= written + 1


async def test_more_requests_than_one_command_takes_are_counted(space, a):
    ids = [f"r{n}" for n in range(1001)]
    await space.redis.hset(space.keys[f"requests:{a}"], mapping=dict.fromkeys(ids, "1 1 2 d -"))
    await space.redis.hset(space.key("reservations"), mapping=dict.fromkeys(ids, str(a)))
    await space.redis.zadd(space.key("expiry"), dict.fromkeys(ids, 5))
    assert await space.renew(a)
    load = await space.load(a)
    assert (load.requests, load.decoding, load.blocks) == (1001, 1001, 2002)
    assert await space.redis.zcount(space.key("expiry"), 5, 5) == 1001


@pytest.mark.parametrize(
    "load",
    [
        "",
        "spoilt",
        "160 7000 5000 0 13 3 1",
        "-160 7000 5000 0 13 3 1 3 0 0",
        "99 7000 5000 0 13 3 1 3 0 0 0 0",
        "160 7001 5000 0 13 3 1 3 0 0 0 0",
        "160 7000 4999 0 13 3 1 3 0 0 0 0",
        "160 7000 5000 0 14 3 1 3 0 0 0 0",
        "160 7000 5000 0 13 9 1 3 0 0 0 0",
        "160 7000 5000 0 13 3 0 3 0 0 0 0",
    ],
)
async def test_a_load_that_does_not_match_the_requests_is_recounted(space, inc, load):
    await space.redis.hset(space.key("load"), str(inc), load)
    assert await space.renew(inc)
    assert await repaired_load(space, inc) == BUSY_LOAD


async def test_a_deleted_load_is_recounted(space, inc):
    await space.redis.delete(space.key("load"))
    assert await space.renew(inc)
    assert await repaired_load(space, inc) == BUSY_LOAD


async def test_a_source_whose_request_redis_has_lost_owes_nothing_after_a_heartbeat(space, a, b):
    for name in ("lost", "held", "computed"):
        await space.reserve(
            a, name, source=Reservation("", 90, 5000, 9, incarnation=b, max_requests=8)
        )
    await space.prefill_complete("computed", of_source=True)
    for name in ("lost", "computed"):
        await space.redis.hdel(space.keys["reservations"], name)
    assert await space.renew(a)
    assert await space.renew(b)
    assert set(await space.redis.hkeys(space.keys["reservations"])) == {
        b"held",
        b"held source",
        b"computed source",
    }
    assert (await space.load(a)).requests == (await space.load(b)).requests == 1
    assert (await space.load(b)).blocks == 18


async def test_a_renewal_that_is_not_thorough_recounts_only_an_unreadable_load(space, inc):
    for load, tokens in (("99 0 0 0 0 0 0 0 0 0 0 0", 99), ("spoilt", 160)):
        await space.redis.hset(space.key("load"), str(inc), load)
        call = leases.renew(space.keys, info("a"), inc, "nonce-a", ttl_ms=LONG_MS, thorough=False)
        assert await space.do(call)
        assert (await space.load(inc)).prefill_tokens == tokens


async def test_a_deleted_or_corrupt_queue_is_rebuilt(space, inc):
    queue = space.keys[f"prefills:{inc}"]
    await space.redis.delete(queue)
    await space.redis.rpush(queue, "junk", "r2", "r3", "r2", "r1")
    last_ms = (await space.load(inc)).head_since_ms
    before = await eventually(space.now_ms, lambda now: now > last_ms)
    assert await space.renew(inc)
    assert await space.redis.lrange(queue, 0, -1) == [b"r2", b"r1"], "the order is kept"
    load = await space.load(inc)
    assert load.head_us == 2000
    assert before <= load.head_since_ms <= await space.now_ms()
    await space.redis.delete(queue)
    assert await space.renew(inc)
    await repaired_load(space, inc)


@pytest.mark.parametrize(
    "record", ["", "spoilt", "100 5000 7 p", "100 5000 7 x -", f"1 1 {10**12} p -"]
)
async def test_a_request_with_an_unreadable_record_is_forgotten(space, inc, record):
    await space.redis.hset(space.keys[f"requests:{inc}"], "r1", record)
    assert await space.renew(inc)
    load = await space.load(inc)
    assert (load.prefill_tokens, load.blocks, load.requests, load.decoding) == (60, 6, 2, 1)
    assert not await space.redis.hexists(space.key("reservations"), "r1")
    assert await space.redis.zscore(space.key("expiry"), "r1") is None


@pytest.mark.parametrize("key", ["reservations", "expiry"])
async def test_a_request_without_reservation_or_expiry_is_forgotten(space, inc, key):
    if key == "reservations":
        await space.redis.hdel(space.key(key), "r1", "r3")
    else:
        await space.redis.zrem(space.key(key), "r1", "r3")
    assert await space.renew(inc)
    load = await space.load(inc)
    assert (load.prefill_tokens, load.blocks, load.requests, load.decoding) == (60, 4, 1, 0)
    assert load.head_us == 2000
    assert await space.redis.hkeys(space.keys[f"requests:{inc}"]) == [b"r2"]
    assert await space.redis.hkeys(space.key("reservations")) == [b"r2"]
    assert await space.redis.zrange(space.key("expiry"), 0, -1) == [b"r2"]
    assert await space.redis.lrange(space.keys[f"prefills:{inc}"], 0, -1) == [b"r2"]


async def test_deleted_requests_no_longer_count(space, inc):
    await space.redis.delete(space.keys[f"requests:{inc}"])
    assert await space.renew(inc)
    load = await space.load(inc)
    assert (load.prefill_us, load.head_us, load.blocks, load.requests, load.total) == (
        0,
        0,
        0,
        0,
        3,
    )
    assert await space.release("r1"), "its reservation is still known"


async def test_a_request_reserved_again_on_another_worker_stays_there(space, inc, b):
    await space.redis.hdel(space.key("reservations"), "r1")
    await space.redis.zrem(space.key("expiry"), "r1")
    await space.reserve(b, "r1", blocks=9)
    assert await space.renew(inc)
    assert (await space.load(inc)).requests == 2
    assert (await space.load(b)).blocks == 9
    assert await space.release("r1")
    assert (await space.load(b)).blocks == 0


async def test_an_incarnation_that_is_no_longer_a_writer_must_register_again(space, a):
    for nonce in ("spoilt", ""):
        await space.redis.hset(space.key("writers"), str(a), nonce)
        assert not await space.renew(a)
    await space.redis.delete(space.key("writers"))
    assert not await space.renew(a)


@pytest.mark.parametrize("name", ["leases", "load", "current", "workers", "meta"])
async def test_any_other_deleted_key_is_restored(space, a, name):
    before = await space.contents()
    await space.redis.delete(space.key(name))
    assert await space.renew(a)
    after = await space.contents()
    if name in ("workers", "meta"):
        moment = re.compile(r"b'workers_ms', b'\d+'")
        before, after = moment.sub("", before), moment.sub("", after)
    assert after == before


async def test_a_wrong_worker_entry_is_corrected_and_updates_workers_ms(space):
    inc, other = await space.worker("a"), await space.worker("b")
    await space.redis.hset(space.key("meta"), "workers_ms", "1")
    assert await space.renew(inc)
    assert (await space.loads()).workers_ms == 1
    text = await space.get("workers", other)
    await space.redis.hset(space.key("workers"), str(inc), text or "")
    assert await space.renew(inc)
    assert registration.decode_info(await space.get("workers", inc) or "") == info("a")
    assert ((await space.loads()).workers_ms or 0) > 1


async def test_a_process_replaced_after_redis_lost_it_cannot_renew(space):
    inc = await space.worker("a", nonce="first")
    await space.redis.delete(space.key("current"), space.key("workers"))
    other = await space.worker("a", nonce="second")
    assert not await space.renew(inc, nonce="first")
    assert await space.get("current", "a:0") == str(other)


async def test_workers_register_again_if_the_namespace_has_another_version(space, a):
    await space.redis.hset(space.key("meta"), "version", "9")
    assert not await space.renew(a)
    assert await space.get("meta", "version") == "9"


async def test_a_version_that_was_lost_is_that_of_the_workers(space, a):
    await space.redis.hdel(space.key("meta"), "version")
    assert await space.renew(a)
    assert await space.get("meta", "version") == str(DATA_VERSION)
    await space.redis.delete(space.key("meta"))
    assert await space.renew(a)
    assert await space.get("meta", "version") == str(DATA_VERSION)


async def test_workers_register_again_if_the_number_of_shards_changed(space, a):
    await space.redis.hset(space.key("meta"), "shards", "3")
    assert not await space.renew(a)
    assert (await space.register("a", resync=True)).shards == 3


@pytest.mark.parametrize("shards", ["spoilt", "0", "-1", "1025", "1.5", "0x2", ""])
async def test_an_invalid_number_of_shards_is_corrected(space, a, shards):
    await space.redis.hset(space.key("meta"), "shards", shards)
    with pytest.raises(NamespaceMissing):
        await space.loads()
    assert await space.renew(a)
    assert (await space.loads()).shards == 1


async def renew_ill(space, inc, why="stands still"):
    """Whether it is out of service now."""
    told = replace(space.infos[inc], ill=why)
    nonce = f"nonce-{told.key.worker_id}"
    return (await space.do(leases.renew(space.keys, told, inc, nonce, ttl_ms=LONG_MS))).is_out


async def test_a_worker_whose_engine_is_ill_is_out_of_service_and_kept(space):
    ill, well = await space.worker("a"), await space.worker("b")
    await space.reserve(ill, "r1")
    assert await renew_ill(space, ill)
    snapshot = await space.loads()
    assert (list(snapshot.loads), snapshot.lapsed) == ([well], {ill})
    assert (await space.reserve(ill, "r2")).reason == "lapsed"
    assert await space.retire_lapsed(grace_ms=5_000) == 0
    assert await space.renew(ill)
    assert (await space.load(ill)).requests == 1


async def test_no_more_than_half_of_all_are_out_of_service_as_they_are_ill(space):
    incs = [await space.worker(name) for name in "abcde"]
    for _ in range(3):
        assert [await renew_ill(space, inc) for inc in incs] == [True, True, False, False, False]
    assert await space.renew(incs[0])
    assert [await renew_ill(space, inc) for inc in incs[1:]] == [True, True, False, False]


async def test_the_last_worker_is_never_out_of_service_as_it_is_ill(space, a):
    assert not await renew_ill(space, a)
    b = await space.worker("b")
    assert await renew_ill(space, a)
    assert not await renew_ill(space, b)


async def test_the_last_of_a_role_is_never_out_of_service_as_it_is_ill(space):
    a, b, c = [await space.worker(name) for name in "abc"]
    for inc, role in ((a, Role.PREFILL), (b, Role.DECODE), (c, Role.DECODE)):
        space.infos[inc] = replace(space.infos[inc], role=role)
        assert await space.renew(inc)
    assert not await renew_ill(space, a)
    assert await renew_ill(space, b)


async def test_those_that_are_suspended_or_gone_count_among_those_that_are_out(space):
    a, b, c, _ = [await space.worker(name) for name in "abcd"]
    await space.reserve(a, "r1")
    assert await space.suspend("r1") == a
    await space.renew(b, ttl_ms=1)
    await space.until_lease_lapses(b)
    assert not await renew_ill(space, c)
    assert await space.renew(b)
    assert await renew_ill(space, c)


async def test_operators_are_told_once_that_an_engine_is_ill(space):
    ill = await space.worker("a")
    await space.worker("b")
    for _ in range(3):
        await renew_ill(space, ill, "does not answer")
    told = [fields for _, fields in await space.redis.xrange(space.key("events"))]
    assert [event for event in told if event[b"kind"] == b"ill"] == [
        {b"kind": b"ill", b"subject": b"a:0", b"text": b"does not answer"}
    ]


async def test_one_engine_is_one_worker_as_long_as_that_one_is_routed_to(space):
    async def same(worker, inc, engine="e", nonce=""):
        told = replace(info(worker), engine_id=engine)
        call = leases.renew(space.keys, told, inc, nonce or f"nonce-{worker}", ttl_ms=LONG_MS)
        return (await space.do(call)).same

    a, b = await space.worker("a"), await space.worker("b")
    assert await same("a", a) == ""
    assert await same("b", b) == "has the same engine as worker a:0, which gets the requests"
    assert await same("a", a) == ""
    assert await same("b", b, "another") == ""  # it was started anew
    assert await same("b", b, "") == await same("a", a, "") == ""
    assert await same("b", b) != ""
    # The first one is looked after by routers alone: who has an agent is the worker.
    await space.redis.zadd(space.key("leases"), {str(a): await space.now_ms() + 500})
    assert await space.do(leases.vouch(space.keys, [a], most_ms=LONG_MS)) == [True]
    assert await same("b", b) == ""
    told = orjson.dumps(orjson.loads(await space.get("workers", a) or "") | {"engine_id": "e"})
    await space.redis.hset(space.key("workers"), str(a), told)
    await space.redis.zadd(space.key("leases"), {str(a): await space.now_ms() + 500})
    assert await space.do(leases.vouch(space.keys, [a], most_ms=LONG_MS)) == [False]
    assert await same("a", a) != ""
    await space.retire("b", b)
    assert await same("a", a) == ""
