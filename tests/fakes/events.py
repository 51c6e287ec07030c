"""The sockets on which engines publish KV events: one for all to hear, one to ask again.

The first is a PUB socket: topic, number of the batch as big-endian u64, batch. The second is a
ROUTER: asked for a number, it answers with all batches from there on that it still has, and with an
end. The network may lose, repeat and delay batches.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress

import msgspec
import zmq.asyncio

from workers.bridge.events import vllm
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored
from workers.bridge.events.stream import Position
from workers.bridge.http.facts import EventSource

END = b"\xff" * 8


def _arrays(ts, events, rank):
    """A batch as SGLang publishes it."""
    told = []
    for event in events:
        name = type(event).__name__
        match event:
            case BlockStored():
                about = [event.block_hashes, event.parent_block_hash, event.token_ids]
                told.append([name, *about, event.block_size, event.lora_id, event.medium])
            case BlockRemoved():
                told.append([name, event.block_hashes, event.medium])
            case AllBlocksCleared():
                told.append([name])
    return msgspec.msgpack.encode([ts, told, rank])


WIRES = {"vllm": vllm.encode, "sglang": _arrays}
"""The bytes of a batch, by the kind of engine."""


class EventSockets:
    """buffer: how many batches it keeps to be asked for again. answers: cleared by tests in which
    it does not. num_asked: how often it was asked."""

    def __init__(self, buffer=10_000, *, replays=True, wire="vllm", rank=0):
        self.num_asked, self.answers = 0, True
        self._encode, self._rank = WIRES[wire], rank
        self._kept = deque(maxlen=buffer)
        self._next, self._ts = 0, 0.0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.set_hwm(0)
        self.events_port, self.replay_port = (
            socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._pub, self._router)
        )
        here = "tcp://127.0.0.1"
        replay = f"{here}:{self.replay_port}" if replays else None
        self.source = EventSource(rank, f"{here}:{self.events_port}", replay)

    async def __aenter__(self):
        self._answering = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, kind, error, _):
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._context.destroy(linger=0)

    @property
    def told(self):
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": self._kept.maxlen,
            "topic": "",
        }
        return {str(self._rank): source}

    def publish(self, events, *, times=1, rank=0):
        """Send a batch, unless it is empty. times: how often it arrives; 0: never."""
        if not events:
            return
        self._ts = max(time.time(), self._ts + 1e-6)
        payload = self._encode(self._ts, events, rank)
        for _ in range(times):
            self.send([b"", self._next.to_bytes(8, "big"), payload])
        self._kept.append((self._next, payload))
        self._next += 1

    @property
    def position(self):
        """The last batch that was published."""
        return Position(self._next - 1, self._ts) if self._next else None

    def send_late(self, back):
        """The batch that many before the last one arrives now, if it is still kept."""
        if back < len(self._kept):
            number, payload = self._kept[-1 - back]
            self.send([b"", number.to_bytes(8, "big"), payload])

    def send(self, frames):
        self._pub.send_multipart(frames)

    def cut(self):
        """Nothing arrives until `mend`."""
        self._pub.unbind(self.source.endpoint)

    def mend(self):
        self._pub.bind(self.source.endpoint)

    def restart(self):
        """Another process takes its place, and with it its connections end."""
        with suppress(zmq.ZMQError):  # they are cut
            self.cut()
            self.mend()
        self._kept.clear()
        self._next = 0

    async def _answer(self):
        asked = zmq.asyncio.Socket.from_socket(self._router)
        while True:
            client, _, first = await asked.recv_multipart()
            self.num_asked += 1
            if not self.answers:
                continue
            for number, payload in tuple(self._kept):
                if number >= int.from_bytes(first, "big"):
                    number_frame = number.to_bytes(8, "big")
                    self._router.send_multipart([client, b"", b"", number_frame, payload])
            self._router.send_multipart([client, b"", b"", END, b""])
