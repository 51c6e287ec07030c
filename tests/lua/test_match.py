import math
import random

import pytest

from app.core.chains import GROUP_BLOCKS, bucket_of, hex_text, shard_of
from app.core.overlaps import Resume
from app.core.types import NO_OVERLAP, SequenceHash, Tier, TierOverlap
from app.state import index, overlap, reservations
from app.state.index import Change
from app.state.overlap import WHOLE_CHAIN, Boundaries
from app.state.scripts import ScriptRunner, call
from tests.lua.conftest import DEVICE, DISK, HOST, NO_LOAD, A, B, C, D, E


def chain_of(rng, length):
    return [SequenceHash(rng.getrandbits(64)) for _ in range(length)]


async def runs(space, *chains, guesses=""):
    """The runs that lua/match.lua itself returns."""
    args = [arg for chain in chains for arg in (hex_text(chain), "16", "", guesses)]
    one = call("match", space.shard, 24, 32, *args, parse=list)
    _, _, *found = await space.do(one)
    assert [rough for rough, *_ in found] == [0] * len(chains)
    return [runs for _, *runs in found]


class CountingTrips(ScriptRunner):
    def __init__(self, space):
        super().__init__(space.runner.redis, timeout_s=10)
        self.trips = 0

    async def run_each(self, calls):
        self.trips += 1
        return await super().run_each(calls)


@pytest.mark.oldest_too
async def test_owners_are_returned_as_runs_with_their_last_positions(space, a, b):
    await space.hold(a, [A, B, C])
    await space.hold(b, [A])
    assert await runs(space, [A, B, C, D, E]) == [[1, b"1d2d", 3, b"1d"]]


async def test_overlap_is_the_leading_blocks_that_a_worker_holds(space, a, b):
    await space.hold(a, [A, B, C])
    await space.hold(b, [A])
    overlaps = {a: TierOverlap(device=3), b: TierOverlap(device=1)}
    assert await space.match([A, B, C, D, E]) == [overlaps]
    assert await space.match([A, B, C]) == [overlaps]


async def test_overlap_is_counted_by_tier(space, inc):
    await space.apply(inc, 1, [(A, DEVICE), (B, DEVICE), (C, HOST), (D, DISK)])
    assert await space.match([A, B, C, D, E]) == [{inc: TierOverlap(device=2, host=1, disk=1)}]


async def test_a_worker_with_blocks_only_on_disk_counts_too(space, inc):
    await space.hold(inc, [A, B], DISK)
    assert await space.match([A, B]) == [{inc: TierOverlap(disk=2)}]


async def test_a_chain_that_nobody_holds_has_no_overlap(space, inc):
    await space.hold(inc, [A])
    assert await space.match([D, E]) == [{}]
    assert await runs(space, [D, E]) == [[]]


async def test_an_empty_chain_has_no_overlap(space):
    await space.worker("a")
    assert await space.match([]) == [{}]


@pytest.mark.parametrize("length", range(1, 6))
async def test_a_chain_of_any_length_is_matched_to_its_end(space, inc, length):
    blocks = [A, B, C, D, E]
    await space.hold(inc, blocks)
    assert await space.match(blocks[:length]) == [{inc: TierOverlap(device=length)}]


async def test_a_change_of_owners_is_found_by_bisecting(space, inc):
    chain = chain_of(random.Random(2), WHOLE_CHAIN)
    space.set_chain(chain)
    await space.hold(inc, chain[:300])
    await space.redis.config_resetstat()
    assert await space.match(chain) == [{inc: TierOverlap(device=300)}]
    stats = await space.redis.info("commandstats")
    # The layout, both ends, and a block for each halving.
    assert stats["cmdstat_hget"]["calls"] == 1 + 2 + math.log2(WHOLE_CHAIN)

    await space.redis.config_resetstat()
    assert await space.match(chain[:300]) == [{inc: TierOverlap(device=300)}]
    stats = await space.redis.info("commandstats")
    assert stats["cmdstat_hget"]["calls"] == 1 + 2


async def test_a_change_of_owners_is_looked_for_at_the_guesses_first(space, inc):
    chain = chain_of(random.Random(2), WHOLE_CHAIN)
    space.set_chain(chain)
    await space.hold(inc, chain[:300])

    async def lookups(guesses):
        await space.redis.config_resetstat()
        assert await runs(space, chain, guesses=guesses) == [[300, b"1d"]]
        return (await space.redis.info("commandstats"))["cmdstat_hget"]["calls"]

    # The layout, both ends, and both sides of the change. Guesses not between the ends are ignored.
    assert await lookups("301 300") == 1 + 2 + 2
    assert await lookups("0 1 301 300 512 9999") == 1 + 2 + 2
    # A wrong guess before the change costs one more lookup, one after it two.
    assert await lookups("101 100 301 300") == 1 + 2 + 3
    assert await lookups("401 400 301 300") == 1 + 2 + 4


@pytest.mark.parametrize("shared", [1, 700, 703, 704])
async def test_the_point_where_prompts_diverge_is_searched_for_once(space, a, b, shared):
    """A long prompt that begins like an earlier one is looked up in one round trip."""
    rng = random.Random(3)
    first, second = chain_of(rng, 2000), chain_of(rng, 1800)
    second[:shared] = first[:shared]
    for inc, chain in ((a, first), (b, second)):
        space.set_chain(chain)
        await space.hold(inc, chain)

    boundaries = Boundaries()
    trips = []
    for chain in (first, second, second):
        runner = CountingTrips(space)
        overlaps, _ = await overlap.match(runner, space.keys, [chain], boundaries=boundaries)
        own, other = (a, b) if chain is first else (b, a)
        device = {own: TierOverlap(device=len(chain)), other: TierOverlap(device=shared)}
        assert overlaps == [device]
        trips.append(runner.trips)
    assert trips == [2, 1, 1]


async def test_a_dead_incarnation_does_not_hide_where_prompts_diverge(space):
    a, dead = await space.worker("a"), await space.worker("dead")
    chain = chain_of(random.Random(3), 2000)
    space.set_chain(chain)
    await space.hold(a, chain[:700])
    await space.hold(dead, chain)
    await space.retire("dead", dead)
    await space.sweep(max_buckets=0)
    boundaries = Boundaries()
    for trips in (2, 1):
        runner = CountingTrips(space)
        overlaps, _ = await overlap.match(runner, space.keys, [chain], boundaries=boundaries)
        assert overlaps == [{a: TierOverlap(device=700)}]
        assert boundaries.recall(chain) == [700]
        assert runner.trips == trips


async def test_a_block_deleted_in_the_middle_does_not_break_the_answer(space, a, b):
    chain = [A, B, C, D, E]
    await space.hold(a, chain)
    await space.hold(b, [A])
    assert await space.redis.hdel(space.key("blocks:aa"), f"{C:016x}") == 1
    assert await runs(space, chain) == [[1, b"1d2d", 2, b"1d", 5, b"1d"]]


async def test_several_chains_are_answered_in_order(space, a, b):
    await space.hold(a, [A, B])
    await space.hold(b, [D])
    assert await space.match([D, E], [C], [A, B], []) == [
        {b: TierOverlap(device=1)},
        {},
        {a: TierOverlap(device=2)},
        {},
    ]


async def test_entries_of_dead_incarnations_are_ignored(space, a, b):
    await space.hold(a, [A, B, C, D, E])
    # Half swept already, with holes that no live incarnation's blocks would have.
    await space.apply(a, 2, [(A, None), (C, None)])
    await space.hold(b, [A, B, C])
    await space.retire("a", a)
    await space.sweep(max_buckets=0)
    assert await space.owners(B) == "1d2d"
    assert await space.match([A, B, C, D, E]) == [{b: TierOverlap(device=3)}]
    assert await runs(space, [A, B, C, D, E]) == [[3, b"2d"]]


async def test_a_dead_incarnation_does_not_hide_one_whose_number_contains_its_own(space):
    workers = [await space.worker(f"w{i}") for i in range(11)]
    await space.hold(workers[0], [A])
    await space.hold(workers[10], [A])
    await space.retire("w0", workers[0])
    await space.sweep(max_buckets=0)
    assert await space.match([A]) == [{workers[10]: TierOverlap(device=1)}]


async def test_in_a_missing_shard_nobody_holds_anything(space):
    assert await space.match([A], []) == [{}, {}]
    assert await runs(space, [A]) == [[]]


async def test_a_bucket_of_another_type_holds_nothing(space, inc):
    chain = chain_of(random.Random(1), 17)
    space.set_chain([A, *chain[1:16], B])
    await space.hold(inc, [A, *chain[1:16], B])
    await space.redis.set(space.key("blocks:bb"), "spoilt")
    assert await space.match([A, *chain[1:16], B]) == [{inc: TierOverlap(device=16)}]


async def test_each_shard_looks_up_the_chains_that_begin_with_its_blocks(space, inc):
    other = space.keys.of_shard(1)
    assert await space.do(index.open_shard(other, inc, "nonce-a", 8))
    assert [shard_of(block, 2) for block in (A, B)] == [0, 1]
    await space.hold(inc, [A, C])
    await space.do(
        index.apply(other, inc, "nonce-a", 1, [Change(B, DEVICE, B), Change(C, HOST, B)])
    )
    overlaps, _ = await overlap.match(space.runner, space.keys, [[A, C], [B, C]], 2)
    assert overlaps == [{inc: TierOverlap(device=2)}, {inc: TierOverlap(device=1, host=1)}]


async def test_a_call_sent_along_is_answered_too(space, inc):
    await space.hold(inc, [A])
    overlaps, [snapshot] = await overlap.match(
        space.runner, space.keys, [[A, B]], along=[reservations.loads(space.keys)]
    )
    assert overlaps == [{inc: TierOverlap(device=1)}]
    assert snapshot.loads == {inc: NO_LOAD}


@pytest.mark.parametrize(
    ("device", "host"),
    [(1, 0), (511, 1), (512, 0), (1000, 600), (0, 1999), (1999, 1), (2000, 0), (1234, 765)],
)
async def test_the_overlap_of_a_long_sampled_chain_is_exact(space, device, host):
    blocks = chain_of(random.Random(1), 2000)
    assert len(blocks) > WHOLE_CHAIN
    inc = await space.worker("a", bucket_bits=7)
    tiers = [DEVICE] * device + [HOST] * host
    await space.apply(inc, 1, list(zip(blocks, tiers, strict=False)))
    assert await space.match(blocks) == [{inc: TierOverlap(device, host)}]


@pytest.mark.parametrize("seed", range(4))
async def test_plain_commands_find_what_the_script_finds(space, seed):
    rng = random.Random(seed)
    chain = chain_of(rng, 1500)
    space.set_chain(chain)
    workers = [await space.worker(name, bucket_bits=7) for name in "abcd"]
    for inc in workers:
        ends = sorted(rng.randrange(1501) for _ in Tier)
        tiers = [DEVICE] * ends[0] + [HOST] * (ends[1] - ends[0]) + [DISK] * (ends[2] - ends[1])
        await space.apply(inc, 1, list(zip(chain, tiers, strict=False)))
    await space.redis.sadd(space.shard["dead"], workers[3])
    for asked in (chain, chain[:1], chain[:17], chain_of(rng, 3)):
        [expected] = await space.match(asked)
        assert workers[3] not in expected
        assert await overlap.read_whole(space.runner, space.keys, asked, 1) == expected


async def test_plain_commands_find_nothing_in_a_shard_without_a_layout(space):
    assert await overlap.read_whole(space.runner, space.keys, [A], 1) == {}


async def test_a_chain_whose_shard_does_not_answer_has_no_result(space):
    await space.hold(await space.worker("a"), [A])
    await space.redis.set(space.shard["dead"], "not a set")
    found, _ = await overlap.match(space.runner, space.keys, [[A], []])
    assert found == [None, None]


class LosingABucket(CountingTrips):
    """Has somebody turn a bucket into another type of key after the first round trip."""

    def __init__(self, space, bucket):
        super().__init__(space)
        self._bucket = bucket

    async def run_each(self, calls):
        if self.trips == 1:
            await self.redis.set(self._bucket, "spoilt")
        return await super().run_each(calls)


async def test_where_the_second_round_trip_fails_the_first_still_counts(space, a, b):
    blocks = chain_of(random.Random(1), 2000)
    space.set_chain(blocks)
    await space.hold(a, blocks[:1000])
    await space.hold(b, blocks)
    bits = int(await space.redis.hget(space.shard["shard"], "bucket_bits") or 0)
    group = 1000 - 1000 % GROUP_BLOCKS
    bucket = space.shard[f"blocks:{bucket_of(blocks[group], bits)}"]
    runner = LosingABucket(space, bucket)
    found, _ = await overlap.match(runner, space.keys, [blocks])
    # Of that group only the first block was looked up before.
    assert found == [{a: TierOverlap(device=group + 1), b: TierOverlap(device=2000)}]
    assert isinstance(found[0], overlap.LowerBound)
    assert runner.trips == 2


async def test_overlaps_equal_those_of_a_plain_walk(space):
    """Eight chains, some sharing prefixes, and six workers with random prefix-closed blocks."""
    rng = random.Random(7)
    chains = [chain_of(rng, length) for length in (1, 2, 13, 100, 512, 513, 700, 6000)]
    chains[5][:300] = chains[4][:300]
    chains[7][:600] = chains[6][:600]
    for chain in chains:
        space.set_chain(chain)
    held = {}
    for i in range(6):
        inc = await space.worker(f"w{i}")
        held[inc] = random_holdings(rng, chains)
        await space.apply(inc, 1, list(held[inc].items()))
    dead = await space.worker("dead")
    await space.hold(dead, rng.sample([block for chain in chains for block in chain], 2000))
    await space.retire("dead", dead)
    await space.sweep(max_buckets=0)

    prompts = [*chains, *(chain[: rng.randint(1, len(chain))] for chain in chains)]
    found = [plain_walk(held, chain) for chain in prompts]
    assert await space.match(*prompts) == found
    boundaries = Boundaries()
    for chain, overlaps in zip(prompts, found, strict=True):
        assert await space.match(chain, boundaries=boundaries) == [overlaps]
    assert await space.match(*prompts, boundaries=boundaries) == found
    for _ in range(10):
        assert await space.match(*prompts, boundaries=WrongBoundaries(rng)) == found


@pytest.mark.parametrize("length", [64, 300, 512, 2000])
async def test_where_many_end_elsewhere_the_last_are_exact_and_no_other_is_overstated(
    space, length
):
    rng = random.Random(length)
    chain = chain_of(rng, length)
    space.set_chain(chain)
    held = {}
    for n in range(60):
        inc = await space.worker(f"w{n}", bucket_bits=7)
        held[inc] = random_holdings(rng, [chain])
        await space.apply(inc, 1, list(held[inc].items()))
    for boundaries in (None, Boundaries(), WrongBoundaries(rng)):
        (found,), _ = await overlap.match(space.runner, space.keys, [chain], boundaries=boundaries)
        assert isinstance(found, overlap.Rough)
        truth = plain_walk(held, chain)
        ends = {depth for one in truth.values() for depth in _depths(one)} - {length}
        exact = sorted(ends)[1 - overlap.EXACT_CHANGES :]
        part = -(-length // overlap.PARTS) + overlap.GROUP_BLOCKS * (length > WHOLE_CHAIN)
        for inc, one in truth.items():
            for got, due in zip(_depths(found.get(inc, NO_OVERLAP)), _depths(one), strict=True):
                assert due - part <= got <= due
                assert got == due or due not in exact


def _depths(held):
    """Leading blocks on the device; there or in host memory; in all."""
    return held.device, held.device + held.host, held.total


class WrongBoundaries(Boundaries):
    """Guesses at random."""

    def __init__(self, rng):
        super().__init__()
        self._rng = rng

    def recall(self, chain):
        guesses = range(1, len(chain))
        return sorted(self._rng.sample(guesses, min(len(guesses), self._rng.randint(0, 6))))


def random_holdings(rng, chains):
    """For each chain, a prefix on the device, some after it in host memory, some on disk."""
    held = {}
    for chain in chains:
        ends = sorted(rng.choices(range(len(chain) + 1), k=3))
        for tier, start, end in zip(Tier, [0, *ends], ends, strict=False):
            for block in chain[start:end]:
                # Where chains share a prefix, the first of them settles its tiers.
                held.setdefault(block, tier)
    return {b: t for chain in chains for b, t in published(held, chain)}


def published(held, chain):
    """What an agent would publish of `held` along `chain`."""
    slowest, found = Tier.DEVICE, []
    for block in chain:
        if block not in held:
            break
        slowest = max(slowest, held[block])
        found.append((block, slowest))
    return found


def plain_walk(held, chain):
    overlaps = {}
    for inc, blocks in held.items():
        counts = [0, 0, 0]
        for _, tier in published(blocks, chain):
            counts[tier] += 1
        if any(counts):
            overlaps[inc] = TierOverlap(*counts)
    return overlaps


async def test_a_run_ends_with_what_its_last_field_says_of_where_engines_go_on(space, a, b):
    changes = [Change(A, DEVICE, A, 1), Change(B, DEVICE, A, 2), Change(C, DEVICE, A, -3)]
    assert await space.do(index.apply(space.shard, a, "nonce-a", 1, changes))
    space.set_chain([A, B, C])
    await space.hold(b, [A, B])
    assert await runs(space, [A, B, C, D]) == [[2, b"1-2 1d2d", 3, b"1=3 1d"]]
    [found], _ = await overlap.match(space.runner, space.keys, [[A, B, C, D]])
    assert found == {a: TierOverlap(3), b: TierOverlap(2)}
    assert found.resumes == {a: Resume(held=3, last=3, before=0)}
    [found], _ = await overlap.match(space.runner, space.keys, [[A, B, D]])
    assert found.resumes == {a: Resume(held=2, last=0, before=0)}
    await space.retire("a", a)
    [found], _ = await overlap.match(space.runner, space.keys, [[A, B, C]])
    assert found[b] == TierOverlap(2)
    await space.sweep()
    assert await space.owners(B) == "2d"


async def test_where_engines_go_on_takes_no_more_probes(space):
    chain = chain_of(random.Random(5), 4 * WHOLE_CHAIN)
    a, b = await space.worker("a"), await space.worker("b")
    space.set_chain(chain)
    await space.hold(a, chain[:-7])
    changes = [
        change._replace(back=1 + at % 33)
        for at, change in enumerate(index.chain_changes(chain[:-7], DEVICE))
    ]

    async def probes():
        before = (await space.redis.info("commandstats")).get("cmdstat_hget", {"calls": 0})
        [found], _ = await overlap.match(space.runner, space.keys, [chain])
        assert {found[inc].total for inc in found} == {len(chain) - 7}
        after = (await space.redis.info("commandstats"))["cmdstat_hget"]
        return after["calls"] - before["calls"]

    without = await probes()
    assert await space.do(index.apply(space.shard, b, "nonce-b", 1, changes))
    assert await probes() == without
