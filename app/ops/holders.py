"""Holders of blocks: of one block, of a prompt, or of all that is in the index."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from app.core.chains import parse_owners, shard_of
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.overlaps import Resume
from app.core.registration import decode_info
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap, parse_incarnation
from app.state import overlap
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    buckets,
    contents,
    number_of,
    read_control,
    readable,
)
from app.state.scripts import ScriptRunner


async def owners_of(
    redis: RedisClient, keyspace: Keyspace, block: SequenceHash
) -> list[tuple[str, list[tuple[Incarnation, Tier]]]]:
    """Returns the keys that contain `block`, with its owners there, dead ones included.

    The bucket depends on the first block of the group, which a hash does not reveal: all are asked.
    Raises RedisUnavailable.
    """
    name = f"{block:016x}"
    owners_by_block = []
    async for node, keys in buckets(redis, keyspace):
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, name)
            replies = await pipe.execute(raise_on_error=False)
        for key, owners in zip(keys, replies, strict=True):
            if isinstance(owners, bytes):
                owners_by_block.append((readable(key), list(parse_owners(owners))))
    return owners_by_block


class Holding(NamedTuple):
    """Leading blocks of a prompt that a worker holds, and the number that its engine reuses."""

    held: TierOverlap
    reused: int


async def prefix(
    redis: RedisClient, keyspace: Keyspace, chain: list[SequenceHash], num_tokens: int
) -> dict[str, Holding]:
    """Returns what each live worker holds of a prompt, by worker key.

    Raises RedisUnavailable, even if only the index cannot be read.
    """
    control = await read_control(redis, keyspace)
    shards = number_of(keyspace, control.meta, "shards")
    try:
        overlaps = await overlap.read_whole(
            ScriptRunner(redis, STEP_TIMEOUT_S), keyspace, chain, shards
        )
    except RedisUnavailable as error:
        shard = keyspace.of_shard(shard_of(chain[0], shards))
        raise RedisUnavailable(f"the index cannot be read in {shard.tag!r}: {error}") from error
    holdings = {}
    for name, number in control.current.items():
        inc = parse_incarnation(number) or Incarnation(0)
        held = overlaps.get(inc)
        if held and control.leases.get(number, 0) > control.now_ms:
            resume, info = overlaps.resumes.get(inc), control.workers.get(number)
            holdings[readable(name)] = Holding(held, _reused(held, resume, info, num_tokens))
    return holdings


def _reused(held: TierOverlap, resume: Resume | None, text: bytes | None, num_tokens: int) -> int:
    try:
        info = decode_info(text or b"")
    except ValueError:
        return held.total  # `verify` tells
    most = (num_tokens - 1) // info.block_size
    return resume.reused(most) if resume else info.reuse_rule.reusable(held, most)


async def held_blocks(
    redis: RedisClient, keyspace: Keyspace
) -> tuple[Counter[tuple[Incarnation, Tier]], int]:
    """Returns the entries of each incarnation by tier, and the number of unique blocks.

    Reads the whole index. Raises RedisUnavailable.
    """
    held: Counter[tuple[Incarnation, Tier]] = Counter()
    unique = 0
    async for node, keys in buckets(redis, keyspace):
        for entries in await contents(node, list(keys)):
            unique += len(entries or ())
            for owners in (entries or {}).values():
                held.update(parse_owners(owners))
    return held, unique
