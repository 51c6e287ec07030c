from dataclasses import replace

import pytest

from app.core.loads import Load, Reservation
from app.core.types import Incarnation
from app.state import reservations
from app.state.reservations import CARRIED_MS, Extension, ExtensionOutcome

NEITHER, EXTENDED, AGAIN = ExtensionOutcome


async def extend(space, inc, request_id="r1", attempt="1000-aa", *, decoding=False):
    promised = Reservation(request_id, 100, 5000, 7, attempt, carried=True)
    extension = Extension(f"{request_id}~{attempt[-2:]}", promised, inc, decoding)
    (outcome,) = await space.do(reservations.extend(space.keys, [extension]))
    return outcome


@pytest.mark.oldest_too
async def test_what_is_extended_lasts_on_and_counts_as_before(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa", ttl_ms=500)
    load = await space.load(inc)
    before = await space.now_ms()
    assert await extend(space, inc) is EXTENDED
    ends_ms = await space.expires_ms("expiry", "r1")
    assert before + CARRIED_MS <= ends_ms <= await space.now_ms() + CARRIED_MS
    assert await space.load(inc) == load


async def test_what_no_door_extends_any_more_ends_soon(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa", ttl_ms=600_000)
    assert await extend(space, inc) is EXTENDED
    assert await space.expires_ms("expiry", "r1") <= await space.now_ms() + CARRIED_MS


@pytest.mark.parametrize("decoding", [False, True])
async def test_what_expired_meanwhile_is_reserved_again(space, inc, decoding):
    await space.reserve(inc, "r1", attempt="1000-aa")
    if decoding:
        await space.prefill_complete("r1")
    load, record = await space.load(inc), await space.get(f"requests:{inc}", "r1")
    await space.backdate_expiry("r1")
    assert await space.expire() == 1
    assert await extend(space, inc, decoding=decoding) is AGAIN
    again = await space.load(inc)
    assert replace(again, head_since_ms=0) == replace(load, head_since_ms=0, total=2)
    assert await space.get(f"requests:{inc}", "r1") == record
    assert await space.release("r1~aa")
    ended = await space.load(inc)
    assert replace(ended, head_since_ms=0) == Load(total=2)


@pytest.mark.parametrize("state", ["computes", "computed", "hands on"])
async def test_what_a_source_has_computed_is_kept_for_its_lease_and_no_longer(space, state):
    inc, other = await space.worker("a"), await space.worker("b")
    tokens = 0 if state == "hands on" else 90
    source = Reservation("", tokens, 4000, 7, incarnation=other, max_requests=256)
    await space.reserve(inc, "r1", attempt="1000-aa", ttl_ms=500, source=source)
    if state == "computed":
        await space.prefill_complete("r1", 500, of_source=True)
    ends_ms = await space.expires_ms("expiry", "r1 source")
    assert await extend(space, inc) is EXTENDED
    assert (await space.expires_ms("expiry", "r1 source") > ends_ms) == (state != "computed")


async def test_a_redis_that_lost_everything_hears_again_what_is_carried(space):
    await space.reserve(await space.worker("a"), "r1", attempt="1000-aa")
    await space.redis.flushall()
    assert await extend(space, Incarnation(1)) is NEITHER
    inc = await space.worker("a")
    assert await extend(space, inc, decoding=True) is AGAIN
    assert (await space.load(inc)).decoding == 1


async def test_what_a_later_try_took_over_is_left_to_it(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.reserve(inc, "r1", attempt="2000-aa", ttl_ms=600_000)
    before = await space.contents()
    expires_ms = await space.expires_ms("expiry", "r1")
    assert await extend(space, inc, attempt="1000-aa") is NEITHER
    assert await space.contents() == before
    assert await space.expires_ms("expiry", "r1") == expires_ms


async def test_another_request_with_the_same_id_is_not_extended(space, inc):
    await space.reserve(inc, "r1", attempt="1000-bb", ttl_ms=600_000)
    expires_ms = await space.expires_ms("expiry", "r1")
    assert await extend(space, inc, attempt="1000-aa") is AGAIN
    assert await space.expires_ms("expiry", "r1") == expires_ms
    assert (await space.load(inc)).requests == 2


async def test_nothing_is_reserved_again_on_a_worker_that_is_gone(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.retire("a", inc)
    before = await space.contents()
    for gone in (inc, None):
        assert await extend(space, gone) is NEITHER
    assert await space.contents() == before
