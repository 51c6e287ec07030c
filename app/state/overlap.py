"""Overlap of prompts with every worker's published blocks, in at most two round trips: exact, but
for all but the longest ones where they end in many places.

A script pays for every hash it is sent, used or not. Of a long chain it is therefore sent only the
first block of each group, or of every k-th; then the few groups in which the owners change are read
whole, without starting a script. This loses nothing: an incarnation's published blocks are closed
under prefix and its tier never gets faster along a chain, so equal owners at two positions mean the
same owners everywhere between them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain as concatenated
from itertools import groupby, zip_longest
from math import isqrt
from operator import itemgetter
from typing import Any, NamedTuple

from app.core.chains import (
    GROUP_BLOCKS,
    OWNER,
    bucket_of,
    hex_text,
    hex_texts,
    parse_owners,
    shard_of,
)
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.overlaps import Back, Overlaps, Resume, parse_backs, parse_field
from app.core.types import NO_OVERLAP, Incarnation, SequenceHash, Tier, TierOverlap
from app.state.reading import parse_bucket_bits
from app.state.scripts import Call, ScriptRunner, call, command

WHOLE_CHAIN = 512
"""Blocks up to which a chain is sent whole: the hashes cost Redis less than another round trip."""
CHAINS_PER_CALL = 16
"""Chains of one call: together they cost a quarter less; this many take half a millisecond."""

READ_GROUPS = 64
"""Groups that plain commands read at once, in a third of a millisecond."""

EXACT_CHANGES = 24
"""Changes of owners, the last ones of a chain, that are found to the block: all of eight workers
with three tiers."""
PARTS = 32
"""Parts of a chain to which the other changes are found, of which a fleet whose caches evict
unequally has one a worker: to the block at up to 63 blocks, to 4,096 of 131,072 tokens."""

MAX_BOUNDARIES = 16_384
"""Boundaries that a replica keeps, about 3 MB."""

MANY = 32
"""Incarnations from which those that hold the same are kept as a set."""

NOBODY = b""


class Run(NamedTuple):
    """Owners of the positions `start` to `end` of a chain, counted from 0, `end` excluded. backs:
    where engines resume after the last one."""

    start: int
    end: int
    owners: bytes
    backs: bytes = b""


class Gap(NamedTuple):
    """Positions of one group, `end` excluded, between two samples whose owners differ. `owners`,
    those of the second sample, hold them all."""

    start: int
    end: int
    owners: bytes


class LowerBound(Overlaps):
    """Overlaps that may fall short of the truth, as a round trip failed."""


class Rough(Overlaps):
    """Overlaps of which only the longest are exact, as too many end elsewhere: the others may fall
    short by one of PARTS of the chain."""


class Boundaries:
    """Positions where owners changed along the last prompts, to look at first.

    A prefix that many prompts share, such as a system prompt, ends at the same block in all of
    them, and so does what most workers hold of them. Looking there costs less than bisecting, and
    saves a round trip for a long prompt. A wrong guess costs Redis an extra lookup or two; without
    any, the answers are the same.

    One boundary is kept for each doubling of the length, keyed by the last block of the prefix of
    that length.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[SequenceHash, int] = OrderedDict()

    def learn(self, chain: Sequence[SequenceHash], runs: Sequence[Run]) -> None:
        """Remembers where the owners change. runs: those of `chain`, in its order."""
        for run, following in zip_longest(runs, runs[1:]):
            if run.end < len(chain) and (not following or following.owners != run.owners):
                block = chain[(1 << run.end.bit_length() - 1) - 1]
                self._ends[block] = run.end
                self._ends.move_to_end(block)
        while len(self._ends) > MAX_BOUNDARIES:
            self._ends.popitem(last=False)

    def recall(self, chain: Sequence[SequenceHash]) -> list[int]:
        """Returns positions in `chain`, ascending, whose owners may differ from those just
        before."""
        guesses, size = [], 1
        while size < len(chain):
            guess = self._ends.get(chain[size - 1])
            if guess is not None and guess < len(chain):
                guesses.append(guess)
            size *= 2
        return guesses


async def match(
    runner: ScriptRunner,
    keyspace: Keyspace,
    chains: Sequence[Sequence[SequenceHash]],
    shards: int = 1,
    along: Sequence[Call[Any]] = (),
    boundaries: Boundaries | None = None,
) -> tuple[list[Overlaps | None], list[Any]]:
    """Returns each chain's overlaps, in blocks, and the answers of `along`.

    chains: for each prompt, the sequence hashes of its full blocks, in prompt order. shards: of the
    namespace's index. along: calls to send with the first round trip; the answer of one that failed
    is a RedisUnavailable. boundaries: guesses from other chains; learns from these.

    Incarnations without overlap are absent; incarnations that are not live may be present. The
    result for a chain whose shard cannot be reached is None; if only the second round trip fails,
    it is a LowerBound: what the first one proved. Where owners change more than EXACT_CHANGES times
    along a chain, it is Rough.
    """
    sought = [_ChainLookup.of(chain, boundaries) for chain in chains]
    groups = [(shard, [sought[i] for i in which]) for shard, which in _grouped(chains, shards)]
    coarse = [_coarsely(keyspace.of_shard(shard), some) for shard, some in groups]
    replies = await runner.run_each([*along, *coarse])
    answers, replies = replies[: len(along)], replies[len(along) :]
    reads: list[tuple[_ChainLookup, Gap, Call[list[bytes | None]]]] = []
    for (shard, some), reply in zip(groups, replies, strict=True):
        if not isinstance(reply, RedisUnavailable):
            reads += _take_runs(keyspace.of_shard(shard), some, reply)
    if reads:
        owners_in_gaps = await runner.run_each([read for _, _, read in reads])
        for (one, gap, _), owners in zip(reads, owners_in_gaps, strict=True):
            assert one.runs is not None
            one.runs += _within(gap, owners)
            one.is_short |= isinstance(owners, RedisUnavailable)
    return [one.overlaps(boundaries) for one in sought], answers


@dataclass(slots=True)
class _ChainLookup:
    """Search for the owners of a chain. samples: positions looked at first. guesses: where owners
    may change. runs: None: its shard has not answered. is_short: whether the answer is incomplete.
    """

    chain: Sequence[SequenceHash]
    samples: Sequence[int]
    guesses: Sequence[int]
    runs: list[Run] | None = None
    is_rough: bool = False
    is_short: bool = False

    @classmethod
    def of(cls, chain: Sequence[SequenceHash], boundaries: Boundaries | None) -> _ChainLookup:
        guesses = boundaries.recall(chain) if boundaries else []
        return cls(chain, _sample(len(chain), guesses), guesses)

    def overlaps(self, boundaries: Boundaries | None) -> Overlaps | None:
        if self.runs is None:
            return None
        self.runs.sort()
        if boundaries and not self.is_rough:
            boundaries.learn(self.chain, self.runs)
        kind = LowerBound if self.is_short else Rough if self.is_rough else Overlaps
        return _overlaps(self.runs, kind)


def _coarsely(shard: Keyspace, some: Sequence[_ChainLookup]) -> Call[list[Any]]:
    args = [_coarse(one.chain, one.samples, one.guesses) for one in some]
    flat = concatenated.from_iterable(args)
    return call("match", shard, EXACT_CHANGES, PARTS, *flat, parse=list)


def _take_runs(
    shard: Keyspace, some: Sequence[_ChainLookup], reply: list[Any]
) -> Iterator[tuple[_ChainLookup, Gap, Call[list[bytes | None]]]]:
    """Gives chains the runs of their samples; yields what is still to be read of each."""
    bucket_bits, dead, *runs_of_chains = reply
    for one, (rough_to, *runs) in zip(some, runs_of_chains, strict=True):
        one.runs, one.is_rough = _placed(runs, one.samples, rough_to), rough_to > 0
        for gap in _gaps(one.runs, one.samples):
            yield one, gap, _read(shard, bucket_bits, dead, one.chain, gap)


async def read_whole(
    runner: ScriptRunner, keyspace: Keyspace, chain: Sequence[SequenceHash], shards: int
) -> Overlaps:
    """Returns the overlaps of one chain, of one block at least, without running a script: for
    readers who may only read. Reads every block, in one round trip for each READ_GROUPS groups and
    one before them. Raises RedisUnavailable."""
    shard = keyspace.of_shard(shard_of(chain[0], shards))
    layout = command("match", "HGET", shard["shard"], "bucket_bits", parse=parse_bucket_bits)
    dead = command("match", "SMEMBERS", shard["dead"], parse=list)
    bucket_bits, gone = await runner.run([layout, dead])
    runs: list[Run] = []
    if bucket_bits is None:
        return Overlaps()
    for at in range(0, len(chain), READ_GROUPS * GROUP_BLOCKS):
        stop = min(at + READ_GROUPS * GROUP_BLOCKS, len(chain))
        gaps = [
            Gap(start, min(start + GROUP_BLOCKS, stop), NOBODY)
            for start in range(at, stop, GROUP_BLOCKS)
        ]
        replies = await runner.run([_read(shard, bucket_bits, gone, chain, gap) for gap in gaps])
        for gap, owners in zip(gaps, replies, strict=True):
            runs += _within(gap, owners)
    return _overlaps(runs)


def _grouped(
    chains: Sequence[Sequence[SequenceHash]], shards: int
) -> Iterator[tuple[int, list[int]]]:
    """Yields shards, each with the indices of the chains that one call looks up there."""
    by_shard: dict[int, list[int]] = {}
    for i, chain in enumerate(chains):
        by_shard.setdefault(shard_of(chain[0], shards) if chain else 0, []).append(i)
    for shard, which in by_shard.items():
        for start in range(0, len(which), CHAINS_PER_CALL):
            yield shard, which[start : start + CHAINS_PER_CALL]


def _coarse(
    chain: Sequence[SequenceHash], samples: Sequence[int], guesses: Sequence[int]
) -> tuple[bytes | int, ...]:
    if len(samples) == len(chain):
        blocks, group_size, following = chain, GROUP_BLOCKS, []
    else:
        blocks = [chain[i] for i in samples]
        ends = sorted(_ends(len(chain), guesses))
        group_size, following = 1, [bisect_left(samples, i) + 1 for i in ends if i % GROUP_BLOCKS]
    # Just after the change first: if the owners there are still the same, that side is settled.
    first = [bisect_left(samples, i) + 1 for guess in guesses for i in (guess, guess - 1)]
    return hex_text(blocks), group_size, _spaced(following), _spaced(first)


def _spaced(numbers: Sequence[int]) -> bytes:
    return b" ".join([b"%d" % number for number in numbers])


def _sample(length: int, guesses: Sequence[int]) -> Sequence[int]:
    """Returns positions to look at first: all, or the first ones of some groups, and the ends. An
    end that is not the first of its group is preceded by that first one."""
    if length <= WHOLE_CHAIN:
        return range(length)
    # A group costs as much to read as about 180 hashes to send.
    step = max(1, round(isqrt(length) / 45)) * GROUP_BLOCKS
    ends = _ends(length, guesses)
    extra = ends.union([i - i % GROUP_BLOCKS for i in ends])
    return sorted([*range(0, length, step), *[i for i in extra if i % step]])


def _ends(length: int, guesses: Sequence[int]) -> set[int]:
    """Returns the last position, and for each guess the two between which the owners may change."""
    return {length - 1, *guesses, *[guess - 1 for guess in guesses]}


def _read(
    shard: Keyspace,
    bucket_bits: int,
    dead: Sequence[bytes],
    chain: Sequence[SequenceHash],
    gap: Gap,
) -> Call[list[bytes | None]]:
    """Returns the call that reads the owners of each block of a gap, without dead ones."""
    bucket = bucket_of(chain[gap.start - gap.start % GROUP_BLOCKS], bucket_bits)
    return command(
        "match",
        "HMGET",
        shard[f"blocks:{bucket}"],
        *hex_texts(chain[gap.start : gap.end]),
        parse=partial(_living, dead) if dead else list,
    )


def _living(dead: Sequence[bytes], owners: list[bytes | None]) -> list[bytes | None]:
    def unless_dead(entry: re.Match[bytes]) -> bytes:
        return NOBODY if entry[1] in dead else entry[0]

    living = [held and OWNER.sub(unless_dead, held) for held in owners]
    return [None if held and held.endswith(b" ") else held for held in living]


def _placed(runs: list[Any], positions: Sequence[int], rough_to: int = 0) -> list[Run]:
    """Returns a script's runs over `positions` as Runs of the chain. Between two, where the owners
    change is still to be looked for, but not up to `rough_to`: there the owners of a run hold all
    from the run before on."""
    placed: list[Run] = []
    start = 0
    for end, owners in zip(runs[::2], runs[1::2], strict=True):
        first = placed[-1].end if 0 < start <= rough_to else positions[start]
        backs, owners = parse_field(owners)
        placed.append(Run(first, positions[end - 1] + 1, owners, backs))
        start = end
    return placed


def _gaps(runs: list[Run], samples: Sequence[int]) -> Iterator[Gap]:
    for run, following in zip_longest(runs, runs[1:]):
        if following:
            end, owners = following.start, following.owners
        elif run.end <= samples[-1]:
            end, owners = samples[bisect_left(samples, run.end)], NOBODY
        else:
            return
        start = run.end
        while start < end:
            stop = min(end, start - start % GROUP_BLOCKS + GROUP_BLOCKS)
            yield Gap(start, stop, owners)
            start = stop


def _within(gap: Gap, owners: list[bytes | None] | RedisUnavailable) -> Iterator[Run]:
    """Yields the runs in a gap, from the owners of its blocks. Without an answer, and where a block
    has just gone, the owners of what follows count."""
    if isinstance(owners, RedisUnavailable):
        owners = [None] * (gap.end - gap.start)
    start = gap.start
    for held, same in groupby((parse_field(each or NOBODY) for each in owners), key=itemgetter(1)):
        fields = list(same)
        end = start + len(fields)
        if held or gap.owners:
            yield Run(start, end, held or gap.owners, fields[-1][0])
        start = end


def _overlaps(runs: list[Run], kind: type[Overlaps] = Overlaps) -> Overlaps:
    """Returns the overlaps that the runs of a chain make. Workers that hold the same are processed
    together: of many, most share the beginning."""
    own: dict[Incarnation, TierOverlap] = {}
    shared: list[tuple[frozenset[Incarnation], TierOverlap]] = []
    alive: list[tuple[frozenset[Incarnation], TierOverlap]] = []
    reached = 0
    resumes: dict[Incarnation, Resume] = {}
    for start, end, owners, backs in runs:
        # A gap ends the overlap: an incarnation absent from a run holds nothing after it.
        if start != reached:
            break
        by_tier = _by_tier(owners)
        if start:
            alive = [
                (both, _longer(overlap, tier, end - start))
                for members, overlap in alive
                for tier, incs in by_tier.items()
                # Usually all of them; a set of its own would be another key of caches.
                if (both := incs if incs <= members else members & incs)
            ]
        else:
            alive = [(incs, _longer(NO_OVERLAP, tier, end)) for tier, incs in by_tier.items()]
        for members, overlap in alive:
            if len(members) < MANY:
                own.update(dict.fromkeys(members, overlap))
            else:
                shared.append((members, overlap))
        if backs or resumes:
            _resume(resumes, end, parse_backs(backs), by_tier)
        reached = end
    return kind(own, shared, resumes)


def _resume(
    resumes: dict[Incarnation, Resume],
    end: int,
    backs: Mapping[Incarnation, Back],
    by_tier: dict[Tier, frozenset[Incarnation]],
) -> None:
    for inc in [*resumes]:
        if any(inc in incs for incs in by_tier.values()):
            del resumes[inc]
    for inc, back in backs.items():
        if any(inc in incs for incs in by_tier.values()):
            resumes[inc] = Resume.of(end, back)


def _longer(overlap: TierOverlap, tier: Tier, blocks: int) -> TierOverlap:
    if tier is Tier.DEVICE:
        return TierOverlap(overlap.device + blocks, overlap.host, overlap.disk)
    if tier is Tier.HOST:
        return TierOverlap(overlap.device, overlap.host + blocks, overlap.disk)
    return TierOverlap(overlap.device, overlap.host, overlap.disk + blocks)


# A thousand owners take 66 kB.
@lru_cache(maxsize=512)
def _by_tier(owners: bytes) -> dict[Tier, frozenset[Incarnation]]:
    # A corrupted field may name an incarnation twice.
    tiers = dict(parse_owners(owners))
    by_tier = {tier: frozenset(inc for inc, its in tiers.items() if its is tier) for tier in Tier}
    return {tier: incs for tier, incs in by_tier.items() if incs}
