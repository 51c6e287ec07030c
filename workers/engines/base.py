"""The interface of engines: what a worker's process, its HTTP paths and its agent need of any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.core.errors import InvalidRequest, shown
from app.core.types import Tier
from app.core.worker_report import ForwardPassMetrics, Speed
from app.simulation.steps import Finished
from workers.kv.cache import EventSink
from workers.kv.transfer.tcp import BlockSource

MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-5
"""Temperature below which 0 is meant, as in vLLM: float32 could not hold logits divided by it."""
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of how a request's tokens are chosen, with names and ranges of OpenAI and vLLM.

    temperature: 0 to 2; 0 is greedy and always takes the most likely token. top_p: above 0, up to
    1: only the most likely tokens that together have this probability. top_k: only this many of the
    most likely tokens; 0 or -1 for all. seed: the same seed gives the same tokens again; None gives
    different ones each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and its value."""
        # Types are compared exactly, because a bool is an int to isinstance.
        if (
            type(self.temperature) not in (int, float)
            or not 0 <= self.temperature <= MAX_TEMPERATURE
        ):
            raise InvalidRequest(
                "temperature", f"needs a number from 0 to 2, got {shown(self.temperature)}"
            )
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise InvalidRequest(
                "top_p", f"needs a number above 0 and up to 1, got {shown(self.top_p)}"
            )
        if type(self.top_k) is not int or self.top_k < -1:
            raise InvalidRequest(
                "top_k", f"needs an integer of at least -1, got {shown(self.top_k)}"
            )
        if self.seed is not None and (type(self.seed) is not int or self.seed not in _INT64):
            raise InvalidRequest("seed", f"needs an integer of 64 bits, got {shown(self.seed)}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_cut(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


class QueueFullError(Exception):
    """Raised if the queue is full."""


class EngineStoppedError(Exception):
    """Raised if the engine stopped before the request was complete."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to an engine.

    prompt: token ids, little-endian u32, at least one. ignore_eos: go on to `max_tokens`. salt:
    prompts with other ones share no cache with this one. source: keeps KV that need not be computed
    here. keep_s: seconds for which the KV of the prompt is kept once the request is complete,
    unless another worker has it before.
    """

    request_id: str
    prompt: bytes
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    salt: str = ""
    source: BlockSource | None = None
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Tokens produced since the last output; `finished` is set on the last one."""

    token_ids: list[int]
    finished: Finished | None


class Generation:
    """The output of one request as it is produced: iterate once, then `cancel` in every case.

    kept: where the prompt's KV is kept, once it is complete, if it was to be. tokens: returns the
    output tokens from one index to another, out of those produced. Output that is not taken yet is
    only a number, so a slow reader costs no memory and gets larger outputs.
    """

    def __init__(
        self,
        request_id: str,
        tokens: Callable[[int, int], list[int]],
        stream_interval: int,
        cancel: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.kept: BlockSource | None = None
        self._tokens = tokens
        self._stream_interval = stream_interval
        self._cancel = cancel
        self._changed = asyncio.Event()
        self._emitted = 0
        self._wake_at = 1
        self._finished: Finished | None = None
        self._stopped = False

    def cancel(self) -> None:
        """Frees what the request holds in the engine, if it has not finished."""
        self._cancel(self)

    def emit(self) -> None:
        """Says that the engine has produced one more token."""
        self._emitted += 1
        if self._emitted >= self._wake_at:
            self._changed.set()

    def end(self, finished: Finished | None) -> None:
        """Says that no more tokens follow; None: the engine stopped before the end."""
        self._finished = finished
        self._stopped = finished is None
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[EngineOutput]:
        """Raises EngineStoppedError if the engine stops before the request is complete."""
        taken = 0
        finished = None
        while finished is None:
            await self._changed.wait()
            self._changed.clear()
            if self._stopped:
                raise EngineStoppedError(
                    f"the engine stopped request {self.request_id} after {taken} tokens"
                )
            token_ids = self._tokens(taken, self._emitted)
            taken = self._emitted
            self._wake_at = taken + self._stream_interval
            finished = self._finished
            yield EngineOutput(token_ids, finished)


class Engine(Protocol):
    """An engine that runs on the wall clock."""

    @property
    def max_context_tokens(self) -> int:
        """Tokens that the prompt and output of a request may have together."""

    @property
    def running(self) -> bool: ...

    @property
    def transfers(self) -> bool:
        """Whether KV can travel to other workers from here, and theirs here."""

    async def run(self) -> None:
        """Runs until cancelled; requests still unfinished then end."""

    def complete(self, request: CompletionRequest, *, stream_interval: int = 1) -> Generation:
        """Submits a request at once; its first token comes alone, the others in groups of
        `stream_interval`.

        Raises QueueFullError, PromptTooLargeError, InvalidRequest if the id is in use, and
        EngineStoppedError once the engine stops.
        """

    async def hand_on(self, prompt: bytes, lease_s: float, salt: str = "") -> BlockSource | None:
        """Keeps what is held of the prompt's full blocks, for another worker, until that has it or
        the lease ends, without a place in the queue; None: nothing is held."""

    def metrics(self) -> ForwardPassMetrics: ...

    def speed(self) -> Speed: ...

    def block_events(self) -> Mapping[str, int]:
        """Returns how many KV blocks were evicted, loaded and so on since the start, by event."""

    def kv_connections(self) -> Mapping[str, int]:
        """Returns the connections for KV that have ended, by what became of them."""


class TextStream(Protocol):
    """The text of an output as it is produced, in whole characters."""

    def push(self, token: int) -> str: ...

    def end(self) -> str: ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stream(self, context: Sequence[int] = ()) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine, ready to start once it has a publisher for its cache events.

    num_blocks: slots of each tier. close: to be called when the engine has ended. gpu: index of the
    GPU that it computes on, among those that CUDA shows; None on a CPU.
    """

    model: str
    num_blocks: Mapping[Tier, int]
    start: Callable[[EventSink], Engine]
    close: Callable[[], None] = lambda: None
    tokenizer: Tokenizer | None = None
    gpu: int | None = 0
    tokenizer_source: str = ""
    """Folder of the tokenizer and the chat template; "": there is none."""
    invents: bool = False
    """True if the words are made up, and have no end of their own."""
    kv_kind: Mapping[str, str] = field(default_factory=dict)
    """Values that have to be equal for others to use its KV, by name; empty: it hands none on."""
