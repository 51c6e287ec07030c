import pytest

from app.core.loads import Load
from app.state import reservations
from app.state.reservations import PrefillComplete
from tests.eventually import eventually
from tests.lua.conftest import LONG_MS


@pytest.mark.oldest_too
async def test_a_first_token_removes_the_prefill_and_keeps_the_blocks(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    assert await space.prefill_complete("r1")
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, blocks=7, requests=1, decoding=1, total=1)
    assert await space.get(f"requests:{inc}", "r1") == "100 5000 7 d -"
    assert not await space.redis.exists(space.keys[f"prefills:{inc}"])


async def test_a_repeated_first_token_changes_nothing(space, inc):
    await space.reserve(inc, "r1")
    await space.reserve(inc, "r2")
    assert await space.prefill_complete("r1")
    before = await space.contents()
    assert await space.prefill_complete("r1")
    assert await space.contents() == before


async def test_the_next_prefill_becomes_the_head_and_starts_to_drain_now(space, inc):
    await space.reserve(inc, "r1", us=5000)
    await space.reserve(inc, "r2", us=2000)
    await space.reserve(inc, "r3", us=1000)
    first = await space.load(inc)
    before = await eventually(space.now_ms, lambda now: now > first.head_since_ms)
    await space.prefill_complete("r1")
    load = await space.load(inc)
    assert (load.prefill_us, load.head_us) == (3000, 2000)
    assert before <= load.head_since_ms <= await space.now_ms()
    await space.prefill_complete("r2")
    assert (await space.load(inc)).head_us == 1000
    await space.prefill_complete("r3")
    assert (await space.load(inc)).head_us == 0


async def test_a_first_token_out_of_order_leaves_the_head_alone(space, inc):
    await space.reserve(inc, "r1", us=5000)
    await space.reserve(inc, "r2", us=2000)
    await space.reserve(inc, "r3", us=1000)
    before = await space.load(inc)
    await eventually(space.now_ms, lambda now: now > before.head_since_ms)
    await space.prefill_complete("r2")
    load = await space.load(inc)
    assert (load.prefill_us, load.decoding) == (6000, 1)
    assert (load.head_us, load.head_since_ms) == (5000, before.head_since_ms)
    await space.prefill_complete("r1")
    assert (await space.load(inc)).head_us == 1000


async def test_a_first_token_of_an_unknown_request_is_rejected(space):
    await space.worker("a")
    assert not await space.prefill_complete("r1")


async def test_a_first_token_leaves_unreadable_requests_and_loads_alone(space, inc):
    await space.reserve(inc, "r1")
    await space.reserve(inc, "r2")
    await space.redis.hset(space.keys[f"requests:{inc}"], "r1", "spoilt")
    before = await space.contents()
    assert await space.prefill_complete("r1")
    assert await space.contents() == before
    await space.redis.hset(space.key("load"), str(inc), "spoilt")
    before = await space.contents()
    assert await space.prefill_complete("r2")
    assert await space.contents() == before


async def test_a_first_token_of_a_released_request_is_rejected(space, inc):
    await space.reserve(inc, "r1")
    await space.release("r1")
    before = await space.contents()
    assert not await space.prefill_complete("r1")
    assert await space.contents() == before


async def test_the_first_token_extends_the_reservation_once(space, inc):
    await space.reserve(inc, "r1", us=1000, prefill_ttl_ms=500)
    before = await space.now_ms()
    assert await space.prefill_complete("r1", ttl_ms=9000)
    ends_ms = await space.expires_ms("expiry", "r1")
    assert before + 9000 <= ends_ms <= await space.now_ms() + 9000
    assert await space.prefill_complete("r1", ttl_ms=20_000)
    assert await space.expires_ms("expiry", "r1") == ends_ms


async def test_a_first_token_is_reported_by_the_id_of_the_reservation(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.reserve(inc, "r1", attempt="1000-bb")
    assert not await space.prefill_complete("r1~cc")
    for decoding, tag in enumerate(("bb", "aa"), start=1):
        assert await space.prefill_complete(f"r1~{tag}")
        assert (await space.load(inc)).decoding == decoding


async def test_one_call_completes_each_by_itself(space):
    inc = await space.worker("w1")
    await space.reserve(inc, "r1", tokens=100, attempt="1-aa")
    await space.reserve(inc, "r2", tokens=30, attempt="9-bb")
    await space.reserve(inc, "r3", tokens=5, attempt="3-cc")
    call = reservations.prefill_complete(
        space.keys,
        [
            PrefillComplete("r1", LONG_MS),
            PrefillComplete("gone", LONG_MS),
            PrefillComplete("r2", LONG_MS, began_by_ms=8),
            PrefillComplete("r3", LONG_MS),
        ],
    )
    assert await space.do(call) == ["1-aa", None, None, "3-cc"]
    load = await space.load(inc)
    assert (load.decoding, load.prefill_tokens) == (2, 30)
