import pytest

from app.state.waiting import MAX_CHARGE
from tests.eventually import eventually
from tests.lua.conftest import LONG_MS, ticket


@pytest.mark.oldest_too
async def test_a_ticket_that_waits_again_keeps_its_place(space):
    first, second = ticket("normal:a", "x", 1), ticket("normal:a", "x", 2)
    assert await space.wait("x", second) == 1
    assert await space.wait("x", first, second) == 1
    assert await space.wait("x", first, second) == 0
    assert await space.waiting() == {"normal:a": [first.name, second.name]}
    await space.redis.zadd(space.key("waiting:normal:a"), {second.name: 0})
    assert await space.wait("x", first, second) == 0
    assert await space.waiting() == {"normal:a": [first.name, second.name]}


async def test_a_router_sees_whether_any_request_waits(space):
    await space.worker("w")
    assert not (await space.loads()).somebody_waits
    one = ticket("normal:a", "x", 1)
    await space.wait("x", one)
    assert (await space.loads()).somebody_waits
    await space.leave(one)
    assert not (await space.loads()).somebody_waits


async def test_nothing_is_left_of_silent_replicas(space):
    for replica in ("x", "y"):
        await space.wait(replica, ticket(f"normal:{replica}", replica, 1), ttl_ms=20, kept_ms=40)
    assert await eventually(space.contents, lambda found: not found) == ""


async def test_every_key_of_the_line_expires(space):
    await space.wait("x", ticket("normal:a", "x", 1), ticket("low:b", "x", 2, picky=True))
    keys = [key async for key in space.redis.scan_iter()]
    assert len(keys) == 5
    for key in keys:
        assert 0 < await space.redis.pttl(key) <= LONG_MS, key


LINE_KEYS = ("line", "flows", "easy_flows", "waiting:normal:a", "picky:normal:a")


async def test_a_deleted_key_is_restored_by_the_next_call(space):
    both = ticket("normal:a", "x", 1), ticket("normal:a", "x", 2, picky=True)
    for key in LINE_KEYS:
        await space.wait("x", *both)
        await space.redis.delete(space.key(key))
        await space.wait("x", *both)
        assert await space.turns("x") == [one.name for one in both], key
        assert await space.redis.exists(space.key(key)), key


async def test_a_flow_whose_tickets_expired_starts_over(space):
    """Its replica fell silent, but others keep the line alive."""
    b = [ticket("normal:b", "y", n) for n in (2, 3)]
    await space.wait("x", ticket("normal:a", "x", 1), *b)
    await space.leave(*b, had_turn=True)
    await space.redis.delete(space.key("waiting:normal:a"))
    await space.wait("x", ticket("normal:a", "x", 4))
    assert await space.redis.zscore(space.key("flows"), "normal:a") == 2400 + 1600


def test_a_charge_is_a_whole_number_that_redis_can_add_up():
    def charge(tokens, weight):
        return int(ticket("normal:a", "x", 1, tokens=tokens, weight=weight).name.split()[1])

    assert charge(100, 1.0) == 1600
    assert charge(100, 16.0) == 100
    assert charge(100, 1 / 16) == 25_600
    assert charge(1, 16_000.0) == 1
    assert charge(1 << 20, 1e-9) == MAX_CHARGE
