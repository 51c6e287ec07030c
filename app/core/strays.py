"""Keys that no script would ever look for: members of families that belong to nothing.

Nothing that kvroute does leaves any. They come from what others do to its Redis: a key renamed, a
number in `shard` or `meta` changed.
"""

from __future__ import annotations

from typing import Any

from app.core import index, leases
from app.core.keys import Keyspace
from app.core.redis import deadline
from app.core.scripts import Call, ScriptRunner

SCAN_KEYS = 256
"""Looked at in a step, a tenth of a millisecond of Redis's time."""


async def drop_strays(
    runner: ScriptRunner, keyspace: Keyspace, shards: int, cursor: int, timeout_s: float
) -> int:
    """One bounded step through all keys, from `cursor` on; where to go on, 0 after the last.

    Removed are buckets that the shard's bucket_bits do not lead to, requests of incarnations that
    there are not, and shards past the last one. Raises RedisUnavailable.
    """
    async with deadline(timeout_s):
        found: Any = await runner.redis.scan(cursor, keyspace.pattern, SCAN_KEYS)
    next_cursor, keys = found
    incarnations: set[str] = set()
    buckets: dict[int, list[str]] = {}
    past: list[bytes] = []
    for key in keys:
        shard, name = keyspace.parse(key) or (None, "")
        family, _, member = name.partition(":")
        if shard is None:
            if family in ("requests", "prefills"):
                incarnations.add(member)
        elif shard >= shards:
            past.append(key)
        elif family in ("blocks", "predicted"):
            buckets.setdefault(shard, []).append(name)
    calls: list[Call[int]] = [
        index.drop_buckets(keyspace.of_shard(shard), names) for shard, names in buckets.items()
    ]
    if incarnations:
        calls.append(leases.drop_requests(keyspace, incarnations))
    await runner.run(calls)
    if past:
        async with deadline(timeout_s):
            await runner.redis.unlink(*past)
    return int(next_cursor)
