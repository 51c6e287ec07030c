"""Keys that no script would ever look for: members of families that belong to nothing.

kvroute itself never leaves any. They come from what others do to its Redis, such as renaming a key
or changing a number in `shard` or `meta`.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from app.core.keys import Keyspace
from app.state import index, leases
from app.state.connect import deadline
from app.state.scripts import Call, ScriptRunner

SCAN_KEYS = 256
"""How many keys a step looks at, in a tenth of a millisecond of Redis's time."""


class Strays:
    """Goes through all keys of a namespace, a few per step, and starts over at the end."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, timeout_s: float) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._timeout_s = timeout_s
        self._turn = 0
        """Counts the masters gone through; most deployments have only one."""
        self._cursor = 0

    async def drop_some(self, shards: int) -> None:
        """Take one step, removing what belongs to nothing.

        That is buckets that a shard's bucket_bits do not lead to, requests of incarnations that do
        not exist, and everything in shards from `shards` on.
        Raises RedisUnavailable; some keys may then have been removed.
        """
        async with deadline(self._timeout_s):
            masters = await self._runner.redis.masters()
            master = masters[self._turn % len(masters)]
            found: Any = await master.scan(self._cursor, self._keyspace.pattern, SCAN_KEYS)
        self._cursor, keys = int(found[0]), found[1]
        if self._cursor == 0:
            self._turn += 1
        past, calls = self._sort(keys, shards)
        await self._runner.run(calls)
        if past:
            await self._drop(master, past)

    def _sort(self, keys: list[bytes], shards: int) -> tuple[list[bytes], list[Call[int]]]:
        """Keys to drop, and calls that examine the others more closely."""
        past: list[bytes] = []
        incarnations: set[str] = set()
        buckets: dict[int, list[str]] = {}
        for key in keys:
            shard, name = self._keyspace.parse(key) or (None, "")
            family, separator, member = name.partition(":")
            family += separator
            if shard is None:
                if family in ("requests:", "prefills:"):
                    incarnations.add(member)
            elif shard >= shards:
                past.append(key)
            elif family in ("blocks:", "predicted:"):
                buckets.setdefault(shard, []).append(name)
        calls = [
            index.drop_buckets(self._keyspace.of_shard(shard), names)
            for shard, names in buckets.items()
        ]
        if incarnations:
            calls.append(leases.drop_requests(self._keyspace, incarnations))
        return past, calls

    async def _drop(self, master: Redis, keys: list[bytes]) -> None:
        async with deadline(self._timeout_s), master.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.unlink(key)
            await pipe.execute()
