"""The simulated engine on the wall clock, whose tokens are handed out as they are produced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from app.core.errors import InvalidRequest
from app.core.events import CacheEvent
from app.core.types import SequenceHash
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, Speed
from app.simulation.engine import SimEngine
from app.simulation.running import Received
from app.simulation.speed import SpeedLearner, sped_up
from app.simulation.steps import Finished, SimRequest
from workers.engines.base import CompletionRequest, EngineStoppedError, Generation, QueueFullError
from workers.engines.sim.transfer import SimTransfer
from workers.kv.transfer.tcp import BlockSource


class EngineRunner:
    """An engine that runs `speedup` times as fast as the hardware it simulates.

    max_waiting: requests that may wait for admission; beyond that QueueFullError is raised.
    transfer: by which KV leaves and comes; None: it does neither. on_step: called after each step,
    when its tokens and events are out; set it at any time.
    """

    def __init__(
        self,
        engine: SimEngine,
        *,
        speedup: float = 1.0,
        max_waiting: int = 1024,
        transfer: SimTransfer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self.running = False
        self.engine = engine
        self._transfer = transfer
        self._speedup = speedup
        self._max_waiting = max_waiting
        self._clock = clock
        self._sleep = sleep
        self._learner = SpeedLearner(
            engine.profile.max_batch_tokens, sped_up(DEFAULT_SPEED, speedup)
        )
        self._generations: dict[str, Generation] = {}
        self._keeps: dict[str, tuple[Sequence[SequenceHash], float]] = {}
        """Blocks and seconds of requests whose prompt is kept for another worker."""
        self._fetching: dict[str, tuple[asyncio.Task[None], BlockSource | None]] = {}
        """Tasks of requests that wait for KV from another worker, and the sources of that KV."""
        self._coming: dict[SequenceHash, asyncio.Event] = {}
        """Events of blocks on their way from other workers: set once they will not come any more.
        """
        self._tasks: asyncio.TaskGroup | None = None
        self._events: list[CacheEvent] = []
        self._work = asyncio.Event()
        self._stopped = False

    @property
    def max_context_tokens(self) -> int:
        return self.engine.pool.num_blocks * self.engine.block_size

    @property
    def transfers(self) -> bool:
        return self._transfer is not None

    async def run(self) -> None:
        """Runs until `stop` or cancellation; then unfinished requests end."""
        self.running = True
        try:
            async with asyncio.TaskGroup() as self._tasks:
                serving = []
                if self._transfer is not None:
                    serving.append(self._tasks.create_task(self._transfer.run()))
                await self._step()
                for task in (*serving, *(task for task, _ in self._fetching.values())):
                    task.cancel()
        finally:
            self.running = False
            self.stop()
            for generation in self._generations.values():
                generation.end(None)

    async def _step(self) -> None:
        """Steps the engine until `stop`.

        A step ends one step time after the end of the previous one, not after the moment at which
        the event loop got round to it: a busy machine delays steps but does not slow the engine
        down.
        """
        deadline = self._clock()
        while not self._stopped:
            step = self.engine.step()
            if step is None:
                self._work.clear()
                await self._work.wait()
                deadline = self._clock()
                continue
            # Looked up now: whoever cancels meanwhile may use the same id for another request.
            emitted = [self._generations[i] for i in step.emitted]
            ended = [(self._generations[f.request_id], f) for f in step.finished]
            wall_s = step.duration_s / self._speedup
            deadline += wall_s
            await self._sleep(max(0.0, deadline - self._clock()))
            self._learner.observe(step, wall_s, self._keeps)
            self._events += self.engine.take_events()
            self._deliver(emitted, ended)
            self.on_step()

    def stop(self) -> None:
        """Makes `run` return after the step it is in, and refuses further requests."""
        self._stopped = True
        self._work.set()

    def complete(self, asked: CompletionRequest, *, stream_interval: int = 1) -> Generation:
        """Submits a request as Engine.complete does; sampling options are ignored."""
        source = asked.source
        request = SimRequest.from_tokens(
            asked.request_id,
            asked.prompt,
            asked.max_tokens,
            block_size=self.engine.block_size,
            salt=asked.salt,
        )
        if self._stopped:
            raise EngineStoppedError("the worker is stopping")
        num_waiting = self.engine.num_waiting + len(self._fetching)
        if num_waiting >= self._max_waiting:
            raise QueueFullError(f"{num_waiting} requests are already waiting")
        if request.request_id in self._generations:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already in use")
        if source is None and self._comes(request) is None:
            self.engine.submit(request)
        else:
            self.engine.validate(request)
            if self._tasks is None:
                raise EngineStoppedError("the worker is starting")
            fetching = self._tasks.create_task(self._submit_once_come(request, source))
            self._fetching[request.request_id] = fetching, source
        generation = Generation(
            request.request_id, request.output_tokens, stream_interval, self._cancel
        )
        self._generations[request.request_id] = generation
        if asked.keep_s:
            self._keeps[request.request_id] = request.blocks, asked.keep_s
        self._work.set()
        return generation

    def take_events(self) -> list[CacheEvent]:
        """Returns the cache events of steps that have ended, in order, since the last call."""
        events, self._events = self._events, []
        return events

    def metrics(self) -> ForwardPassMetrics:
        return self.engine.metrics()

    def speed(self) -> Speed:
        """Returns the speed in wall-clock seconds: a larger speed-up makes it faster."""
        return self._learner.speed()

    async def hand_on(self, prompt: bytes, lease_s: float, salt: str = "") -> BlockSource | None:
        assert self._transfer is not None, "it hands nothing on"
        size = self.engine.block_size
        request = SimRequest.from_tokens("", prompt, 1, block_size=size, salt=salt)
        return self._transfer.keep(request.blocks, lease_s)

    def block_events(self) -> dict[str, int]:
        return {}

    def kv_connections(self) -> Mapping[str, int]:
        return self._transfer.answered if self._transfer is not None else {}

    async def _submit_once_come(self, request: SimRequest, source: BlockSource | None) -> None:
        """Submits a request once what it lacks has come, or is known not to come."""
        while (comes := self._comes(request)) is not None:
            await comes.wait()
        if source is None:
            self._submit(request, None)
            return
        assert self._transfer is not None, "it fetches nothing"
        size, began_s = self.engine.block_size, self._clock()
        start = self.engine.pool.match(request.blocks)
        # The last token is always computed.
        stop = min(source.num_tokens, request.prompt_tokens - 1) // size
        received = None
        come = asyncio.Event()
        lacking = request.blocks[start:stop]
        self._coming |= dict.fromkeys(lacking, come)
        try:
            if lacking:
                num_tokens = size * await self._transfer.fetch(source, lacking)
                if num_tokens:
                    self._learner.observe_transfer(num_tokens, self._clock() - began_s)
                    received = Received(size * start, size * start + num_tokens)
                    self.engine.take_in(request.blocks[: received.stop // size])
            self._submit(request, received)
        finally:
            for block in lacking:
                self._coming.pop(block, None)
            come.set()
        if not lacking:
            await self._transfer.decline(source)

    def _submit(self, request: SimRequest, received: Received | None) -> None:
        del self._fetching[request.request_id]
        self.engine.submit(request, received)
        self._work.set()

    def _comes(self, request: SimRequest) -> asyncio.Event | None:
        """Returns an event of the first block that the request lacks, if that is on its way."""
        if not self._coming:
            return None
        held = self.engine.pool.match(request.blocks)
        return next(map(self._coming.get, request.blocks[held : held + 1]), None)

    def _deliver(self, emitted: list[Generation], ended: list[tuple[Generation, Finished]]) -> None:
        for generation in emitted:
            generation.emit()
        for generation, finished in ended:
            keeps = self._keeps.get(generation.request_id)
            if keeps is not None and self._transfer is not None:
                generation.kept = self._transfer.keep(*keeps)
            generation.end(finished)
            self._forget(generation)

    def _cancel(self, generation: Generation) -> None:
        if not self._forget(generation):
            return
        fetching = self._fetching.pop(generation.request_id, None)
        if fetching is None:
            self.engine.cancel(generation.request_id)
            return
        task, source = fetching
        task.cancel()
        if source is not None and self._tasks is not None and not self._stopped:
            assert self._transfer is not None, "it fetches nothing"
            self._tasks.create_task(self._transfer.decline(source))

    def _forget(self, generation: Generation) -> bool:
        """Forgets a request; False: it was forgotten before, and another one may have its id."""
        request_id = generation.request_id
        if self._generations.get(request_id) is not generation:
            return False
        del self._generations[request_id]
        self._keeps.pop(request_id, None)
        return True
