import pytest

from tests.lua.conftest import ticket


def short(name):
    """`x-7` for a ticket such as `x-000000007 1600 -`."""
    replica, _, number = name.split()[0].partition("-")
    return f"{replica}-{int(number)}"


@pytest.mark.oldest_too
async def test_the_longest_wait_is_first_within_a_flow(space):
    late, early = ticket("normal:a", "x", 1, since_ms=20), ticket("normal:a", "y", 2, since_ms=10)
    await space.wait("x", late)
    await space.wait("y", early)
    assert await space.turns("x", 1) == []
    assert await space.turns("y", 1) == [early.name]
    await space.leave(early, had_turn=True)
    assert await space.turns("x", 1) == [late.name]


async def test_tickets_of_the_same_millisecond_are_ordered_by_number(space):
    tickets = [
        ticket("normal:a", "x", n, since_ms=5, picky=n % 10 == 0) for n in (9, 10, 99, 100, 101)
    ]
    await space.wait("x", *reversed(tickets))
    assert await space.turns("x", 5) == [t.name for t in tickets]


async def test_each_replica_gets_only_its_own_tickets(space):
    mine = [ticket("normal:a", "x", n) for n in (1, 3)]
    others = [ticket("normal:a", "xy", n) for n in (2, 4)]
    await space.wait("x", *mine)
    await space.wait("xy", *others)
    assert await space.turns("x", 3) == [t.name for t in mine]
    assert await space.turns("xy", 3) == [others[0].name]
    assert await space.turns("z", 3) == []


async def test_flows_take_turns_by_weight_and_by_tokens(space):
    # Flow a has weight 3, so three of its turns cost as much as one of b's.
    await space.wait("x", *(ticket("normal:a", "x", n, weight=3.0) for n in range(1, 10)))
    await space.wait("x", *(ticket("normal:b", "x", n) for n in range(10, 14)))
    await space.wait("x", *(ticket("normal:c", "x", n, tokens=250) for n in range(14, 16)))
    order = [short(name) for name in await space.turns("x", 15)]
    flow_of = {f"x-{n}": "a" if n < 10 else "b" if n < 14 else "c" for n in range(1, 16)}
    assert "".join(flow_of[name] for name in order) == "aaabaaabacaabbc"


async def test_a_late_flow_neither_waits_for_earlier_turns_of_others_nor_catches_up(space):
    a = [ticket("normal:a", "x", n) for n in range(1, 9)]
    await space.wait("x", *a)
    for one in a[:4]:
        await space.leave(one, had_turn=True)
    b = [ticket("normal:b", "x", n) for n in range(9, 12)]
    await space.wait("x", *b)
    order = [short(name) for name in await space.turns("x")]
    assert order == ["x-9", "x-5", "x-10", "x-6", "x-11", "x-7", "x-8"]


async def test_a_ticket_that_gives_up_is_not_charged(space):
    a = [ticket("normal:a", "x", n) for n in range(1, 6)]
    b = [ticket("normal:b", "x", n) for n in range(6, 8)]
    await space.wait("x", *a, *b)
    await space.leave(*a[:3])
    order = [short(name) for name in await space.turns("x")]
    assert order == ["x-4", "x-6", "x-5", "x-7"]


async def test_picky_tickets_hold_up_nobody(space):
    picky = [ticket("normal:a", "x", n, picky=True) for n in range(1, 6)]
    await space.wait("x", *picky, ticket("normal:a", "x", 6), ticket("normal:a", "x", 7))
    names = [f"x-{n}" for n in range(1, 8)]
    assert [short(name) for name in await space.turns("x", 1)] == names[:6]
    assert [short(name) for name in await space.turns("x", 2)] == names


async def test_tickets_of_a_silent_replica_are_removed(space):
    gone = [ticket("normal:a", "gone", n, picky=n % 2 == 0) for n in range(1, 6)]
    await space.wait("gone", *gone)
    await space.redis.hset(space.key("line"), "gone", "1")
    assert await space.turns("x", 2) == []
    assert await space.contents() == ""
    mine = [ticket("normal:a", "x", n) for n in (6, 7)]
    other = ticket("normal:b", "x", 8, tokens=250)
    await space.wait("x", *mine, other)
    await space.wait("gone", *gone)
    assert await space.turns("x", 1) == []
    assert len((await space.contents()).split("gone-")) == 6
    await space.redis.hset(space.key("line"), "gone", "1")
    # The removed tickets are not charged: mine come before the other flow's.
    assert await space.turns("x", 3) == [t.name for t in (*mine, other)]
    assert await space.get("line", "tag") is None
    assert await space.waiting() == {"normal:a": [t.name for t in mine], "normal:b": [other.name]}


async def test_a_replica_that_comes_back_gets_its_place_back(space):
    early, late = ticket("normal:a", "x", 1), ticket("normal:a", "y", 2)
    await space.wait("x", early)
    await space.wait("y", late)
    await space.redis.hdel(space.key("line"), "x")
    assert await space.turns("y", 1) == [late.name]
    await space.wait("x", early)
    assert await space.turns("y", 1) == []
    assert await space.turns("x", 1) == [early.name]


async def test_corrupt_tickets_and_flows_get_no_turn(space):
    one = ticket("normal:a", "x", 1)
    await space.wait("x", one)
    for key in ("waiting:normal:a", "picky:normal:a"):
        await space.redis.zadd(space.key(key), {"nonsense": 0, "x-7 ? -": 0})
    for key in ("flows", "easy_flows"):
        await space.redis.zadd(space.key(key), {"normal:nobody": -5, "normal:b": "inf"})
    await space.redis.hset(space.key("line"), "tag", "much")
    assert one.name in await space.turns("x", 4)
    assert one.name in await space.turns("x", 4, max_picky=1)
    contents = await space.contents()
    assert "nonsense" not in contents
    assert "nobody" not in contents


async def test_more_picky_tickets_than_have_turns_at_once_hold_up_nobody(space):
    picky = [ticket("high:a", "x", n, picky=True, weight=16.0) for n in range(1, 71)]
    behind = ticket("high:a", "x", 71, weight=16.0)
    other = ticket("low:b", "x", 72, tokens=9000)
    await space.wait("x", *picky, behind, other)
    first = [one.name for one in picky[:64]]
    assert await space.turns("x", 1) == [*first, behind.name]
    assert await space.turns("x", 2) == [*first, behind.name, other.name]


async def test_flows_of_picky_tickets_hold_up_no_other_flow(space):
    picky = [ticket(f"high:{n:03}", "x", n, picky=True, weight=16.0) for n in range(1, 201)]
    other = ticket("low:b", "x", 201)
    await space.wait("x", *picky, other)
    assert await space.turns("x", 1) == [*(one.name for one in picky[:64]), other.name]


async def test_a_flow_renamed_to_what_is_no_text_stops_nobody(space):
    only = ticket("normal:a", "x", 1)
    await space.wait("x", only)
    waiting = space.keys["waiting:"].encode()
    await space.redis.rename(waiting + b"normal:a", waiting + b"\xff")
    await space.redis.zadd(space.keys["flows"], {b"\xff": 0})
    assert await space.turns("x") == [only.name]
