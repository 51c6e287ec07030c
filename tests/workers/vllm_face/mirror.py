"""An agent's view of an engine beside it: what the engine published, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import zmq.asyncio
from prometheus_client import CollectorRegistry

from app.core.types import SequenceHash, Tier
from tests.workers.kv.cache_model import CacheModel
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.stream import EventStream, Fresh
from workers.bridge.events.vllm import Batch
from workers.bridge.http.facts import EventSource
from workers.vllm_face.block_events import BlockEvents
from workers.vllm_face.event_socket import EventSocket
from workers.vllm_face.publisher import EventPublisher
from workers.vllm_face.request_metrics import RequestMetrics

Held = dict[Tier, set[SequenceHash]]


class Published:
    """Everything that makes an engine's events public."""

    def __init__(self, block_size: int, socket: EventSocket) -> None:
        self.block_size = block_size
        self.socket = socket
        self.blocks = BlockEvents(block_size)
        self.registry = CollectorRegistry()
        self.publisher = EventPublisher(
            self.blocks, socket, RequestMetrics(self.registry, {"model_name": "m", "engine": "0"})
        )


@asynccontextmanager
async def publishing(block_size: int) -> AsyncIterator[Published]:
    with closing(EventSocket("127.0.0.1")) as socket:
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(socket.run())
            yield Published(block_size, socket)
            answering.cancel()


class Mirror:
    """What a subscriber knows an engine to hold. begun: how each of its streams began."""

    def __init__(self, block_size: int, announces_copies: bool) -> None:
        self.begun: list[Fresh] = []
        self.model = CacheModel()
        self._block_size = block_size
        self._announces_copies = announces_copies
        self.engine_blocks = EngineBlocks(block_size)

    async def follow(self, stream: EventStream) -> None:
        async for item in stream.follow():
            match item:
                case Fresh():
                    self.begun.append(item)
                    self.engine_blocks = EngineBlocks(
                        self._block_size,
                        joined_late=item.joined_late,
                        announces_copies=self._announces_copies,
                    )
                    self.model = CacheModel()
                case Batch():
                    assert (item.num_unknown, item.num_broken) == (0, 0)
                    for event in item.events:
                        for change in self.engine_blocks.take(event):
                            self.model.take(change)

    def held(self) -> Held:
        held: Held = {tier: set() for tier in Tier}
        for block, tiers in self.model._held.items():
            for tier in tiers:
                held[tier].add(block)
        return held


@asynccontextmanager
async def mirrored(
    socket: EventSocket, block_size: int, *, announces_copies: bool = True
) -> AsyncIterator[Mirror]:
    mirror = Mirror(block_size, announces_copies)
    here = "tcp://127.0.0.1"
    source = EventSource(0, f"{here}:{socket.events_port}", f"{here}:{socket.replay_port}")
    context = zmq.asyncio.Context()
    with EventStream(context, source) as stream:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(mirror.follow(stream))
            yield mirror
            following.cancel()
    context.destroy(linger=0)
