from __future__ import annotations

from tests.lua.conftest import Namespace, ticket


async def test_once_nobody_waits_nothing_is_left(space: Namespace) -> None:
    a, b = ticket("normal:a", "x", 1), ticket("low:b", "x", 2)
    await space.wait("x", a, b)
    await space.leave(a, had_turn=True)
    assert await space.waiting() == {"low:b": [b.name]}
    for _ in range(2):
        await space.leave(b)
        assert await space.contents() == ""


async def test_who_left_before_leaves_nothing_again(space: Namespace) -> None:
    a, b = ticket("normal:a", "x", 1), ticket("normal:a", "x", 2)
    await space.wait("x", a, b)
    await space.leave(a, had_turn=True)
    before = await space.contents()
    tag = await space.get("line", "tag")
    await space.leave(a, had_turn=True)
    assert await space.contents() == before
    assert await space.get("line", "tag") == tag == "1600"


async def test_a_turn_out_of_order_is_charged_all_the_same(space: Namespace) -> None:
    # Two replicas give turns at the same moment: who is second in its flow may be done first.
    a = [ticket("normal:a", "x", n) for n in range(1, 4)]
    b = [ticket("normal:b", "x", n, tokens=140) for n in range(4, 6)]
    await space.wait("x", *a, *b)
    await space.leave(a[1], had_turn=True)
    await space.leave(a[0], had_turn=True)
    assert await space.turns("x") == [t.name for t in (*b, a[2])]


async def test_a_flow_that_somebody_removed_goes_on_from_the_last_turn(space: Namespace) -> None:
    a = [ticket("normal:a", "x", n) for n in (1, 2)]
    b = ticket("normal:b", "x", 3)
    await space.wait("x", *a, b)
    await space.leave(b, had_turn=True)
    await space.redis.zrem(space.key("flows"), "normal:a")
    await space.leave(a[0], had_turn=True)
    assert await space.redis.zscore(space.key("flows"), "normal:a") == 3 * 1600


async def test_from_what_somebody_made_something_else_all_leave(space: Namespace) -> None:
    both = ticket("normal:a", "x", 1), ticket("normal:a", "x", 2, picky=True)
    for key in ("line", "flows", "easy_flows", "waiting:normal:a", "picky:normal:a"):
        await space.wait("x", *both)
        await space.redis.delete(space.key(key))
        await space.redis.set(space.key(key), "spoilt")
        await space.leave(*both, had_turn=True)
        assert await space.contents() == "", key


async def test_who_left_is_taken_out_wherever_it_was_put(space: Namespace) -> None:
    one = ticket("normal:a", "x", 1)
    await space.wait("x", one)
    await space.redis.rename(space.key("waiting:normal:a"), space.key("picky:normal:a"))
    await space.leave(one)
    assert await space.contents() == ""
