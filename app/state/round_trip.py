"""Commands and replies over pooled connections, past the parts of redis-py that cost most CPU.

Every decision makes one to three round trips, most of whose CPU redis-py would take. Measured for
three HMGETs of 20 fields with redis-py 8.1:

    one round trip                     40 µs here, 229 µs with redis-py's pipeline and pool
    of that, packing the commands       5 µs here,  44 µs
    of that, a connection and back      4 µs here,  16 µs with its BlockingConnectionPool
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hiredis import pack_command
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - redis-py's name
    ReadOnlyError,
    RedisError,
    ResponseError,
)


class Node(NamedTuple):
    """Where to send a command. asking: an ASK redirected it there. replica: for reads only."""

    client: Redis
    asking: bool = False
    replica: bool = False


class NotSent(RedisError):
    """No connection could be obtained, so the commands certainly did not run."""


def did_not_run(reply: Any) -> bool:
    """Whether this is an error saying that the command had no effect, but may elsewhere."""
    # Before Redis 7, a script's error names READONLY, a replica's refusal, only in its text.
    return isinstance(reply, NotSent | AskError | ClusterDownError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and "-READONLY" in str(reply)
    )


async def round_trip(node: Node, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """The raw replies to one pipeline, one per command, with errors as values.

    Raises RedisError or OSError if the connection fails after sending; some of the commands may
    then have run.
    """
    commands = list(commands)
    sent = [part for c in commands for part in (("ASKING",), c)] if node.asking else commands
    packed = b"".join([pack_command((*c[0].split(), *c[1:])) for c in sent])
    pool: Any = node.client.connection_pool
    try:
        connection = await pool.get_connection()
    except (RedisError, OSError) as error:
        return [NotSent(f"{type(error).__name__}: {error}")] * len(commands)
    try:
        await connection.send_packed_command(packed, check_health=False)
        replies = await _replies(connection, len(sent))
    except BaseException:
        # Replies still to come would be taken for those to other commands.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)
    return replies[1::2] if node.asking else replies


async def _replies(connection: Any, num: int) -> list[Any]:
    replies: list[Any] = []
    reader = connection._parser._reader
    while len(replies) < num:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
        # Most come together, and redis-py goes through five functions and a timer for each.
        while len(replies) < num and (reply := reader.gets()) is not NOT_ENOUGH_DATA:
            if isinstance(reply, ConnectionError):
                raise reply
            replies.append(reply)
    return replies


class FairPool(ConnectionPool):
    """Hands out connections in the order in which they are asked for, for which callers wait up to
    `timeout` seconds.

    In redis-py's BlockingConnectionPool who asks as a connection comes free overtakes those who
    wait: with 32 callers and 16 connections, some waited for as long as the others went on. A free
    connection is handed out without a lock or a timer.
    """

    def __init__(self, *, timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self.timeout = timeout
        self._turns = asyncio.Semaphore(self.max_connections)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if self._turns.locked():
            try:
                async with asyncio.timeout(self.timeout):
                    await self._turns.acquire()
            except TimeoutError:
                raise ConnectionError(
                    f"all {self.max_connections} connections were in use for {self.timeout:g} s"
                ) from None
        else:
            await self._turns.acquire()
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        # redis-py's also takes a lock, and tells listeners and counters that are not in use here.
        try:
            self._in_use_connections.remove(connection)
            if connection.should_reconnect():  # type: ignore[no-untyped-call]
                await connection.disconnect()
            self._available_connections.append(connection)
        finally:
            self._turns.release()
