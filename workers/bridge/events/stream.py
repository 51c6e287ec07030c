"""Stream of KV events of one rank of an engine: each batch once and in order, or word that some are
lost.

An engine numbers its batches, publishes each once and keeps the last ones to be asked for again.
The number of the last batch together with its time proves that an engine is still the same process,
and that nothing was missed: asked for that very batch, only this process answers with both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import zmq
import zmq.asyncio

from workers.bridge.events import vllm
from workers.bridge.events.vllm import Batch, WireError
from workers.bridge.http.facts import EventSource

log = logging.getLogger(__name__)

PROBE_S = 1.0
"""Seconds without a batch, after which the engine is asked whether there was none."""
REPLY_S = 2.0
"""Deadline of each message of an answer. An engine looks for questions every 100 ms."""
RETRY_S = 0.5
QUEUED_BATCHES = 100_000
MAX_BATCH_BYTES = 64 * 1024 * 1024
BATCHES_AT_ONCE = 64
FOLLOWING_S = 60.0
"""Seconds after a loss within which another one has the agent wait before it asks for everything
again: MIN_WAIT_S, and twice as long each time, up to MAX_WAIT_S."""
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
_END = b"\xff" * 8


class Position(NamedTuple):
    """Number of a batch, and its time in seconds since 1970."""

    seq: int
    ts: float


@dataclass(frozen=True, slots=True)
class Fresh:
    """Sign that all that came before is void. joined_late: the engine holds blocks that the batches
    to come do not tell of."""

    joined_late: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Resumption:
    """Sign that what was known at the position given is still true, and that the batches since then
    follow."""


@dataclass(slots=True)
class Counters:
    """Counts of what has happened to a stream since it was opened."""

    batches: int = 0
    heard: int = 0
    """Messages that came without being asked for."""
    replayed: int = 0
    gaps: int = 0
    duplicates: int = 0
    of_other_ranks: int = 0
    unreadable: int = 0
    unknown_events: int = 0
    lag_s: float = 0.0


class _Lost(Exception):
    """Batches are missing, and the engine cannot send them again."""


class _Message(NamedTuple):
    seq: int
    payload: bytes


class EventStream:
    """Reader of an engine's events. Use as a context manager, and iterate over `follow` once.

    after: where an earlier process left off; None: at nothing.
    """

    def __init__(
        self, context: zmq.asyncio.Context, source: EventSource, after: Position | None = None
    ) -> None:
        self.counters = Counters()
        self.is_current = False
        """Whether, as far as can be told, all is known that the engine has published by now."""
        self.began = asyncio.Event()
        """Set once `follow` has returned what was published before it began."""
        self.position: Position | None = None
        self._context = context
        self._source = source
        self._after = after
        self._queue: deque[_Message] = deque()
        self._subscriber = self._socket(zmq.SUB, source.endpoint)
        self._subscriber.subscribe(source.topic.encode())
        # asyncio's future for each message would cost more than the message.
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(self._subscriber.underlying)
        self._monitor = self._subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        self._is_new = False
        """Whether the connection is a new one, over which another process may send: what that has
        published may have just the numbers that are expected."""
        self._dealer: zmq.asyncio.Socket | None = None
        self._lost_s = -FOLLOWING_S
        self._wait_s = 0.0

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._subscriber.disable_monitor()
        self._monitor.close(linger=0)
        self._subscriber.close(linger=0)
        if self._dealer is not None:
            self._dealer.close(linger=0)

    async def follow(self) -> AsyncGenerator[Fresh | Resumption | Batch, None]:
        """Yields first Fresh or Resumption, then batches without end; Fresh again whenever some are
        lost."""
        reason = "the agent started"
        while True:
            async with aclosing(self._begin(reason)) as beginning:
                async for item in beginning:
                    yield item
            self.began.set()
            try:
                async with aclosing(self._go_on()) as following:
                    async for item in following:
                        yield item
            except _Lost as loss:
                reason = str(loss)
            # Nothing that may be wrong is shown meanwhile, nor kept as what was known here.
            self.position, self.is_current = None, False
            yield Fresh(joined_late=True, reason=reason)
            await self._wait_before_the_next(reason)

    async def _wait_before_the_next(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        is_again = now - self._lost_s < FOLLOWING_S + self._wait_s
        self._wait_s = min(max(2 * self._wait_s, MIN_WAIT_S), MAX_WAIT_S) if is_again else 0.0
        log.warning(
            "%s: %s: what it holds is learned anew%s",
            self._source.endpoint,
            reason,
            f" in {self._wait_s:g} s, as this happened before" if self._wait_s else "",
        )
        await asyncio.sleep(self._wait_s)
        self._lost_s = asyncio.get_running_loop().time()

    async def _begin(self, reason: str) -> AsyncGenerator[Fresh | Resumption | Batch, None]:
        after, self._after = self._after, None
        if self._source.replay is None:
            yield Fresh(joined_late=True, reason=reason)
            return
        if after is not None:
            messages, is_whole = await self._insist(after.seq)
            if messages and after == (messages[0].seq, self._decoded(messages[0]).ts):
                self.position = after
                yield Resumption()
                for message in messages[1:]:
                    yield self._taken(message)
                self.is_current = is_whole
                return
            reason = "the engine is another, or has gone on for too long"
        messages, is_whole = await self._insist(0)
        yield Fresh(joined_late=bool(messages) and messages[0].seq > 0, reason=reason)
        for message in messages:
            self.counters.replayed += 1
            yield self._taken(message)
        self.is_current = is_whole

    async def _go_on(self) -> AsyncGenerator[Batch, None]:
        """Yields what comes from now on. Raises _Lost."""
        while True:
            is_idle = not self._queue and not self._is_new
            if (is_idle and not await self._receive()) or self._is_new:
                async with aclosing(self._missed()) as missed:
                    async for batch in missed:
                        yield batch
                continue
            if not self._queue:
                continue  # what came was no batch
            message, last = self._queue[0], self.position
            expected = last.seq + 1 if last else 0
            # Without replay, nothing is known to be missing but what was before the first.
            is_first = self._source.replay is None and last is None
            if message.seq == expected or (is_first and message.seq > expected):
                self._queue.popleft()
                self.is_current = True
                yield self._taken(message)
            elif last and message.seq <= last.seq:
                if self._decoded(message).ts > last.ts:
                    self.counters.gaps += 1
                    raise _Lost("the engine was started again")
                self._queue.popleft()
                self.counters.duplicates += 1
            else:
                self.counters.gaps += 1
                if self._source.replay is None:
                    raise _Lost(f"batches {expected} to {message.seq - 1} did not arrive")
                async with aclosing(self._missed()) as missed:
                    async for batch in missed:
                        yield batch

    async def _missed(self) -> AsyncGenerator[Batch, None]:
        """Yields what came after the last batch, as asked of the engine. Raises _Lost if that is
        not all there, or another process answers."""
        if self._source.replay is None:
            return
        last = self.position
        messages, is_whole = await self._replay(last.seq if last else 0)
        if last and messages:
            first = messages.pop(0)
            if last != (first.seq, self._decoded(first).ts):
                is_other = first.seq <= last.seq
                raise _Lost("the engine was started again" if is_other else "too much was missed")
        elif last and is_whole:
            raise _Lost("the engine was started again")
        for message in messages:
            expected = self.position.seq + 1 if self.position else 0
            if message.seq > expected:
                raise _Lost(f"batches {expected} to {message.seq - 1} are gone")
            self.counters.replayed += 1
            yield self._taken(message)
        self.is_current = is_whole
        if is_whole:
            self._is_new = False
        else:
            await asyncio.sleep(RETRY_S)

    def _decoded(self, message: _Message) -> Batch:
        try:
            return vllm.decode(message.payload)
        except WireError as error:
            self.counters.unreadable += 1
            log.warning("%s: batch %d: %s", self._source.endpoint, message.seq, error)
            # Its time is unknown, so that the next one serves as proof.
            last_ts = self.position.ts if self.position else 0.0
            return Batch(last_ts, [], self._source.rank, num_broken=1)

    def _taken(self, message: _Message) -> Batch:
        batch = self._decoded(message)
        self.position = Position(message.seq, batch.ts)
        self.counters.batches += 1
        self.counters.unknown_events += batch.num_unknown
        self.counters.lag_s = max(0.0, time.time() - batch.ts)
        if batch.rank is not None and batch.rank != self._source.rank:
            self.counters.of_other_ranks += 1
            return Batch(batch.ts, [], batch.rank)
        return batch

    async def _receive(self) -> bool:
        """Fetches some of what has been published. Returns False if nothing came within PROBE_S."""
        if not await self._subscriber.poll(round(PROBE_S * 1000)):
            return False
        for _ in range(BATCHES_AT_ONCE):
            try:
                frames = self._reader.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.counters.heard += 1
            if len(frames) == 3 and len(frames[1]) == 8:
                self._queue.append(_Message(int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self.counters.unreadable += 1
        # The event of a connection comes before what is sent over it.
        with suppress(zmq.Again):
            while True:
                self._events.recv_multipart(zmq.NOBLOCK)
                self._is_new = self._source.replay is not None
        return True

    async def _insist(self, seq: int) -> tuple[list[_Message], bool]:
        """Returns a replay; asks again as long as no answer begins."""
        while True:
            messages, is_whole = await self._replay(seq)
            if messages or is_whole:
                return messages, is_whole
            await asyncio.sleep(RETRY_S)

    async def _replay(self, seq: int) -> tuple[list[_Message], bool]:
        """Returns the batches from number `seq` on that the engine still has, and whether it has
        said that these are all."""
        assert self._source.replay is not None
        if self._dealer is None:
            self._dealer = self._socket(zmq.DEALER, self._source.replay)
        messages: list[_Message] = []
        is_whole = False
        try:
            async with asyncio.timeout(REPLY_S):
                await self._dealer.send_multipart([b"", seq.to_bytes(8, "big")])
            while not is_whole:
                async with asyncio.timeout(REPLY_S):
                    frames = await self._dealer.recv_multipart()
                # Older engines leave out the topic.
                *_, number, payload = frames if len(frames) >= 3 else (b"", b"", b"")
                is_whole = number == _END
                if len(number) == 8 and not is_whole:
                    messages.append(_Message(int.from_bytes(number, "big"), payload))
        except TimeoutError:
            pass
        finally:
            if not is_whole:
                # The rest of this answer must not be taken for the next one.
                self._dealer.close(linger=0)
                self._dealer = None
        return messages, is_whole

    def _socket(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(address)
        return socket
