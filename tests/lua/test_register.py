import pytest

from app.core.errors import NamespaceMismatch, WorkerReplaced, WrongVersion
from app.core.keys import DATA_VERSION
from app.core.registration import decode_info
from app.core.types import Incarnation, TierOverlap
from app.state import leases
from app.state.leases import Registration
from tests.lua.conftest import LONG_MS, NO_LOAD, A, B, info


@pytest.mark.oldest_too
async def test_the_first_registration_creates_the_namespace(space):
    before = await space.now_ms()
    registration = await space.register("a", block_size=4, shards=3)
    assert registration == Registration(Incarnation(1), predecessor_lives=False, shards=3)
    assert await space.get("meta", "version") == str(DATA_VERSION)
    assert await space.get("meta", "block_size") == "4"
    assert await space.get("meta", "shards") == "3"
    assert await space.get("meta", "incarnations") == "1"
    assert before <= int(await space.get("meta", "workers_ms") or 0) <= await space.now_ms()


async def test_the_number_of_shards_is_used_only_if_the_namespace_is_new(space):
    assert (await space.register("a", shards=3)).shards == 3
    assert (await space.register("b", shards=5)).shards == 3
    assert await space.get("meta", "shards") == "3"


async def test_a_number_in_use_is_not_given_out_again(space):
    assert await space.worker("a") == 1
    assert await space.worker("b") == 2
    await space.redis.delete(space.key("meta"))
    assert await space.worker("c") == 3


async def test_incarnation_numbers_count_up_and_are_never_reused(space):
    assert await space.worker("a") == 1
    assert await space.worker("b") == 2
    assert await space.retire("b", (await space.register("b")).incarnation)
    assert await space.worker("b") == 4


async def test_a_registered_worker_is_live_and_empty(space):
    before = await space.now_ms()
    inc = await space.worker("a", ttl_ms=LONG_MS)
    assert await space.get("current", "a:0") == "1"
    assert decode_info(await space.get("workers", inc) or "") == info("a")
    assert await space.get("writers", inc) == "nonce-a"
    assert (await space.loads()).loads == {inc: NO_LOAD}
    expires_ms = await space.expires_ms("leases", inc)
    assert before + LONG_MS <= expires_ms <= await space.now_ms() + LONG_MS


async def test_a_block_size_that_differs_from_the_namespace_is_refused(space):
    await space.worker("a", block_size=4)
    with pytest.raises(
        NamespaceMismatch, match="worker b:0 has block_size 16, but namespace test has 4"
    ):
        await space.register("b", block_size=16)
    assert await space.get("current", "b:0") is None
    assert await space.get("meta", "incarnations") == "1"


@pytest.mark.parametrize(("text", "held"), [("1", 1), ("9", 9), (None, 1)])
async def test_a_namespace_of_another_version_is_left_as_it_is(space, inc, text, held):
    if text is None:
        await space.redis.hdel(space.key("meta"), "version")
        await space.redis.hset(space.key("workers"), str(inc), '{"worker":"a:0"}')
    else:
        await space.redis.hset(space.key("meta"), "version", text)
    before = await space.contents()
    with pytest.raises(WrongVersion, match=f"holds version {held} of the data model"):
        await space.register("b", block_size=16)
    assert await space.contents() == before


@pytest.mark.parametrize("known", [("a",), ()])
async def test_a_version_that_was_lost_is_unknown_and_comes_back_with_a_registration(
    space, old, known
):
    await space.redis.hdel(space.key("meta"), "version")
    if not known:
        await space.redis.delete(space.key("workers"))
    await space.register("b")
    assert await space.get("meta", "version") == str(DATA_VERSION)


async def test_a_new_process_replaces_the_previous_incarnation_at_once(space):
    old = await space.worker("a", nonce="first")
    await space.hold(old, [A, B])
    assert await space.reserve(old, "r1") is None
    assert await space.match([A, B]) == [{old: TierOverlap(device=2)}]

    new = await space.worker("a", nonce="second")

    assert await space.match([A, B]) == [{}]
    assert (await space.loads()).loads == {new: NO_LOAD}
    assert await space.get("current", "a:0") == str(new)
    assert not await space.release("r1")
    assert not await space.renew(old)
    assert await space.lost() == [old]


async def test_a_registration_replaces_only_its_own_worker(space, a, b):
    await space.reserve(b, "r1")
    again = await space.worker("a")
    assert set((await space.loads()).loads) == {b, again}
    assert a not in (await space.loads()).loads
    assert await space.release("r1")


async def test_a_resync_is_staged_while_the_old_incarnation_lives(space, old):
    await space.hold(old, [A])
    staged = await space.register("a", resync=True)
    assert staged == Registration(Incarnation(2), predecessor_lives=True, shards=1)
    assert await space.get("current", "a:0") == str(old)
    assert set((await space.loads()).loads) == {old}
    assert await space.match([A]) == [{old: TierOverlap(device=1)}]


async def test_a_staged_incarnation_cannot_be_reserved_on(space, old):
    staged = await space.worker("a", resync=True)
    assert (await space.reserve(staged, "r1")).reason == "lapsed"


async def test_a_resync_after_the_lease_lapsed_takes_over_at_once(space, old):
    await space.reserve(old, "r1", tokens=100, us=5000, blocks=7)
    assert await space.renew(old, ttl_ms=1)
    await space.until_lease_lapses(old)
    new = await space.register("a", resync=True)
    assert not new.predecessor_lives
    load = await space.load(new.incarnation)
    assert (load.prefill_tokens, load.blocks, load.requests) == (100, 7, 1)
    assert await space.release("r1")


async def test_a_resync_in_an_emptied_redis_starts_afresh(space, old):
    await space.redis.flushall()
    other = await space.worker("b")
    again = await space.register("a", resync=True)
    assert not again.predecessor_lives, "another worker has its number now"
    assert (await space.loads()).loads == {other: NO_LOAD, again.incarnation: NO_LOAD}


async def test_a_process_replaced_by_a_live_one_cannot_resync(space, old):
    other = await space.worker("a", nonce="other")
    with pytest.raises(WorkerReplaced, match="worker a:0"):
        await space.worker("a", resync=True)
    assert await space.get("current", "a:0") == str(other)
    await space.redis.zadd(space.key("leases"), {str(other): 1})
    assert (await space.loads()).loads == {}
    again = await space.worker("a", resync=True)
    assert await space.get("current", "a:0") == str(again), "the other process has died since"


async def test_a_process_whose_entry_was_lost_can_still_be_replaced(space):
    await space.worker("a", nonce="first")
    await space.redis.delete(space.key("workers"))
    new = await space.worker("a", nonce="second")
    assert set((await space.loads()).loads) == {new}


async def test_a_process_that_does_not_know_of_its_own_switch_may_resync(space, old):
    """The answer to `activate` was lost."""
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert await registered(space, "a", held=old) == 3


async def registered(space, worker, held=None):
    """The number given to a process that has not opened the index yet."""
    call = leases.register(
        space.keys, info(worker), f"nonce-{worker}", ttl_ms=LONG_MS, previous=held
    )
    return (await space.do(call)).incarnation


async def test_registering_alone_does_not_change_routing(space, old):
    new = await registered(space, "a")
    assert set((await space.loads()).loads) == {old}
    assert await space.get("current", "a:0") == str(old)
    assert await space.get("load", new) is None


@pytest.mark.parametrize("left", ["workers", "leases", "writers", "load"])
async def test_a_number_is_not_given_out_again_while_any_trace_of_it_is_left(space, left):
    assert await space.worker("a") == 1
    gone = {"meta", "workers", "leases", "writers", "load"} - {left}
    await space.redis.delete(*(space.key(name) for name in gone))
    assert await registered(space, "b") == 2


@pytest.mark.parametrize("field", ["block_size", "shards"])
@pytest.mark.parametrize("value", ["spoilt", "", "0", "-1", "1e3"])
async def test_a_namespace_with_invalid_settings_is_created_again(space, field, value):
    await space.worker("a", shards=1)
    await space.redis.hset(space.key("meta"), field, value)
    assert (await space.register("b", shards=2)).shards == 2
    assert await space.get("meta", "block_size") == "4"
    assert len((await space.loads()).loads) == 2


async def test_a_process_whose_nonce_was_overwritten_may_resync(space, inc):
    await space.redis.hset(space.key("writers"), str(inc), "stranger")
    new = await space.register("a", resync=True)
    assert new.predecessor_lives
    assert await space.activate("a", new.incarnation)


async def test_a_current_entry_with_another_worker_s_number_replaces_nobody(space):
    inc, other = await space.worker("a"), await space.worker("b")
    await space.redis.hset(space.key("current"), "a:0", str(other))
    new = await space.register("a", resync=True)
    assert new.predecessor_lives, "by the entry of incarnation 1 itself"
    assert await space.activate("a", new.incarnation)
    assert set((await space.loads()).loads) == {other, new.incarnation}
    assert inc not in (await space.loads()).loads


@pytest.mark.parametrize("entry", [None, "5"])
async def test_a_current_entry_with_an_unknown_worker_s_number_replaces_nobody(space, old, entry):
    other = await space.worker("b")
    await space.redis.hset(space.key("current"), "a:0", str(other))
    if entry is None:
        await space.redis.delete(space.key("workers"))
    else:
        await space.redis.hset(space.key("workers"), str(other), entry)
    new = await space.register("a", resync=True)
    assert await space.activate("a", new.incarnation)
    assert await space.get("current", "a:0") == str(new.incarnation)
