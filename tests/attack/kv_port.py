"""Sends hostile frames to a port for KV, and finds what should not have come back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.fakes.engine import RESET
from workers.kv.identity import IDENTITY_BYTES
from workers.kv.transfer.tcp import (
    MAX_BLOCKS,
    MAX_FRAME_BYTES,
    VERSION,
    wanted_frame,
)

PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 0.1, 5.0
PATIENCE_S = 10.0
"""A source waits for 2 s at most."""
CONNECTIONS, IDLE = 16, 200
KIND = {"model": "attack"}
UNKNOWN = "0" * 32
"""An id that nothing is kept under."""


@dataclass(slots=True)
class KvPort:
    """An attack on it. key: of the workers; "": a stranger's, or none is asked for."""

    host: str
    port: int
    key: str = ""
    seed: int = 1
    problems: list[str] = field(default_factory=list)
    num_sent: int = 0

    async def attack(self, count):
        """Send `count` frames, and meanwhile ask as a worker would."""
        async with self._answering():
            await self._send_frames(count)
            for begun in (b"", b"\x10\0", (100).to_bytes(4, "little") + b"{"):
                await self._hold_many(begun)
            await self._trickle()

    async def asked(self):
        """Asks as a worker for blocks that are not kept, and returns the answer. Raises OSError,
        TimeoutError."""
        return await self._told(_asking(UNKNOWN, self.key))

    async def _told(self, sent, *, resets=False):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                with suppress(OSError):
                    writer.write(sent)
                    await writer.drain()
                    if resets:
                        raw = writer.get_extra_info("socket")
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        return b""
                    writer.write_eof()
                    return await reader.read()
                return b""
            finally:
                writer.close()

    @asynccontextmanager
    async def _answering(self):
        """Meanwhile, whoever asks must be told that nothing is kept, or that its key is wrong."""

        async def ask():
            while True:
                try:
                    async with asyncio.timeout(PROBE_TIMEOUT_S):
                        told = await self.asked()
                    if b"error" not in told:
                        self.problems.append(f"a worker that asks is told {told[:200]!r}")
                except (OSError, TimeoutError) as error:
                    self.problems.append(f"a worker that asks: {error!r}")
                await asyncio.sleep(PROBE_INTERVAL_S)

        asking = asyncio.create_task(ask())
        try:
            yield
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking

    async def _send_frames(self, count):
        frames = iter([frame_of(self.seed, number) for number in range(count)])

        async def some():
            for frame in frames:
                self.num_sent += 1
                try:
                    told = await self._told(frame, resets=self.num_sent % 7 == 0)
                except (OSError, TimeoutError) as error:
                    self.problems.append(f"{error!r}; sent {frame[:100]!r}")
                    continue
                if len(told) > MAX_FRAME_BYTES or (told and b"error" not in told):
                    self.problems.append(f"told {told[:200]!r}; sent {frame[:100]!r}")

        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(some())

    async def _hold_many(self, begun):
        """More connections than there are places, none of which asks for anything."""
        async with AsyncExitStack() as stack:
            for _ in range(IDLE):
                with suppress(ConnectionError):
                    _, writer = await asyncio.open_connection(self.host, self.port)
                    stack.callback(writer.close)
                    writer.write(begun)
            for _ in range(5):
                await asyncio.sleep(PROBE_INTERVAL_S)

    async def _trickle(self):
        """A byte now and then, over as many connections as could send: they are to be closed."""

        async def one():
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write((MAX_FRAME_BYTES).to_bytes(4, "little"))
                async with asyncio.timeout(PATIENCE_S):
                    ended = asyncio.create_task(reader.read())
                    while not ended.done():
                        with suppress(ConnectionError):
                            writer.write(b" ")
                        await asyncio.wait([ended], timeout=PROBE_INTERVAL_S)
                    with suppress(ConnectionError):
                        await ended
            except TimeoutError:
                self.problems.append("who sends a byte now and then keeps its place")
            finally:
                writer.close()

        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


def frame_of(seed, number):
    rng = random.Random(f"{seed} {number}")
    kinds = list(_FRAMES)
    return kinds[number % len(kinds)](rng) if number < 4 * len(kinds) else rng.choice(kinds)(rng)


def _framed(body, length=None):
    return (len(body) if length is None else length).to_bytes(4, "little") + body


def _asking(transfer_id, key, blocks=1):
    return wanted_frame(transfer_id, [bytes(IDENTITY_BYTES)] * blocks, KIND, key)


def _with(**fields):
    asked = {"version": VERSION, "transfer_id": UNKNOWN, "num_blocks": 1, "kind": KIND, "proof": ""}
    return _framed(json.dumps(asked | fields).encode())


def _odd_values(rng):
    name = rng.choice(("version", "transfer_id", "num_blocks", "kind", "proof", "more"))
    values = (
        *(None, True, -1, 2**63, 1e308, "", "x" * 3000, "\x1b[2J\n\u202e", "\ud800", [], {}),
        *([[]], {"a": {"b": []}}, {"": "x" * 3000}, {"model": 1}, [0] * 1000),
    )
    return _with(**{name: rng.choice(values)})


def _damaged(rng):
    frame = bytearray(_asking(UNKNOWN, "", rng.choice((0, 1, 9))))
    for _ in range(rng.randint(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame)


def _nested(rng):
    depth = rng.choice((10, 1000, 2000))
    opens, closes = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return _framed(opens * depth + closes * depth)


def _too_long(rng):
    body = rng.choice((b"[{}" + b",{}" * 100_000 + b"]", b'"' + b"x" * 4_000_000 + b'"', b""))
    return _framed(body, rng.choice((None, 2**32 - 1, MAX_FRAME_BYTES + 1)))


def _unfinished(rng):
    frame = _asking(UNKNOWN, "", 100)
    return frame[: rng.randrange(len(frame))]


_FRAMES = (
    _odd_values,
    _damaged,
    _nested,
    _too_long,
    _unfinished,
    lambda rng: _asking(UNKNOWN, "wrong " * rng.randint(1, 100)),
    lambda _: _asking(UNKNOWN, "", MAX_BLOCKS),
    lambda _: _with(num_blocks=MAX_BLOCKS + 1),
    lambda _: _framed(b'{"version":1,"transfer_id":"x","blocks":[1],"kind":{}}'),
    lambda rng: rng.randbytes(rng.choice((1, 3, 4, 100, 5000))),
    lambda _: b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    lambda _: _framed(b"\xff\xfe" * 2000),
)
