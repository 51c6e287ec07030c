from __future__ import annotations

from dataclasses import replace

from app.core.types import TierOverlap
from tests.lua.conftest import NO_LOAD, A, B, C, Namespace


async def test_a_switch_routes_to_the_new_incarnation_and_retires_the_old(
    space: Namespace,
) -> None:
    old = await space.worker("a")
    await space.hold(old, [A, B, C])
    new = await space.worker("a", resync=True)
    await space.hold(new, [A, B])
    assert await space.activate("a", new)
    assert await space.get("current", "a:0") == str(new)
    assert await space.match([A, B, C]) == [{new: TierOverlap(device=2)}]
    assert set((await space.loads()).loads) == {new}
    assert not await space.renew(old)


async def test_requests_in_flight_move_to_the_new_incarnation(space: Namespace) -> None:
    old = await space.worker("a")
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


async def test_a_switch_with_nothing_in_flight_leaves_nothing_behind(space: Namespace) -> None:
    old = await space.worker("a")
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert await space.load(new) == NO_LOAD
    assert await space.reserve(new, "r1") is None
    assert not await space.redis.exists(space.keys[f"requests:{old}"])


async def test_a_repeated_switch_changes_nothing(space: Namespace) -> None:
    await space.worker("a")
    new = await space.worker("a", resync=True)
    assert await space.activate("a", new)
    assert await space.reserve(new, "r1", blocks=7) is None
    before = await space.contents()
    assert await space.activate("a", new)
    assert await space.contents() == before


async def test_a_switch_by_another_process_is_refused(space: Namespace) -> None:
    old = await space.worker("a")
    new = await space.worker("a", resync=True)
    assert not await space.activate("a", new, nonce="stranger")
    assert await space.get("current", "a:0") == str(old)


async def test_an_incarnation_that_was_retired_cannot_be_switched_to(space: Namespace) -> None:
    old = await space.worker("a")
    new = await space.worker("a", resync=True)
    assert await space.retire("a", new)
    assert not await space.activate("a", new)
    assert await space.get("current", "a:0") == str(old)


async def test_a_staged_incarnation_cannot_replace_another_process(space: Namespace) -> None:
    await space.worker("a")
    staged = await space.worker("a", resync=True)
    other = await space.worker("a", nonce="other")
    assert not await space.activate("a", staged)
    assert await space.get("current", "a:0") == str(other)
