"""Keys that no script would ever look for: members of families that belong to nothing.

Nothing that kvroute does leaves any. They come from what others do to its Redis: a key renamed, a
number in `shard` or `meta` changed.
"""

from __future__ import annotations

from app.core import index, leases
from app.core.keys import Keyspace
from app.core.redis import deadline
from app.core.scripts import Call, ScriptRunner


async def drop_strays(
    runner: ScriptRunner, keyspace: Keyspace, shards: int, keys: list[bytes], timeout_s: float
) -> None:
    """Remove those of `keys` that no script would look for.

    These are buckets that the shard's bucket_bits do not lead to, requests of incarnations that
    there are not, and shards past the last one. Raises RedisUnavailable.
    """
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
    async with deadline(timeout_s):
        for key in past:
            await runner.redis.unlink(key)
