from __future__ import annotations

import pytest

from app.core.errors import NamespaceMismatch, WorkerReplaced
from app.core.leases import Registration, decode_info
from app.core.types import Incarnation, TierOverlap
from tests.lua.conftest import LONG_MS, NO_LOAD, A, B, Namespace, info


async def test_the_first_registration_makes_the_namespace(space: Namespace) -> None:
    before = await space.now_ms()
    registration = await space.register("a", block_size=4, shards=3)
    assert registration == Registration(Incarnation(1), predecessor_lives=False, shards=3)
    assert await space.get("meta", "block_size") == "4"
    assert await space.get("meta", "shards") == "3"
    assert await space.get("meta", "incarnations") == "1"
    workers_ms = int(await space.get("meta", "workers_ms") or 0)
    assert before <= workers_ms <= await space.now_ms()


async def test_shards_count_only_where_the_namespace_is_new(space: Namespace) -> None:
    assert (await space.register("a", shards=3)).shards == 3
    assert (await space.register("b", shards=5)).shards == 3


async def test_a_number_in_use_is_not_given_again(space: Namespace) -> None:
    assert await space.worker("a") == 1
    assert await space.worker("b") == 2
    await space.redis.delete(space.key("meta"))
    assert await space.worker("c") == 3


async def test_incarnations_are_counted_up_and_never_reused(space: Namespace) -> None:
    assert await space.worker("a") == 1
    assert await space.worker("b") == 2
    assert await space.retire("b", (await space.register("b")).incarnation)
    assert await space.worker("b") == 4


async def test_a_registered_worker_is_live_and_empty(space: Namespace) -> None:
    before = await space.now_ms()
    inc = await space.worker("a", ttl_ms=LONG_MS)
    assert await space.get("current", "a:0") == "1"
    assert decode_info(await space.get("workers", inc) or "") == info("a")
    assert await space.get("writers", inc) == "nonce-a"
    assert (await space.loads()).loads == {inc: NO_LOAD}
    expires_ms = await space.expires_ms("leases", inc)
    assert before + LONG_MS <= expires_ms <= await space.now_ms() + LONG_MS


async def test_another_block_size_than_the_namespace_s_is_refused(space: Namespace) -> None:
    await space.worker("a", block_size=4)
    with pytest.raises(
        NamespaceMismatch, match="worker b:0 has block_size 16, namespace test has 4"
    ):
        await space.register("b", block_size=16)
    assert await space.get("current", "b:0") is None
    assert await space.get("meta", "incarnations") == "1"


async def test_a_registration_replaces_the_last_life_at_once(space: Namespace) -> None:
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


async def test_a_registration_replaces_only_its_own_worker(space: Namespace) -> None:
    a, b = await space.worker("a"), await space.worker("b")
    await space.reserve(b, "r1")
    again = await space.worker("a")
    assert set((await space.loads()).loads) == {b, again}
    assert a not in (await space.loads()).loads
    assert await space.release("r1")


async def test_a_resync_is_staged_while_the_old_incarnation_lives(space: Namespace) -> None:
    old = await space.worker("a")
    await space.hold(old, [A])
    staged = await space.register("a", resync=True)
    assert staged == Registration(Incarnation(2), predecessor_lives=True, shards=1)
    assert await space.get("current", "a:0") == str(old)
    assert set((await space.loads()).loads) == {old}
    assert await space.match([A]) == [{old: TierOverlap(device=1)}]


async def test_a_staged_incarnation_cannot_be_reserved_on(space: Namespace) -> None:
    await space.worker("a")
    staged = await space.worker("a", resync=True)
    refused = await space.reserve(staged, "r1")
    assert refused is not None
    assert refused.reason == "lapsed"


async def test_a_resync_after_the_lease_lapsed_takes_over_at_once(space: Namespace) -> None:
    old = await space.worker("a")
    await space.reserve(old, "r1", tokens=100, us=5000, blocks=7)
    assert await space.renew(old, ttl_ms=1)
    await space.lease_lapses(old)
    new = await space.register("a", resync=True)
    assert not new.predecessor_lives
    load = await space.load(new.incarnation)
    assert (load.prefill_tokens, load.blocks, load.requests) == (100, 7, 1)
    assert await space.release("r1")


async def test_a_resync_in_an_emptied_redis_starts_afresh(space: Namespace) -> None:
    await space.worker("a")
    await space.redis.flushall()
    again = await space.register("a", resync=True)
    assert not again.predecessor_lives
    assert await space.load(again.incarnation) == NO_LOAD


async def test_who_was_replaced_by_another_process_cannot_resync(space: Namespace) -> None:
    await space.worker("a")
    other = await space.worker("a", nonce="other")
    with pytest.raises(WorkerReplaced, match="worker a:0"):
        await space.worker("a", resync=True)
    assert await space.get("current", "a:0") == str(other)
