from dataclasses import replace

import pytest

from app.core.types import Incarnation, TierOverlap
from tests.lua.conftest import NO_LOAD, A, B, C


@pytest.mark.oldest_too
async def test_a_switch_routes_to_the_new_incarnation_and_retires_the_old(space, old):
    await space.hold(old, [A, B, C])
    new = await space.worker("a", resync=True)
    await space.hold(new, [A, B])
    assert await space.activate("a", new)
    assert await space.get("current", "a:0") == str(new)
    assert await space.match([A, B, C]) == [{new: TierOverlap(device=2)}]
    assert set((await space.loads()).loads) == {new}
    assert not await space.renew(old)


async def test_requests_in_flight_move_to_the_new_incarnation(space, old):
    await space.reserve(old, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(old, "r2", tokens=60, us=2000, blocks=4)
    await space.reserve(old, "r3", tokens=30, us=1000, blocks=2)
    await space.prefill_complete("r1")
    before = await space.load(old)
    assert (before.prefill_tokens, before.blocks, before.requests, before.decoding) == (
        90,
        13,
        3,
        1,
    )

    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)

    assert await space.load(new) == before
    assert not await space.redis.exists(
        space.keys[f"requests:{old}"], space.keys[f"prefills:{old}"]
    )
    assert await space.redis.hlen(space.keys[f"requests:{new}"]) == 3
    assert await space.redis.lrange(space.keys[f"prefills:{new}"], 0, -1) == [b"r2", b"r3"]
    assert await space.prefill_complete("r2")
    assert await space.load(new) == replace(
        before,
        prefill_tokens=30,
        prefill_us=1000,
        head_us=1000,
        head_since_ms=(await space.load(new)).head_since_ms,
        decoding=2,
    )
    for request_id in ("r1", "r2", "r3"):
        assert await space.release(request_id)
    load = await space.load(new)
    assert load == replace(NO_LOAD, head_since_ms=load.head_since_ms, total=3)


async def test_prefills_in_flight_keep_their_order(space, old):
    requests = [f"r{n}" for n in range(10)]
    for request_id in requests:
        await space.reserve(old, request_id)
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    queue = await space.redis.lrange(space.keys[f"prefills:{new}"], 0, -1)
    assert [request_id.decode() for request_id in queue] == requests


async def test_a_request_reserved_again_on_another_worker_is_not_moved(space):
    old, other = await space.worker("a"), await space.worker("b")
    await space.reserve(old, "r1")
    await space.redis.delete(space.key("reservations"), space.key("expiry"))
    await space.reserve(other, "r1", blocks=9)
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert (await space.load(new)).requests == 0
    assert await space.get("reservations", "r1") == str(other)


async def test_a_switch_with_nothing_in_flight_leaves_nothing_behind(space, old):
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert await space.load(new) == NO_LOAD
    assert await space.reserve(new, "r1") is None
    assert not await space.redis.exists(space.keys[f"requests:{old}"])


async def test_a_repeated_switch_changes_nothing(space, old):
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert await space.reserve(new, "r1", blocks=7) is None
    before = await space.contents()
    assert await space.activate("a", new)
    assert await space.contents() == before


async def test_a_switch_by_another_process_is_refused(space, old):
    new = await space.worker("a", resync=True)
    assert not await space.activate("a", new, nonce="stranger")
    assert await space.get("current", "a:0") == str(old)


async def test_a_retired_incarnation_cannot_be_activated(space, old):
    new = await space.worker("a", resync=True)
    assert await space.retire("a", new)
    assert not await space.activate("a", new)
    assert await space.get("current", "a:0") == str(old)


async def test_a_staged_incarnation_cannot_replace_another_process(space, old):
    staged = await space.worker("a", resync=True)
    other = await space.worker("a", nonce="other")
    assert not await space.activate("a", staged)
    assert await space.get("current", "a:0") == str(other)


async def test_a_new_process_inherits_no_requests(space):
    old = await space.worker("a", nonce="first")
    await space.reserve(old, "r1")
    new = await space.worker("a", nonce="second")
    assert (await space.loads()).loads == {new: NO_LOAD}
    assert not await space.redis.exists(space.key("reservations"), space.key("expiry"))


async def test_unreadable_requests_are_not_moved(space, old):
    for request_id in ("r1", "r2", "r3"):
        await space.reserve(old, request_id, tokens=100, us=5000, blocks=7)
    await space.redis.hset(space.keys[f"requests:{old}"], "r2", "spoilt")
    await space.redis.delete(space.keys[f"prefills:{old}"])
    await space.redis.hset(space.key("load"), str(old), "spoilt")
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    load = await space.load(new)
    assert (load.prefill_tokens, load.head_us, load.blocks, load.requests) == (200, 5000, 14, 2)
    assert await space.redis.hgetall(space.key("reservations")) == {
        b"r1": b"%d" % new,
        b"r3": b"%d" % new,
    }


async def test_requests_left_under_a_reused_number_are_discarded(space, old):
    """Redis lost everything else of an earlier incarnation and gave out its number again."""
    await space.redis.hset(space.keys["requests:2"], "r1", "100 5000 7 p -")
    await space.redis.hset(space.key("reservations"), "r1", "2")
    await space.redis.rpush(space.keys["prefills:2"], "r1")
    assert await space.worker("b") == 2
    assert (await space.load(Incarnation(2))) == NO_LOAD


async def test_the_incarnation_held_before_is_retired_even_if_current_was_lost(space, old):
    await space.reserve(old, "r1")
    new = await space.worker("a", resync=True)
    await space.redis.delete(space.key("current"), space.key("load"))
    assert await space.activate("a", new)
    assert set((await space.loads()).loads) == {new}
    assert (await space.load(new)).requests == 1


async def test_an_incarnation_of_another_worker_in_current_is_not_retired(space):
    old, other = await space.worker("a"), await space.worker("b")
    new = await space.worker("a", resync=True)
    await space.redis.hset(space.key("current"), "a:0", str(other))
    assert await space.activate("a", new)
    assert set((await space.loads()).loads) == {other, new}
    assert not await space.renew(old)
