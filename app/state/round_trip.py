"""Commands and replies over one connection to each server, which all callers share.

Every decision makes one to three round trips, most of whose CPU redis-py would take: 229 µs for
three HMGETs of 20 fields with its pipeline and pool, 20 µs here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hiredis
from hiredis import pack_command
from redis._parsers.base import BaseParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - redis-py's name
    InvalidResponse,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

MAX_WAITING = 16_384


class Node(NamedTuple):
    """Target of a command. asking: an ASK redirected it there. replica: for reads only."""

    client: Redis
    asking: bool = False
    replica: bool = False


class NotSent(RedisError):
    """Failure to get a connection, so the commands certainly did not run."""


def did_not_run(reply: Any) -> bool:
    """Whether an error says that the command had no effect, but may elsewhere."""
    # Before Redis 7, a script's error names READONLY, a replica's refusal, only in its text.
    return isinstance(reply, NotSent | AskError | ClusterDownError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and "-READONLY" in str(reply)
    )


async def round_trip(node: Node, commands: Iterable[Sequence[Any]], until_s: float) -> list[Any]:
    """Returns the raw replies to one pipeline, one per command, with errors as values. Raises
    TimeoutError at `until_s`, loop time, and RedisError or OSError if the connection fails after
    sending; some of the commands may then have run."""
    commands = list(commands)
    if not commands:
        return []
    sent = [part for c in commands for part in (("ASKING",), c)] if node.asking else commands
    packed = b"".join([pack_command((*c[0].split(), *c[1:])) for c in sent])
    pool: Any = node.client.connection_pool
    connection: SharedConnection | None = pool.shared
    if connection is None:
        try:
            async with asyncio.timeout_at(until_s):
                connection = await pool.open_shared()
        except (RedisError, OSError) as error:
            # A TimeoutError is an OSError.
            return [NotSent(f"{type(error).__name__}: {error}")] * len(commands)
    replies = await connection.send(packed, len(sent), until_s)
    return replies[1::2] if node.asking else replies


@dataclass(slots=True)
class _Pipeline:
    num: int
    until_s: float
    done: asyncio.Future[list[Any]]
    replies: list[Any] = field(default_factory=list)


class SharedConnection(asyncio.Protocol):
    """Connection on which pipelines of all callers go out at once; Redis replies in their order. A
    caller that is cancelled, or too late, leaves its place: its replies are dropped as they come.
    One timer serves all callers."""

    def __init__(self, connection: Any) -> None:
        """connection: of redis-py, connected; nothing else may use it any more."""
        writer = connection._writer
        # It would close what it no longer uses.
        connection._reader = connection._writer = None
        self._writer = writer
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=NOT_ENOUGH_DATA,
        )
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Pipeline] = deque()
        self._timer: asyncio.Handle | None = None
        # uvloop's handle of a time that is just past does not say it.
        self._looks_s = 0.0
        self._transport: asyncio.Transport = writer.transport
        self._transport.set_protocol(self)
        self.is_open = not self._transport.is_closing()

    def send(self, packed: bytes, num: int, until_s: float) -> asyncio.Future[list[Any]]:
        """Sends `num` commands; their replies are as in `round_trip`."""
        done = self._loop.create_future()
        if len(self._waiting) >= MAX_WAITING:
            done.set_result([NotSent(f"{MAX_WAITING} pipelines wait for replies")] * num)
            return done
        self._waiting.append(_Pipeline(num, until_s, done))
        self._transport.write(packed)
        if self._timer is None or until_s < self._looks_s:
            self._look_at(until_s)
        return done

    def retire(self) -> None:
        """Sends nothing more, and closes once all replies have come that are waited for."""
        self.is_open = False
        if all(pipeline.done.done() for pipeline in self._waiting):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while waiting:
                pipeline = waiting[0]
                while len(pipeline.replies) < pipeline.num:
                    reply = reader.gets()
                    if reply is NOT_ENOUGH_DATA:
                        return
                    pipeline.replies.append(reply)
                waiting.popleft()
                self._answer(pipeline)
        except InvalidResponse as error:
            self._fail(error)
        if not self.is_open:
            self.retire()

    def _answer(self, pipeline: _Pipeline) -> None:
        if pipeline.done.done():
            return
        # Such as LOADING: a new connection may find a server that answers.
        broken = next((r for r in pipeline.replies if isinstance(r, ConnectionError)), None)
        if broken is None:
            pipeline.done.set_result(pipeline.replies)
        else:
            pipeline.done.set_exception(broken)
            self.retire()

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_s = self._loop.call_at(when_s, self._look), when_s

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for pipeline in self._waiting:
            if pipeline.until_s <= now_s and not pipeline.done.done():
                pipeline.done.set_exception(TimeoutError())
        left = [pipeline.until_s for pipeline in self._waiting if pipeline.until_s > now_s]
        if left:
            self._look_at(min(left))
        # A server that is silent for so long may be gone.
        if not self.is_open or (self._waiting and self._waiting[0].until_s <= now_s):
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionError(str(error or "Connection closed by server.")))

    def _fail(self, error: RedisError) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            pipeline = self._waiting.popleft()
            if not pipeline.done.done():
                pipeline.done.set_exception(error)
        self._transport.abort()


class SharingPool(BlockingConnectionPool):
    """Pool of redis-py's connections to a server, and the one that callers of `round_trip`
    share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shared: SharedConnection | None = None
        self._opening = asyncio.Lock()

    @property
    def shared(self) -> SharedConnection | None:
        """Connection that callers share; None if none is open."""
        return self._shared if self._shared is not None and self._shared.is_open else None

    async def open_shared(self) -> SharedConnection:
        """Returns the shared connection, opened if there is none. Raises RedisError, OSError."""
        async with self._opening:
            if self.shared is None:
                connection = self.make_connection()  # type: ignore[no-untyped-call]
                await self.ensure_connection(connection)
                self._shared = SharedConnection(connection)
            assert self._shared is not None
            return self._shared

    async def disconnect(self, inuse_connections: bool = True) -> None:
        if self._shared is not None:
            self._shared.retire()
        await super().disconnect(inuse_connections)
