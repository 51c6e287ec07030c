from __future__ import annotations

from app.core.types import Incarnation
from tests.lua.conftest import LONG_MS, Namespace


async def test_renewing_extends_the_lease_from_now(space: Namespace) -> None:
    inc = await space.worker("a", ttl_ms=5_000)
    before = await space.now_ms()
    assert await space.renew(inc, ttl_ms=LONG_MS)
    expires_ms = await space.expires_ms("leases", inc)
    assert before + LONG_MS <= expires_ms <= await space.now_ms() + LONG_MS


async def test_a_lapsed_lease_is_revived_with_all_that_was_reserved(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.renew(inc, ttl_ms=1)
    await space.lease_lapses(inc)
    assert (await space.loads()).loads == {}
    assert await space.lapse(grace_ms=60_000) == 0
    assert await space.renew(inc)
    assert (await space.load(inc)).requests == 1


async def test_a_lease_that_was_retired_cannot_be_renewed(space: Namespace) -> None:
    inc = await space.worker("a", ttl_ms=1)
    await space.lease_lapses(inc)
    assert await space.lapse() == 1
    assert not await space.renew(inc)
    assert (await space.loads()).loads == {}


async def test_another_process_cannot_renew_a_lease(space: Namespace) -> None:
    inc = await space.worker("a", ttl_ms=5_000)
    expires_ms = await space.expires_ms("leases", inc)
    assert not await space.renew(inc, nonce="stranger")
    assert await space.expires_ms("leases", inc) == expires_ms


async def test_an_unknown_incarnation_cannot_be_renewed(space: Namespace) -> None:
    await space.worker("a")
    assert not await space.renew(Incarnation(99), nonce="nonce-a")
    assert await space.redis.zscore(space.keys["leases"], "99") is None


async def test_a_staged_incarnation_renews_its_lease_like_any_other(space: Namespace) -> None:
    old = await space.worker("a")
    staged = await space.worker("a", resync=True)
    assert await space.renew(old)
    assert await space.renew(staged)
