import asyncio

import pytest

from app.core.types import Incarnation, SequenceHash, TierOverlap
from app.state import index
from app.state.index import SweepStep
from tests.lua.conftest import CROWD, HOST, LONG_MS, A, B, C

SPREAD = [SequenceHash(bucket << 60) for bucket in range(16)]
"""One block for each of the 16 buckets of 4 bits."""


@pytest.fixture(autouse=True)
def roots(space):
    """Let each of these blocks begin a chain of its own."""
    for block in (A, B, C, *SPREAD):
        space.set_chain([block])


async def swept(space, max_buckets=256):
    """Entries removed in a step, and buckets left."""
    step = await space.sweep(max_buckets)
    return step.removed, step.buckets_left


async def test_without_dead_incarnations_there_is_nothing_to_sweep(space, inc):
    await space.hold(inc, [A, B])
    before = await space.contents()
    assert await swept(space) == (0, 0)
    await space.redis.hdel(space.key("shard"), "stepped_ms")
    # Another router reported this one as lost, too, and it has been swept since.
    lost = [Incarnation(77)]
    await space.do(index.sweep(space.shard, lost, max_buckets=1, scrub_ms=LONG_MS))
    await space.redis.hdel(space.key("shard"), "stepped_ms")
    assert await space.contents() == before


async def test_a_bucket_is_compact_again_once_its_blocks_have_few_owners(space):
    first, *others = [await space.worker(f"w{i}") for i in range(60)]
    for inc in (first, *others):
        await space.hold(inc, [A])
    await space.hold(first, [B])
    bucket = space.key("blocks:aa")
    assert await space.redis.object("encoding", bucket) == b"hashtable"
    for i, inc in enumerate(others[1:], 2):
        await space.retire(f"w{i}", inc)
    space.set_chain([A])
    await space.sweep()
    assert await space.redis.object("encoding", bucket) in (b"listpack", b"ziplist")
    assert await space.owners(A) == f"{first}d{others[0]}d"


async def test_a_step_soon_after_another_only_notes_who_is_lost(space):
    a, b = await space.worker("a", bucket_bits=4), await space.worker("b", bucket_bits=4)
    await space.hold(a, SPREAD)

    async def soon(max_buckets=4):
        return await space.sweep(max_buckets, pause_ms=LONG_MS, idle_ms=LONG_MS)

    nothing = SweepStep(removed=0, buckets_left=0, writers=[])
    assert (await soon()).writers == [a, b]
    assert await soon() == nothing
    await space.retire("a", a)
    assert await soon() == nothing
    assert await space.redis.smembers(space.key("dead")) == {b"%d" % a}
    # Idle no longer, it waits for another pause.
    sooner = await space.sweep(4, idle_ms=LONG_MS)
    assert (sooner.removed, sooner.buckets_left) == (4, 12)
    assert await soon() == nothing
    assert await swept(space) == (12, 0)
    # Idle again, the other pause does not count.
    assert await space.sweep(4, idle_ms=LONG_MS) == nothing


@pytest.mark.parametrize("moment", ["", "spoilt", "9" * 15])
async def test_no_corrupted_moment_keeps_steps_away(space, inc, moment):
    await space.redis.hset(space.key("shard"), "stepped_ms", moment)
    assert (await space.sweep(pause_ms=LONG_MS, idle_ms=LONG_MS)).writers == [inc]


async def test_a_missing_namespace_has_nothing_to_sweep(space):
    assert await swept(space) == (0, 0)
    assert await space.redis.dbsize() == 0


async def test_a_step_searches_no_more_buckets_than_allowed(space):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, SPREAD)
    await space.retire("a", inc)
    assert await swept(space, 5) == (5, 11)
    assert await space.owners(SPREAD[4], 4) is None
    assert await space.owners(SPREAD[5], 4) == "1d"
    assert await swept(space, 5) == (5, 6)
    assert await swept(space, 5) == (5, 1)
    assert await space.redis.smembers(space.key("dead")) == {b"1"}
    assert await swept(space, 5) == (1, 0)
    assert not await space.redis.exists(space.key("dead"), space.key("sweep"))
    assert await swept(space, 5) == (0, 0)


async def test_a_large_bucket_takes_several_steps(space, a, b):
    for block in CROWD:
        space.set_chain([block])
    await space.hold(a, CROWD)
    await space.hold(b, CROWD[::2])
    await space.retire("a", a)
    steps = [await swept(space)]
    while steps[-1][1]:
        steps.append(await swept(space))
    assert sum(removed for removed, _ in steps) == len(CROWD)
    assert max(removed for removed, _ in steps) < 1100
    assert set(await space.redis.hvals(space.key("blocks:aa"))) == {f"{b}d".encode()}
    assert await space.redis.hlen(space.key("blocks:aa")) == len(CROWD[::2])


async def test_live_owners_stay_as_they_are(space):
    workers = [await space.worker(f"w{i}") for i in range(11)]
    await space.hold(workers[0], [A, B])
    await space.hold(workers[1], [A, C], HOST)
    await space.hold(workers[10], [A])
    await space.retire("w0", workers[0])
    assert await space.owners(A) == "1d2h11d"
    assert (await space.sweep()).removed == 2
    assert await space.owners(A) == "2h11d"
    assert await space.owners(B) is None
    assert await space.owners(C) == "2h"
    assert not await space.redis.exists(space.key("blocks:bb"))


async def test_several_dead_incarnations_are_swept_in_one_pass(space):
    workers = [await space.worker(f"w{i}") for i in range(4)]
    for inc in workers:
        await space.hold(inc, [A, B])
    for i in (0, 2, 3):
        await space.retire(f"w{i}", workers[i])
    assert await swept(space) == (2, 0)
    assert await space.owners(A) == await space.owners(B) == "2d"
    assert await space.redis.hkeys(space.key("applied")) == [b"2"]


async def test_an_incarnation_that_dies_during_a_pass_is_swept_by_the_next(space):
    a = await space.worker("a", bucket_bits=4)
    b = await space.worker("b")
    await space.hold(a, SPREAD)
    await space.hold(b, SPREAD)
    await space.retire("a", a)
    await space.sweep(8)
    await space.retire("b", b)
    assert await space.match([SPREAD[15]]) == [{}]
    assert await swept(space, 8) == (8, 16), "half of b is still to be swept"
    assert [await space.owners(block, 4) for block in SPREAD] == ["2d"] * 8 + [None] * 8
    assert await space.redis.smembers(space.key("dead")) == {b"2"}
    assert await swept(space, 16) == (8, 0)
    assert not await space.redis.exists(space.key("dead"))


async def test_several_callers_share_a_pass(space):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, SPREAD)
    await space.retire("a", inc)
    steps = await asyncio.gather(*(space.sweep(3) for _ in range(8)))
    assert sorted(step.removed for step in steps) == [0, 0, 1, 3, 3, 3, 3, 3]
    assert await space.redis.keys(space.key("blocks:") + "*") == []


async def test_a_live_worker_s_blocks_match_throughout_a_sweep(space):
    a = await space.worker("a", bucket_bits=4)
    b = await space.worker("b")
    # Sixteen groups, each in a bucket of its own.
    chain = [SequenceHash(leader + i) for leader in SPREAD for i in range(16)]
    space.set_chain(chain)
    await space.hold(a, chain)
    await space.hold(b, chain[:150])
    await space.retire("a", a)
    for _ in range(16):
        await space.sweep(1)
        assert await space.match(chain) == [{b: TierOverlap(device=150)}]


@pytest.mark.oldest_too
async def test_nothing_is_left_of_dead_incarnations_in_the_end(space):
    keeper = await space.worker("keeper", nonce="nonce-k")
    await space.hold(keeper, [A])
    # These numbers and names occur nowhere else by chance.
    await space.redis.hset(space.key("meta"), "incarnations", "7777770")
    lapsed = await space.worker("ghost1", nonce="ghost1")
    await space.hold(lapsed, [A, B])
    await space.reserve(lapsed, "ghost-r1")
    replaced = await space.worker("ghost2", nonce="ghost2")
    await space.hold(replaced, [B, C])
    await space.reserve(replaced, "ghost-r2")
    await space.prefill_complete("ghost-r2")
    retired = await space.worker("ghost2", nonce="ghost3")
    await space.hold(retired, [C])
    staged = await space.worker("ghost2", nonce="ghost3", resync=True, ttl_ms=1)
    await space.hold(staged, [A])
    await space.retire("ghost2", retired)
    await space.renew(lapsed, ttl_ms=1)
    await space.until_lease_lapses(lapsed)
    await space.until_lease_lapses(staged)
    before = await space.contents()
    assert before.count("ghost") > 5
    assert before.count("777777") > 5

    assert await space.retire_lapsed() == 2
    while (await space.sweep(100)).buckets_left:
        pass

    await space.redis.hdel(space.key("meta"), "incarnations")
    await space.redis.delete(space.key("events"))  # which tell of what was
    after = await space.contents()
    assert "ghost" not in after
    assert "777777" not in after
    assert await space.match([A]) == [{keeper: TierOverlap(device=1)}]


async def test_a_scrub_removes_corrupt_entries(space, inc):
    await space.hold(inc, [A, B])
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "1xspoilt")
    await space.redis.hset(space.key("blocks:bb"), f"{B:016x}", "1d77h")
    assert await swept(space) == (0, 0), "no scrub is due yet"
    await space.redis.hset(space.key("shard"), "swept_ms", "1")
    assert await swept(space) == (2, 0)
    assert await space.owners(A) is None
    assert await space.owners(B) == "1d"
    assert await swept(space) == (0, 0)


async def test_a_step_returns_the_incarnations_that_may_publish(space, a, b):
    assert sorted((await space.sweep()).writers) == [a, b]
    await space.retire("a", a)
    assert (await space.sweep()).writers == [b]


async def test_a_scrub_removes_an_entry_without_owners(space):
    await space.worker("a")
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "")
    await space.redis.hset(space.key("shard"), "swept_ms", "1")
    assert await swept(space) == (1, 0)
    assert not await space.redis.exists(space.key("blocks:aa"))


async def test_writers_that_are_no_incarnations_are_not_returned(space, inc):
    junk = ["junk", "", "-1", "0", "a b", "1.5", "9" * 5000]
    await space.redis.hset(space.key("applied"), mapping=dict.fromkeys(junk, "0 x"))
    step = await space.do(index.sweep(space.shard, [], max_buckets=256, scrub_ms=LONG_MS))
    assert step.writers == [inc]


async def test_an_incarnation_that_never_existed_is_swept_like_a_dead_one(space):
    await space.worker("a")
    await space.redis.hset(space.key("applied"), "77", "3 x")
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "77d")
    assert await swept(space) == (1, 0)
    assert await space.redis.hkeys(space.key("applied")) == [b"1"]
    assert not await space.redis.exists(space.key("dead"), space.key("blocks:aa"))


async def test_a_live_incarnation_does_not_stay_in_dead(space, inc):
    await space.hold(inc, [A])
    await space.redis.sadd(space.key("dead"), str(inc))
    assert await space.match([A]) == [{}]
    assert await swept(space) == (0, 0)
    assert await space.match([A]) == [{inc: TierOverlap(device=1)}]


async def test_entries_of_the_dead_are_removed_by_the_next_scrub_if_dead_is_lost(space):
    a, b = await space.worker("a", bucket_bits=4), await space.worker("b")
    await space.hold(a, SPREAD)
    await space.hold(b, SPREAD)
    await space.retire("a", a)
    await space.sweep(8)
    await space.redis.delete(space.key("dead"), space.key("sweep"))
    found = await space.match(*([block] for block in SPREAD))
    assert [overlaps[b] for overlaps in found] == [TierOverlap(device=1)] * 16
    assert await swept(space) == (0, 0)
    await space.redis.hset(space.key("shard"), "swept_ms", "1")
    assert await swept(space) == (8, 0)


@pytest.mark.parametrize("cursor", ["spoilt", "", "-1", "16", "1e9", "3.5"])
async def test_a_pass_with_an_invalid_cursor_starts_over(space, cursor):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, SPREAD)
    await space.retire("a", inc)
    assert await swept(space, 8) == (8, 8)
    await space.redis.hset(space.key("sweep"), "cursor", cursor)
    assert await swept(space, 8) == (0, 8)
    assert await swept(space, 8) == (8, 0)


@pytest.mark.parametrize("within", ["spoilt", "-1", "9" * 20])
async def test_a_pass_with_an_invalid_position_in_a_bucket_starts_that_bucket_over(space, within):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, SPREAD)
    await space.retire("a", inc)
    assert await swept(space, 8) == (8, 8)
    await space.redis.hset(space.key("sweep"), "within", within)
    assert await swept(space, 8) == (8, 0)


async def test_a_pass_that_lost_its_targets_leaves_them_to_the_next(space):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, SPREAD)
    await space.retire("a", inc)
    await space.sweep(8)
    await space.redis.hdel(space.key("sweep"), "targets")
    assert await swept(space, 8) == (8, 16)
    assert await space.redis.smembers(space.key("dead")) == {b"1"}
    assert await swept(space) == (0, 0)
    assert not await space.redis.exists(space.key("dead"))


@pytest.mark.parametrize("moment", ["spoilt", "", "-1", "9" * 15, None])
async def test_a_pass_is_made_if_the_time_of_the_last_one_is_unreadable(space, moment):
    inc = await space.worker("a", bucket_bits=4)
    await space.hold(inc, [SPREAD[0]])
    await space.redis.hset(space.key("blocks:f"), "junk", "77d")
    if moment is None:
        await space.redis.hdel(space.key("shard"), "swept_ms")
    else:
        await space.redis.hset(space.key("shard"), "swept_ms", moment)
    assert await swept(space) == (1, 0)
    assert abs(int(await space.get("shard", "swept_ms") or 0) - await space.now_ms()) < 10_000
