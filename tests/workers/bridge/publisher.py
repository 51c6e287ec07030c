"""An engine's event sockets over a network that loses, repeats and delays batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import zmq.asyncio

from workers.bridge.events import vllm
from workers.bridge.events.events import EngineEvent
from workers.bridge.events.stream import Position
from workers.bridge.http.facts import EventSource

END = b"\xff" * 8


class Publisher:
    """Publishes as vLLM does. buffer: how many batches it keeps to be asked for again."""

    def __init__(self, buffer: int = 10_000, *, replays: bool = True) -> None:
        self.num_asked = 0
        self.answers = True
        """Cleared by tests in which it does not answer."""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._next = 0
        self._ts = 1000.0
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._router = self._context.socket(zmq.ROUTER)
        replay = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(
            0, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}" if replays else None
        )

    async def __aenter__(self) -> Publisher:
        self._answering = asyncio.create_task(self._answer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._context.destroy(linger=0)

    async def publish(
        self, events: Sequence[EngineEvent], *, times: int = 1, rank: int | None = 0
    ) -> None:
        """times: how often it arrives; 0: never."""
        self._ts += 1
        payload = vllm.encode(self._ts, events, rank)
        for _ in range(times):
            await self._pub.send_multipart([b"", self._next.to_bytes(8, "big"), payload])
        self._kept.append((self._next, payload))
        self._next += 1

    @property
    def position(self) -> Position | None:
        """The last batch that was published."""
        return Position(self._next - 1, self._ts) if self._next else None

    async def send_late(self, back: int) -> None:
        """The batch that many before the last one arrives now, if it is still kept."""
        if back < len(self._kept):
            seq, payload = self._kept[-1 - back]
            await self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def cut(self) -> None:
        """Nothing arrives until `mend`."""
        self._pub.unbind(self.source.endpoint)

    def mend(self) -> None:
        self._pub.bind(self.source.endpoint)

    async def send(self, frames: Sequence[bytes]) -> None:
        await self._pub.send_multipart(list(frames))

    def restart(self) -> None:
        """Another process takes its place."""
        self._kept.clear()
        self._next = 0

    async def _answer(self) -> None:
        while True:
            client, _, asked = await self._router.recv_multipart()
            self.num_asked += 1
            if not self.answers:
                continue
            for seq, payload in tuple(self._kept):
                if seq >= int.from_bytes(asked, "big"):
                    frames = [client, b"", b"", seq.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", END, b""])
