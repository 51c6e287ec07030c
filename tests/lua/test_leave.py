import pytest

from tests.lua.conftest import ticket


@pytest.mark.oldest_too
async def test_nothing_is_left_once_nobody_waits(space):
    a, b = ticket("normal:a", "x", 1), ticket("low:b", "x", 2)
    await space.wait("x", a, b)
    await space.leave(a, had_turn=True)
    assert await space.waiting() == {"low:b": [b.name]}
    for _ in range(2):
        await space.leave(b)
        assert await space.contents() == ""


async def test_leaving_again_changes_nothing(space):
    a, b = ticket("normal:a", "x", 1), ticket("normal:a", "x", 2)
    await space.wait("x", a, b)
    await space.leave(a, had_turn=True)
    before = await space.contents()
    tag = await space.get("line", "tag")
    await space.leave(a, had_turn=True)
    assert await space.contents() == before
    assert await space.get("line", "tag") == tag == "800"


async def test_a_turn_out_of_order_is_charged_too(space):
    # Two replicas give turns at the same moment, so the second of a flow may leave first.
    a = [ticket("normal:a", "x", n) for n in range(1, 4)]
    b = [ticket("normal:b", "x", n, tokens=140) for n in range(4, 6)]
    await space.wait("x", *a, *b)
    await space.leave(a[1], had_turn=True)
    await space.leave(a[0], had_turn=True)
    assert await space.turns("x") == [t.name for t in (*b, a[2])]


async def test_a_deleted_flow_continues_from_the_last_turn(space):
    a = [ticket("normal:a", "x", n) for n in (1, 2)]
    b = ticket("normal:b", "x", 3)
    await space.wait("x", *a, b)
    await space.leave(b, had_turn=True)
    await space.redis.zrem(space.key("flows"), "normal:a")
    await space.leave(a[0], had_turn=True)
    assert await space.redis.zscore(space.key("flows"), "normal:a") == 2.5 * 1600


async def test_a_ticket_is_removed_from_whichever_key_it_is_in(space):
    one = ticket("normal:a", "x", 1)
    await space.wait("x", one)
    await space.redis.rename(space.key("waiting:normal:a"), space.key("picky:normal:a"))
    await space.leave(one)
    assert await space.contents() == ""
