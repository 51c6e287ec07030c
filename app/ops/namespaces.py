"""Names of namespaces, the state of one, and `kvroute reset`, which deletes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from app.core.chains import BLOCKS_PER_BUCKET
from app.core.errors import ConfigError
from app.core.keys import KEY_TYPES, NAMESPACE, Keyspace
from app.ops.terminal import COMMON, counted, on_redis, say
from app.ops.workers import WorkerStatus, held_blocks, with_blocks
from app.options import Command
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    bucket_bits_of,
    number_of,
    read_control,
    readable,
    scan,
)

FULL_FACTOR = 4
"""Times the blocks that an index was laid out for, beyond which it is called overfull."""


@dataclass(frozen=True, slots=True)
class Summary:
    """State of a namespace. laid_out_blocks: how many the buckets were laid out for, where that can
    be read. memory_bytes: used by the servers, including whatever else they hold."""

    namespace: str
    block_size: int
    shards: int
    workers: list[WorkerStatus]
    unique_blocks: int
    laid_out_blocks: int
    memory_bytes: int

    @property
    def overfull(self) -> bool:
        return 0 < FULL_FACTOR * self.laid_out_blocks < self.unique_blocks


async def names(redis: RedisClient) -> list[str]:
    namespaces = set()
    async for _, keys in scan(redis, "kvroute:1:{*}:meta"):
        namespaces |= {readable(key)[len("kvroute:1:{") : -len("}:meta")] for key in keys}
    # A key that ends in a tenant's name may match as well.
    return sorted(filter(NAMESPACE.fullmatch, namespaces))


async def summary(redis: RedisClient, keyspace: Keyspace) -> Summary | None:
    """Returns a namespace's state, or None if there is none. Reads the whole index. Raises
    RedisUnavailable."""
    control = await read_control(redis, keyspace)
    if b"block_size" not in control.meta or b"shards" not in control.meta:
        return None
    shards = number_of(keyspace, control.meta, "shards")
    held, unique = await held_blocks(redis, keyspace)
    laid_out = memory = 0
    async with deadline(STEP_TIMEOUT_S):
        for shard in range(shards):
            bits = await bucket_bits_of(redis, keyspace.of_shard(shard))
            laid_out += BLOCKS_PER_BUCKET << bits if bits else 0
        for master in await redis.masters():
            memory += int((await master.info("memory"))["used_memory"])
    return Summary(
        namespace=keyspace.namespace,
        block_size=number_of(keyspace, control.meta, "block_size"),
        shards=shards,
        workers=await with_blocks(redis, keyspace, control, held),
        unique_blocks=unique,
        laid_out_blocks=laid_out,
        memory_bytes=memory,
    )


async def block_size(redis: RedisClient, keyspace: Keyspace) -> int:
    """Returns tokens per block. Raises ConfigError for a missing namespace, RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
    if b"block_size" not in meta:
        raise ConfigError(f"namespace {keyspace.namespace!r} does not exist")
    return number_of(keyspace, meta, "block_size")


@click.command(cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@COMMON
@on_redis
async def reset(redis: RedisClient, keyspace: Keyspace, yes: bool) -> None:
    """Delete all keys of a namespace. Running workers register again by themselves."""
    if not yes:
        pages = scan(redis, keyspace.pattern + "*")
        keys = sum([len([key for key in page if keyspace.parse(key)]) async for _, page in pages])
        text = f"Delete {counted(keys, 'key')} of namespace {keyspace.namespace!r}?"
        click.confirm(text, abort=True)
    say(f"{counted(await delete_namespace(redis, keyspace), 'key')} deleted")


async def delete_namespace(redis: RedisClient, keyspace: Keyspace) -> int:
    """Delete all keys of this namespace only, and return how many. Raises RedisUnavailable.

    Workers and routers may be running: the list of workers goes at once, so that they register
    again, and nothing is left that belongs to none of them.
    """
    control = [keyspace[name] for name in KEY_TYPES if not name.endswith(":")]
    async with deadline(STEP_TIMEOUT_S):
        deleted = int(await redis.unlink(*control))
    kept = {key.encode() for key in control}
    async for node, keys in scan(redis, keyspace.pattern + "*"):
        own = [key for key in keys if keyspace.parse(key) and key not in kept]
        # One command per key: in a Cluster they are in many slots.
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in own:
                pipe.unlink(key)
            deleted += sum(await pipe.execute())
    return deleted
