import pytest

from app.core.types import Incarnation, SequenceHash
from app.state import index
from app.state.index import Change
from tests.lua.conftest import DEVICE, DISK, HOST, A, B, C


@pytest.mark.oldest_too
async def test_a_batch_writes_owners_into_the_buckets_of_the_blocks_groups(space):
    inc = await space.worker("a", bucket_bits=8)
    changes = [Change(A, DEVICE, A), Change(B, HOST, A), Change(C, DISK, C)]
    assert await space.do(index.apply(space.shard, inc, "nonce-a", 1, changes))
    keys = await space.redis.keys(space.key("blocks:") + "*")
    assert sorted(keys) == [
        f"kvroute:1:{{test#0}}:blocks:{bucket}".encode() for bucket in ("aa", "cc")
    ]
    assert await space.redis.hgetall(space.key("blocks:aa")) == {b"a" * 16: b"1d", b"b" * 16: b"1h"}
    assert await space.redis.hgetall(space.key("blocks:cc")) == {b"c" * 16: b"1k"}


def test_sixteen_blocks_of_a_chain_are_a_group():
    chain = [SequenceHash(i) for i in range(100, 140)]
    changes = index.chain_changes(chain, DEVICE, start=14)
    assert [change.leader for change in changes] == [100] * 2 + [116] * 16 + [132] * 8
    assert changes[0] == Change(SequenceHash(114), DEVICE, SequenceHash(100))


@pytest.mark.parametrize(
    ("bits", "bucket"),
    [
        (1, "8"),
        (2, "c"),
        (3, "e"),
        (4, "f"),
        (5, "f0"),
        (6, "f4"),
        (7, "f6"),
        (8, "f7"),
        (9, "f78"),
    ],
)
async def test_a_bucket_is_named_by_the_top_bits_of_the_hash_padded_with_zero_bits(
    space, bits, bucket
):
    inc = await space.worker("a", bucket_bits=bits)
    blocks = [
        SequenceHash(0xF7F7_0123_4567_89AB),
        *(SequenceHash(n * 0x1111 << 48) for n in range(16)),
    ]
    for block in blocks:
        space.set_chain([block])
    await space.apply(inc, 1, [(block, DEVICE) for block in blocks])
    assert await space.redis.exists(space.key(f"blocks:{bucket}"))
    assert {await space.owners(block, bits) for block in blocks} == {"1d"}


async def test_small_hashes_keep_their_leading_zeros(space):
    inc = await space.worker("a", bucket_bits=8)
    await space.apply(inc, 1, [(SequenceHash(0x2A), DEVICE)])
    assert await space.redis.hgetall(space.key("blocks:00")) == {b"000000000000002a": b"1d"}


async def test_batches_are_applied_in_order(space, inc):
    assert await space.apply(inc, 1, [(A, DEVICE)])
    assert await space.apply(inc, 2, [(B, DEVICE)])
    assert await space.apply(inc, 3, [(A, None)])
    assert await space.get("applied", inc) == "3 nonce-a"
    assert await space.owners(A) is None
    assert await space.owners(B) == "1d"


async def test_a_repeated_batch_is_applied_once(space, inc):
    await space.apply(inc, 1, [(A, DEVICE)])
    await space.apply(inc, 2, [(A, None), (B, DEVICE)])
    assert await space.apply(inc, 2, [(A, DEVICE)])
    assert await space.owners(A) is None


async def test_an_older_batch_that_arrives_again_is_not_applied(space, inc):
    await space.apply(inc, 1, [(A, DEVICE)])
    await space.apply(inc, 2, [(A, None)])
    await space.apply(inc, 3, [(B, DEVICE)])
    assert await space.apply(inc, 1, [(A, DEVICE)])
    assert await space.owners(A) is None
    assert await space.get("applied", inc) == "3 nonce-a"


@pytest.mark.parametrize("first", [2, 7])
async def test_a_batch_after_a_missing_one_is_refused(space, inc, first):
    assert not await space.apply(inc, first, [(A, DEVICE)])
    assert await space.owners(A) is None
    assert await space.get("applied", inc) == "0 nonce-a"


async def test_an_unknown_incarnation_may_not_write(space):
    await space.worker("a")
    assert not await space.apply(Incarnation(99), 1, [(A, DEVICE)], nonce="nonce-a")
    assert await space.owners(A) is None


async def test_another_process_may_not_write_as_this_incarnation(space, inc):
    assert not await space.apply(inc, 1, [(A, DEVICE)], nonce="stranger")
    assert await space.owners(A) is None


async def test_an_emptied_redis_takes_no_batch(space, inc):
    await space.redis.flushall()
    assert not await space.apply(inc, 1, [(A, DEVICE)])
    assert await space.redis.dbsize() == 0


async def test_owners_are_in_ascending_order_whoever_published_first(space):
    workers = [await space.worker(f"w{i}") for i in range(12)]
    await space.hold(workers[8], [A])
    assert await space.owners(A) == "9d"
    await space.hold(workers[10], [A], HOST)
    assert await space.owners(A) == "9d11h"
    await space.hold(workers[0], [A])
    assert await space.owners(A) == "1d9d11h"
    await space.hold(workers[9], [A], DISK)
    assert await space.owners(A) == "1d9d10k11h"
    await space.hold(workers[1], [A])
    assert await space.owners(A) == "1d2d9d10k11h"


@pytest.mark.parametrize("number", [1, 7, 99, 100, 555, 1003, 2001])
async def test_an_owner_finds_its_place_among_a_thousand(space, number):
    await space.worker("first")
    await space.redis.hset(space.key("meta"), "incarnations", number)
    inc = await space.worker("a")
    space.set_chain([A])
    others = [n for n in range(2, 2000, 2) if n != inc]
    owners = "".join(f"{n}d" for n in others)
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", owners)
    assert await space.apply(inc, 1, [(A, HOST)])
    expected = "".join(f"{n}{'h' if n == inc else 'd'}" for n in sorted([*others, inc]))
    assert await space.owners(A) == expected
    assert await space.apply(inc, 2, [(A, None)])
    assert await space.owners(A) == owners


async def test_a_tier_moves_in_place(space):
    workers = [await space.worker(f"w{i}") for i in range(11)]
    for inc in (workers[0], workers[1], workers[10]):
        await space.hold(inc, [A])
    assert await space.apply(workers[0], 2, [(A, HOST)])
    assert await space.owners(A) == "1h2d11d"
    assert await space.apply(workers[10], 2, [(A, DISK)])
    assert await space.owners(A) == "1h2d11k"
    assert await space.apply(workers[0], 3, [(A, DEVICE)])
    assert await space.owners(A) == "1d2d11k"


async def test_a_removal_leaves_the_other_owners(space):
    workers = [await space.worker(f"w{i}") for i in range(11)]
    for inc in (workers[0], workers[1], workers[10]):
        await space.hold(inc, [A])
    assert await space.apply(workers[0], 2, [(A, None)])
    assert await space.owners(A) == "2d11d"
    assert await space.apply(workers[10], 2, [(A, None)])
    assert await space.owners(A) == "2d"


async def test_removal_by_the_last_owner_leaves_no_empty_field(space, inc):
    await space.hold(inc, [A, B])
    assert await space.apply(inc, 2, [(A, None)])
    assert await space.redis.hgetall(space.key("blocks:aa")) == {b"b" * 16: b"1d"}
    assert await space.apply(inc, 3, [(B, None)])
    assert not await space.redis.exists(space.key("blocks:aa"))


async def test_removing_unpublished_blocks_is_harmless(space, a, b):
    await space.hold(a, [A])
    space.set_chain([A, B])
    assert await space.apply(b, 1, [(A, None), (B, None)])
    assert await space.owners(A) == "1d"
    assert await space.owners(B) is None


async def test_a_batch_may_be_larger_than_lua_can_unpack(space):
    inc = await space.worker("a", bucket_bits=8)
    blocks = [SequenceHash(i << 44) for i in range(10_000)]
    assert await space.apply(inc, 1, [(block, DEVICE) for block in blocks])
    assert await space.owners(blocks[0]) == await space.owners(blocks[-1]) == "1d"


@pytest.mark.parametrize(
    ("owners", "moved", "removed"),
    [
        ("1d", "1h", None),
        ("1k2d10d", "1h2d10d", "2d10d"),
        ("2d10d", "1h2d10d", "2d10d"),
        ("21d1d", "21d1h", "21d"),
    ],
)
async def test_a_change_replaces_the_entry_of_its_incarnation_and_no_other(
    space, owners, moved, removed
):
    inc = await space.worker("a")
    space.set_chain([A])
    for seq, (tier, expected) in enumerate([(HOST, moved), (None, removed)], 1):
        await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", owners)
        assert await space.apply(inc, seq, [(A, tier)])
        assert await space.owners(A) == expected


@pytest.mark.parametrize("mark", ["spoilt", "", "7", "-1 nonce-a", "0 stranger", "x nonce-a"])
async def test_an_invalid_mark_leads_to_a_resync(space, inc, mark):
    await space.redis.hset(space.key("applied"), str(inc), mark)
    assert not await space.apply(inc, 1, [(A, DEVICE)])


@pytest.mark.parametrize("bits", ["spoilt", "", "0", "25", "1e1"])
async def test_an_invalid_layout_leads_to_a_resync(space, inc, bits):
    await space.redis.hset(space.key("shard"), "bucket_bits", bits)
    assert not await space.apply(inc, 1, [(A, DEVICE)])
    assert await space.match([A]) == [{}], "queries find nothing meanwhile"
    again = await space.worker("a", resync=True)
    assert await space.apply(again, 1, [(A, DEVICE)])


async def test_a_field_says_where_engines_go_on_before_its_owners(space, a, b):
    changes = [Change(A, DEVICE, A, 5), Change(B, DEVICE, A), Change(C, HOST, A, -33)]
    assert await space.do(index.apply(space.shard, a, "nonce-a", 1, changes))
    changes = [Change(block, DEVICE, A, back) for block, back in ((A, 12), (B, 0), (C, 1))]
    assert await space.do(index.apply(space.shard, b, "nonce-b", 1, changes))
    space.set_chain([A, B, C])
    owners = [await space.owners(block) for block in (A, B, C)]
    assert owners == ["1-5,2-12 1d2d", "1d2d", "1=33,2-1 1h2d"]


async def test_where_an_engine_goes_on_is_replaced_and_removed_with_its_owner(space):
    incs = {name: await space.worker(name) for name in "ab"}
    seq = dict.fromkeys("ab", 0)

    async def owners_after(name, tier, back):
        seq[name] += 1
        change = Change(A, tier, A, back)
        nonce = f"nonce-{name}"
        assert await space.do(index.apply(space.shard, incs[name], nonce, seq[name], [change]))
        return await space.owners(A)

    assert await owners_after("a", DEVICE, 5) == "1-5 1d"
    assert await owners_after("b", DEVICE, 0) == "1-5 1d2d"
    assert await owners_after("b", HOST, 7) == "1-5,2-7 1d2h"
    assert await owners_after("a", DEVICE, 0) == "2-7 1d2h"
    assert await owners_after("a", DEVICE, -3) == "2-7,1=3 1d2h"
    assert await owners_after("b", None, 0) == "1=3 1d"
    assert await owners_after("a", None, 9) is None
