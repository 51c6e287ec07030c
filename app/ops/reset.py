"""`kvroute reset`: deletes a namespace."""

from __future__ import annotations

import click

from app.core.keys import KEY_TYPES, Keyspace
from app.ops.terminal import COMMON, counted, on_redis, say
from app.options import Command
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import STEP_TIMEOUT_S, scan


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
