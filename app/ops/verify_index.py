"""Search for contradictions in the shards of the index and their buckets."""

from __future__ import annotations

import re

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from app.core.chains import parse_owners
from app.core.keys import Keyspace
from app.core.overlaps import parse_backs, parse_field
from app.core.types import Incarnation, parse_incarnation
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import (
    BUCKET_BITS,
    STEP_TIMEOUT_S,
    bucket_bits_of,
    contents,
    read_together,
    readable,
)

BACKS = re.compile(rb"[1-9]\d{0,9}[-=][1-9]\d{0,8}")
OWNERS = re.compile(rb"(?:(?:%b,)*%b )?(?:[1-9]\d{0,9}[dhk])+" % (BACKS.pattern, BACKS.pattern))
Wrong = tuple[str, str]
"""Contradiction, and its place."""


async def look_at_shard(redis: RedisClient, shard: Keyspace) -> list[Wrong]:
    """Returns what is wrong with the keys of a shard other than its buckets."""

    def queue(pipe: Pipeline) -> None:
        pipe.hget(shard["shard"], "bucket_bits")
        pipe.hkeys(shard["applied"])
        pipe.smembers(shard["dead"])
        pipe.hgetall(shard["predictions"])

    node = redis.node_of(shard["shard"]).client
    bits, applied, dead, predictions = await read_together(node, queue)
    wrong = []
    if applied and not BUCKET_BITS.fullmatch(bits or b""):
        wrong.append(("bucket bits that cannot be read", shard["shard"]))
    for inc in {*applied, *dead}:
        if parse_incarnation(inc) is None:
            wrong.append(("a writer that is no incarnation", f"{shard.tag} {readable(inc)}"))
    for name, number in predictions.items():
        if not re.fullmatch(rb"-?\d{1,15}", number):
            wrong.append(("a number of predictions that cannot be read", readable(name)))
    return wrong


async def bad_entries(
    redis: RedisClient, keyspace: Keyspace, node: Redis, keys: dict[bytes, int]
) -> list[tuple[bytes, str, str]]:
    """Returns (key, what, where) of entries that nobody would write, or whose owner has ended.

    Entries of incarnations in `dead`, or that no sweep has been told of yet, are right. keys: each
    with its shard.
    """
    held = await contents(node, list(keys))
    known: dict[int, set[Incarnation]] = {}
    bits: dict[int, int | None] = {}
    async with deadline(STEP_TIMEOUT_S):
        for shard in set(keys.values()):
            names = keyspace.of_shard(shard)
            bits[shard] = await bucket_bits_of(redis, names)
            writing = await redis.hkeys(names["applied"])
            dying = await redis.smembers(names["dead"])
            known[shard] = set(filter(None, map(parse_incarnation, (*writing, *dying))))
    wrong = []
    for (key, shard), entries in zip(keys.items(), held, strict=True):
        _, name = keyspace.parse(key) or (None, "")
        if not is_bucket(name.removeprefix("blocks:"), bits[shard]):
            wrong.append((key, "a bucket that nobody looks for", ""))
            continue
        if entries is None:
            wrong.append((key, "a bucket that is not a hash", ""))
            continue
        for block, owners in entries.items():
            where = f"{readable(block)} {readable(owners)}"
            is_one = OWNERS.fullmatch(owners)
            incs = [inc for inc, _ in parse_owners(owners)] if is_one else []
            if not is_one or incs != sorted(set(incs)):
                wrong.append((key, "owners that cannot be read", where))
            elif set(incs) - known[shard]:
                wrong.append((key, "an unknown owner that no sweep removes", where))
            elif parse_backs(parse_field(owners)[0]).keys() - set(incs):
                wrong.append((key, "where the engine of no owner goes on", where))
    return wrong


def is_bucket(name: str, bits: int | None) -> bool:
    """Whether a bucket of this name is one of 2^`bits`; with None, any may be."""
    if bits is None:
        return True
    digits = -(-bits // 4)
    return bool(re.fullmatch(f"[0-9a-f]{{{digits}}}", name)) and not int(name, 16) % (
        1 << (4 * digits - bits)
    )
