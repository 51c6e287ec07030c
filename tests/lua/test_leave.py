from __future__ import annotations

from tests.lua.conftest import Namespace, ticket


async def test_once_nobody_waits_nothing_is_left(space: Namespace) -> None:
    a, b = ticket("normal:a", "x", 1), ticket("low:b", "x", 2)
    await space.wait("x", a, b)
    await space.leave(a, had_turn=True)
    assert await space.waits() == {"low:b": [b.name]}
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


async def test_who_left_is_taken_out_wherever_it_was_put(space: Namespace) -> None:
    one = ticket("normal:a", "x", 1)
    await space.wait("x", one)
    await space.redis.rename(space.key("waiting:normal:a"), space.key("picky:normal:a"))
    await space.leave(one)
    assert await space.contents() == ""
