"""The sockets on which vLLM publishes KV events: one for all to hear, one to ask again.

The first is a PUB socket: topic, number of the batch as big-endian u64, batch. The second is a
ROUTER: asked for a number, it answers with all batches from there on that it still has, and with an
end. Taken from ZmqEventPublisher in vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import zmq
import zmq.asyncio

from app.core.errors import ConfigError
from app.core.pace import Pace
from workers.bridge.events.events import EngineEvent
from workers.bridge.events.vllm import encode

log = logging.getLogger(__name__)

BUFFER_BATCHES = 10_000
HWM = 100_000
"""Batches that may wait for a slow subscriber; it misses what exceeds them."""
MAX_MESSAGE_BYTES = 1024
"""Of what others send: a subscription, or the number of a batch."""
HANDSHAKE_MS = 5000
COMPLAINTS_PER_S = 1 / 60
END = b"\xff" * 8
"""In place of a number, after the last batch of an answer."""
BATCHES_AT_ONCE = 256
"""Of an answer, before others get their turn: well under a millisecond."""
TOPIC = b""


class EventSocket:
    """`publish`, and meanwhile `run` it to answer who asks again; `close` it in the end.

    host: address to bind to; 0.0.0.0 and :: are all of the machine. Ports of 0 take free ones.
    rank: data-parallel rank. buffered: batches that can be asked for again.
    Raises ConfigError if a port cannot be taken.
    """

    def __init__(
        self,
        host: str,
        *,
        events_port: int = 0,
        replay_port: int = 0,
        rank: int = 0,
        buffered: int = BUFFER_BATCHES,
    ) -> None:
        self._rank = rank
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=buffered)
        self._next = 0
        self._complaints = Pace(COMPLAINTS_PER_S)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HWM)
        self._replay = self._context.socket(zmq.ROUTER)
        # A whole answer has to fit, or ROUTER would drop its end: as the peer reports what it has
        # read only every so often, twice as much may count as unread.
        self._replay.setsockopt(zmq.SNDHWM, 2 * (buffered + 1))
        for sock in (self._pub, self._replay):
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        try:
            self.events_port = _bind(self._pub, host, events_port)
            self.replay_port = _bind(self._replay, host, replay_port)
        except ConfigError:
            self.close()
            raise

    def sources(self) -> dict[str, dict[str, object]]:
        """What vLLM's GET /kv_event_sources answers. `*` is the host that was asked."""
        return {
            str(self._rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.replay_port}",
                "buffer_steps": self._batches.maxlen,
                "hwm": HWM,
                "max_queue_size": HWM,
                "topic": TOPIC.decode(),
            }
        }

    def publish(self, events: Sequence[EngineEvent]) -> None:
        """Send a batch, unless it is empty; never blocks."""
        if not events:
            return
        number = self._next.to_bytes(8, "big")
        payload = encode(time.time(), events, self._rank)
        self._pub.send_multipart((TOPIC, number, payload))
        self._batches.append((number, payload))
        self._next += 1

    async def run(self) -> None:
        """Run until cancelled."""
        # Not from an asyncio socket also the answers: each of thousands of sends would cost ten
        # times as much.
        asked = zmq.asyncio.Socket.from_socket(self._replay)
        while True:
            frames = await asked.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                if self._complaints.allows(time.monotonic()):
                    log.warning("not a request for a replay: %d frames", len(frames))
                continue
            await self._answer(frames[0], int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        self._pub.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    async def _answer(self, peer: bytes, first: int) -> None:
        oldest = self._next - len(self._batches)
        wanted = list(islice(self._batches, max(0, first - oldest), None))
        for at, (number, payload) in enumerate(wanted, 1):
            self._replay.send_multipart((peer, b"", TOPIC, number, payload))
            if at % BATCHES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._replay.send_multipart((peer, b"", b"", END, b""))


def _bind(sock: zmq.Socket[bytes], host: str, port: int) -> int:
    """Returns the port."""
    is_v6 = ":" in host
    at = f"[{host}]" if is_v6 else host
    sock.setsockopt(zmq.IPV6, is_v6)
    try:
        sock.bind(f"tcp://{at}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish events on {host}:{port}: {error}") from None
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
