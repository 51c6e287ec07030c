"""What an engine tells those beside it: its cache events, in batches, and its requests' metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.core.events import CacheEvent
from app.core.types import SequenceHash
from app.simulation.steps import Step
from workers.vllm_face.block_events import BlockEvents
from workers.vllm_face.event_socket import EventSocket
from workers.vllm_face.request_metrics import RequestMetrics

TOKEN_BYTES = 4


class EventPublisher:
    """Takes an agent's place beside an engine, and watches it."""

    def __init__(self, blocks: BlockEvents, events: EventSocket, requests: RequestMetrics) -> None:
        self._blocks = blocks
        self._events = events
        self._requests = requests

    def notify(self, events: Iterable[CacheEvent]) -> None:
        """One batch of all that an engine says together, such as after a step."""
        self._events.publish(self._blocks.take(events))

    async def published(self) -> bool:
        """At once: as with vLLM, nobody waits for subscribers."""
        return True

    def arrived(self, request_id: str, blocks: Sequence[SequenceHash], prompt: bytes) -> None:
        """See Watcher."""
        self._events.publish(self._blocks.arrived(request_id, blocks, prompt))
        self._requests.arrived(request_id, len(prompt) // TOKEN_BYTES)

    def generated(
        self, block: SequenceHash, parent: SequenceHash | None, tokens: Sequence[int]
    ) -> None:
        """See Watcher."""
        self._blocks.generated(block, parent, tokens)

    def left(self, request_id: str) -> None:
        """See Watcher."""
        self._blocks.left(request_id)
        self._requests.left(request_id)

    def stepped(self, step: Step, seconds: float) -> None:
        """See Watcher."""
        self._blocks.settle()
        self._requests.stepped(step, seconds)
