import pytest

from app.core.keys import Keyspace
from app.core.types import Incarnation, SequenceHash
from app.state import in_flight
from app.state.scripts import ScriptRunner

KEYS = Keyspace("test")
LEAST = 4
"""Blocks that prompts must share to be told of together."""
NOW_MS = 1000
CHAIN = [SequenceHash(2**60 + n) for n in range(1, 101)]
"""Of 100 blocks; some are recorded: 4 to 16, 18, 20, ... 32, 36, ... 64, 72, ... 96."""


def parting_after(shared):
    """A chain that has the first `shared` blocks of CHAIN, and others behind these."""
    return CHAIN[:shared] + [SequenceHash(n) for n in range(1, 101 - shared)]


async def put(runner, attempt, inc, chain):
    name = in_flight.alike(chain, LEAST)
    about = (Incarnation(inc), chain, LEAST, NOW_MS + 10, 60_000)
    await runner.run(in_flight.compute(KEYS, name, attempt, *about))


async def seen(runner, now_ms=NOW_MS):
    fields = await runner.one(in_flight.computing(KEYS, in_flight.alike(CHAIN, LEAST)))
    return in_flight.parsed(fields, CHAIN, LEAST, now_ms)


@pytest.fixture
def runner(redis):
    return ScriptRunner(redis, timeout_s=5)


@pytest.mark.parametrize(
    ("shared", "blocks"), [(100, 96), (96, 96), (95, 88), (17, 16), (4, 4), (3, None), (0, None)]
)
async def test_a_prompt_in_flight_is_told_as_far_as_it_begins_alike(runner, shared, blocks):
    await put(runner, "1-a", 7, parting_after(shared))
    expected = {} if blocks is None else {Incarnation(7): blocks}
    assert (await seen(runner)).blocks == expected


async def test_of_several_prompts_each_worker_counts_with_the_longest(runner):
    for attempt, inc, shared in (("1-a", 1, 20), ("1-b", 1, 40), ("1-c", 2, 8), ("1-d", 3, 0)):
        await put(runner, attempt, inc, parting_after(shared))
    found = await seen(runner)
    assert found.blocks == {Incarnation(1): 40, Incarnation(2): 8}
    assert (found.num, found.over) == (3, [])


async def test_what_is_computed_or_over_counts_no_longer(runner, redis):
    await put(runner, "1-a", 1, CHAIN)
    await put(runner, "1-b", 2, CHAIN)
    name = in_flight.alike(CHAIN, LEAST)
    await runner.one(in_flight.computed(KEYS, name, ["1-a"]))
    assert (await seen(runner)).blocks == {Incarnation(2): 96}
    assert await seen(runner, NOW_MS + 10) == ({}, 0, [b"1-b"])
    await redis.hset(KEYS["computing:"] + name, "1-c", "spoilt")
    assert (await seen(runner)).over == [b"1-c"]
    assert 0 < await redis.pttl(KEYS["computing:"] + name) <= 60_000


def test_a_prompt_of_fewer_blocks_is_like_no_other():
    assert in_flight.alike(CHAIN[:3], LEAST) == ""
    assert in_flight.alike(CHAIN[:4], LEAST) == f"{CHAIN[3]:016x}"
    assert in_flight.alike(CHAIN, 0) == ""
