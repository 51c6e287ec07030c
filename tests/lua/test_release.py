from __future__ import annotations

from app.core.reservations import Load
from tests.lua.conftest import Namespace


async def test_a_release_before_the_first_token_gives_everything_back(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    assert await space.release("r1")
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=1)


async def test_a_release_while_decoding_gives_everything_back(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.prefill_complete("r1")
    assert await space.release("r1")
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=1)


async def test_a_released_request_leaves_no_key(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    await space.release("r1")
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry"]
    assert not await space.redis.exists(*(space.keys[key] for key in keys))


async def test_a_repeated_release_changes_nothing(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    await space.reserve(inc, "r2")
    assert await space.release("r1")
    before = await space.contents()
    assert not await space.release("r1")
    assert await space.contents() == before


async def test_a_release_keeps_what_others_were_promised(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r2", tokens=60, us=2000, blocks=4)
    await space.reserve(inc, "r3", tokens=30, us=1000, blocks=2)
    await space.prefill_complete("r3")
    await space.release("r1")
    load = await space.load(inc)
    assert (load.prefill_tokens, load.prefill_us, load.head_us) == (60, 2000, 2000)
    assert (load.blocks, load.requests, load.decoding, load.total) == (6, 2, 1, 3)


async def test_releasing_one_who_waits_leaves_the_head_alone(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", us=5000)
    await space.reserve(inc, "r2", us=2000)
    before = await space.load(inc)
    await space.release("r2")
    load = await space.load(inc)
    assert (load.prefill_us, load.head_us) == (5000, 5000)
    assert load.head_since_ms == before.head_since_ms


async def test_an_unknown_request_cannot_be_released(space: Namespace) -> None:
    await space.worker("a")
    assert not await space.release("r1")
