from dataclasses import replace

import pytest

from app.core.errors import NamespaceMissing, WrongVersion
from app.core.loads import Reservation
from app.core.types import WorkerKey
from app.state import index, leases
from tests.eventually import eventually
from tests.lua.conftest import NO_LOAD, info


@pytest.mark.oldest_too
async def test_every_live_worker_has_a_load_and_the_time_is_the_redis_clock(space, a, b):
    before = await space.now_ms()
    snapshot = await space.loads()
    assert before <= snapshot.now_ms <= await space.now_ms()
    assert snapshot.loads == {a: NO_LOAD, b: NO_LOAD}


async def test_a_load_adds_up_what_is_reserved(space, a, b):
    await space.reserve(b, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(b, "r2", tokens=50, us=2000, blocks=3)
    snapshot = await space.loads()
    assert snapshot.loads[a] == NO_LOAD
    load = snapshot.loads[b]
    assert (load.prefill_tokens, load.prefill_us, load.blocks) == (150, 7000, 10)
    assert (load.requests, load.decoding, load.total) == (2, 0, 2)
    assert load.head_us == 5000
    assert 0 <= snapshot.now_ms - load.head_since_ms < 5000


async def test_a_worker_whose_lease_lapsed_is_left_out_even_before_it_is_retired(space):
    a, b = await space.worker("a", ttl_ms=1), await space.worker("b")
    await space.until_lease_lapses(a)
    assert set((await space.loads()).loads) == {b}
    assert await space.get("load", a) is not None


async def test_a_staged_incarnation_is_left_out(space):
    old = await space.worker("a")
    await space.worker("a", resync=True)
    assert set((await space.loads()).loads) == {old}


async def test_a_namespace_without_live_workers_has_no_loads(space, inc):
    await space.retire("a", inc)
    assert (await space.loads()).loads == {}


@pytest.mark.parametrize(("text", "held"), [("1", 1), ("9", 9), ("0", 0)])
async def test_a_namespace_of_another_version_is_an_error(space, a, text, held):
    await space.redis.hset(space.key("meta"), "version", text)
    with pytest.raises(WrongVersion, match=f"namespace 'test' holds version {held} of the data"):
        await space.loads()


async def test_the_entries_of_workers_say_what_version_a_namespace_has_that_lost_it(space, inc):
    before = await space.loads()
    for lost in (None, "x"):
        await space.redis.hdel(space.key("meta"), "version")
        if lost is not None:
            await space.redis.hset(space.key("meta"), "version", lost)
        assert (await space.loads()).loads == before.loads
        await space.redis.hset(space.key("workers"), "8", '{"worker":"old:0"}')
        assert (await space.loads()).loads == before.loads
        entry = await space.get("workers", inc)
        await space.redis.hdel(space.key("workers"), str(inc))
        with pytest.raises(WrongVersion, match="holds version 1 of the data model"):
            await space.loads()
        await space.redis.hset(space.key("workers"), "8", "junk")
        assert (await space.loads()).loads == before.loads
        await space.redis.hset(space.key("workers"), str(inc), entry)


async def test_a_missing_namespace_is_an_error(space):
    with pytest.raises(NamespaceMissing, match="no worker has registered yet"):
        await space.loads()


@pytest.mark.parametrize(
    "text",
    [
        *("", "spoilt", "1 2 3", "0 0 0 0 0 0 0 -1", "0 0 0 0 0 0 0 1.5"),
        *(" ".join("9" * 16 if i == field else "0" for i in range(8)) for field in range(8)),
    ],
)
async def test_an_unreadable_load_is_left_out(space, a, b, text):
    """`reserve` refuses its worker, too."""
    await space.redis.hset(space.key("load"), str(a), text)
    assert set((await space.loads()).loads) == {b}
    refused = await space.reserve(a, "r1")
    assert set(refused.fresh.loads) == {b}


async def test_leases_and_loads_of_no_incarnation_are_left_out(space, inc):
    endless = "9" * 5000
    await space.redis.zadd(space.key("leases"), {"junk": 9e15, "77": 9e15, endless: 9e15})
    loads = {"junk": "0 0 0 0 0 0 0 0", "78": "", endless: "0 0 0 0 0 0 0 0", endless + "9": ""}
    await space.redis.hset(space.key("load"), mapping=loads)
    snapshot = await space.loads()
    assert set(snapshot.loads) == {inc}
    assert snapshot.lapsed == {78}


async def test_workers_ms_is_never_what_it_was_though_the_clock_is(space, inc):
    ahead = await space.now_ms() + 60_000
    await space.redis.hset(space.key("meta"), "workers_ms", ahead)
    await space.worker("b")
    assert (await space.loads()).workers_ms == ahead + 1
    space.infos[inc] = replace(space.infos[inc], adapters=("new",))
    assert await space.renew(inc)
    assert (await space.loads()).workers_ms == ahead + 2


async def test_workers_ms_changes_only_when_a_worker_registers(space, a):
    before = (await space.loads()).workers_ms
    assert (await space.loads()).workers_ms == before
    await eventually(space.now_ms, lambda now: now != before)
    await space.worker("b")
    assert (await space.loads()).workers_ms != before


@pytest.mark.parametrize("value", ["spoilt", "", None])
async def test_an_unreadable_workers_ms_is_zero(space, inc, value):
    if value is None:
        await space.redis.hdel(space.key("meta"), "workers_ms")
    else:
        await space.redis.hset(space.key("meta"), "workers_ms", value)
    snapshot = await space.loads()
    assert (snapshot.workers_ms, snapshot.loads) == (0, {inc: NO_LOAD})


async def test_there_is_no_namespace_until_the_first_worker_is_activated(space):
    call = leases.register(space.keys, info("a"), "nonce-a", ttl_ms=60_000)
    inc = (await space.do(call)).incarnation
    with pytest.raises(NamespaceMissing):
        await space.loads()
    assert await space.do(index.open_shard(space.shard, inc, "nonce-a", 8))
    assert await space.do(leases.activate(space.keys, WorkerKey("a"), inc, "nonce-a"))
    assert (await space.loads()).loads == {inc: NO_LOAD}


async def test_loads_say_when_a_reservation_was_of_another_flow_than_the_one_before(space, a):
    async def mixed_ms(request_id, flow):
        await space.reserve(a, request_id, flow=flow)
        return (await space.loads()).mixed_ms

    # One that names none tells nothing.
    flows = ("normal:x", "normal:x", "", "normal:x")
    assert [await mixed_ms(f"r{n}", flow) for n, flow in enumerate(flows)] == [0] * 4
    before = await space.now_ms()
    mixed = await mixed_ms("r4", "low:x")
    assert before <= mixed <= await space.now_ms()
    assert await mixed_ms("r5", "low:x") == mixed
    refused = await space.reserve(a, "r6", flow="normal:x", max_requests=1)
    assert refused is not None
    assert (await space.loads()).mixed_ms >= mixed
    pair = [
        Reservation(f"s{n}", 1, 1, 1, incarnation=a, max_requests=99, flow=f"low:{n}") for n in "yx"
    ]
    await space.redis.hdel(space.key("meta"), "flow", "mixed_ms")
    await space.reserve_all(*pair)
    assert (await space.loads()).mixed_ms
