"""A real engine: a Llama over the worker's own KV cache, with continuous batching.

Prompts are computed in chunks that begin at multiples of `chunk_tokens`, each in a forward pass of
its own, and requests reuse only whole chunks. So reused KV has exactly the bits that computing it
again would give, whatever else ran at the time. Generated tokens are computed together with those
of other requests, so their blocks are not offered for reuse, as the bits would differ.

A step is a chunk of the first incomplete prompt, and a token for each request whose prompt is
complete. It runs in a thread; meanwhile the event loop admits requests and moves blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from app.core.errors import InvalidRequest
from app.core.types import Tier
from app.core.worker_report import ForwardPassMetrics, Speed
from app.simulation.steps import Finished
from workers.engines.base import CompletionRequest, EngineStoppedError, Generation, QueueFullError
from workers.engines.torch.admission import AdaptiveAdmission
from workers.engines.torch.forward import ForwardPasses
from workers.engines.torch.llama import Llama
from workers.engines.torch.prefills import Prefills
from workers.engines.torch.sequence import Chunk, TokenSequence, step_of
from workers.engines.torch.transfer import BlockTransfer
from workers.engines.torch.waiting import WaitingRequests
from workers.kv.cache import BlockCache, EventSink
from workers.kv.identity import identities_of
from workers.kv.manager import BlockManager
from workers.kv.memory import MemoryPool
from workers.kv.tables import BlockTable, Move
from workers.kv.transfer.kv_lease import KvPort
from workers.kv.transfer.tcp import BlockSource


class TorchEngine:
    """A torch engine: `run` it and submit requests with `complete`, on one event loop.

    manager: of the blocks that `pools` hold on the device, each rank its heads of every block; it
    must reuse multiples of a chunk. carry_out: copies a move's blocks. spare: slots of each tier
    kept free. max_num_seqs: requests that run at once. max_waiting: requests that may wait for
    admission; beyond that QueueFullError is raised.
    """

    def __init__(
        self,
        model: Llama,
        pools: Sequence[MemoryPool],
        manager: BlockManager,
        carry_out: Callable[[Move], int],
        publisher: EventSink,
        *,
        chunk_tokens: int,
        spare: Mapping[Tier, int],
        max_num_seqs: int = 64,
        max_waiting: int = 1024,
        link: KvPort | None = None,
    ) -> None:
        self.running = False
        self.transfers = link is not None
        self.block_size = pools[0].shape.block_size
        self._model = model
        self._passes = ForwardPasses(model, pools)
        self._manager = manager
        self._max_num_seqs, self._max_waiting = max_num_seqs, max_waiting
        self._admission = AdaptiveAdmission(chunk_tokens, self.block_size)
        self._may_step = asyncio.Event()
        self._cache = BlockCache(
            manager,
            carry_out,
            publisher,
            spare=spare,
            on_load=self._admission.observe_load,
            on_arrival=self._may_step.set,
        )
        self._waiting = WaitingRequests(
            self._cache, chunk_tokens, may_begin=self._may_begin, begin=self._begin
        )
        self._transfer = (
            None if link is None else BlockTransfer(pools, self._cache, link, self._waiting.notice)
        )
        self._sequences: dict[str, TokenSequence] = {}
        self._prefills = Prefills(
            self._cache,
            self._admission,
            self._transfer,
            chunk_tokens=chunk_tokens,
            on_arrival=self._arrived,
            put_back=self._waiting.put_back,
        )
        self._decoding: list[TokenSequence] = []
        self._in_step: set[TokenSequence] = set()
        self._stopping = asyncio.Event()

    @property
    def max_context_tokens(self) -> int:
        pool_tokens = self._manager.tiers[Tier.DEVICE].num_slots * self.block_size
        return min(pool_tokens, self._model.config.max_position_embeddings)

    async def run(self) -> None:
        """Runs until `stop` or cancellation; requests still unfinished then end."""
        async with asyncio.TaskGroup() as tasks:
            caching = tasks.create_task(self._cache.run())
            try:
                async with asyncio.TaskGroup() as working:
                    working_on = [
                        working.create_task(self._waiting.admit_forever()),
                        working.create_task(self._step_forever()),
                        working.create_task(self._admission.revise_forever(self._manager)),
                    ]
                    if self._transfer is not None:
                        working_on.append(working.create_task(self._transfer.run()))
                    await asyncio.sleep(0)  # lets all of these start, the cache first
                    self.running = True
                    await self._stopping.wait()
                    for task in working_on:
                        task.cancel()
            finally:
                self._end_all()
                await asyncio.to_thread(self._passes.close)
                caching.cancel()

    def stop(self) -> None:
        """Makes `run` return, and refuses further requests."""
        self._stopping.set()

    def complete(self, request: CompletionRequest, *, stream_interval: int = 1) -> Generation:
        """Submits a request. Raises as Engine.complete, and InvalidRequest for unknown tokens."""
        if self._stopping.is_set():
            raise EngineStoppedError("the worker is stopping")
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are already waiting")
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already in use")
        sequence = TokenSequence.of(
            request,
            self._model.config,
            block_size=self.block_size,
            num_slots=self._manager.tiers[Tier.DEVICE].num_slots,
        )
        sequence.generation = Generation(
            request.request_id,
            sequence.output,
            stream_interval,
            lambda _: self._cancel(sequence),
        )
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)
        if self.running:
            self._waiting.prefetch()
        return sequence.generation

    async def hand_on(self, prompt: bytes, lease_s: float, salt: str = "") -> BlockSource | None:
        """Keeps held blocks for another worker. Raises EngineStoppedError."""
        if self._stopping.is_set():
            raise EngineStoppedError("the worker is stopping")
        if self._transfer is None or not self.running:
            return None
        return await self._transfer.keep_held(identities_of(prompt, self.block_size, salt), lease_s)

    def metrics(self) -> ForwardPassMetrics:
        device = self._manager.tiers[Tier.DEVICE]
        used = device.num_slots - device.num_free - device.num_idle - device.num_leaving
        if self._transfer is not None:
            used -= self._transfer.num_kept  # they are no load, and soon gone
        return ForwardPassMetrics(
            request_active_slots=len(self._prefills) + len(self._decoding),
            request_total_slots=self._max_num_seqs,
            kv_active_blocks=used,
            kv_total_blocks=device.num_slots,
            num_requests_waiting=len(self._waiting),
            gpu_cache_usage_perc=used / device.num_slots,
            gpu_prefix_cache_hit_rate=self._prefills.hit_rate.value,
            kv_idle_before_evict_s=self._manager.idle.value_s,
        )

    def speed(self) -> Speed:
        return self._admission.learner.speed()

    def block_events(self) -> dict[str, int]:
        return {
            **asdict(self._manager.counts),
            "unconfirmed": self._cache.unconfirmed,
            "fetched": self._prefills.num_fetched,
            "lost": self._prefills.num_lost,
        }

    def kv_connections(self) -> Mapping[str, int]:
        return self._transfer.answered if self._transfer is not None else {}

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself."""
        self._manager.check()
        running = [*self._prefills, *self._decoding]
        assert all(sequence.table is not None for sequence in running)
        live = [s for s in running if not s.cancelled]
        assert {*live, *self._waiting} == set(self._sequences.values())

    def _end_all(self) -> None:
        self.running = False
        self.stop()
        for sequence in self._sequences.values():
            sequence.generation.end(None)
        self._sequences.clear()

    def _may_begin(self) -> bool:
        return len(self._prefills) + len(self._decoding) < self._max_num_seqs

    def _begin(self, sequence: TokenSequence, table: BlockTable) -> None:
        sequence.table = table
        sequence.block_ids = table.block_ids
        sequence.cached = tuple(table.tiers)
        sequence.prefilled = table.num_matched * self.block_size
        self._prefills.add(sequence)
        self._may_step.set()

    def _arrived(self, sequence: TokenSequence) -> None:
        self._may_step.set()
        if sequence.cancelled and sequence.table is not None:
            self._leave_if_unused(sequence)

    async def _step_forever(self) -> None:
        while True:
            chunk = self._prefills.next_chunk()
            decoding = list(self._decoding)
            if chunk is None and not decoding:
                self._may_step.clear()
                await self._may_step.wait()
                continue
            self._in_step = {*decoding, *([chunk.sequence] if chunk else [])}
            for_others = {one.request.request_id for one in self._in_step if one.request.keep_s}
            started = time.perf_counter()
            tokens, chunk, waited_s = await self._passes.run(chunk, decoding)
            duration_s = time.perf_counter() - started - waited_s
            while chunk is not None and any(not one.ended for one in chunk.arriving):
                # All of it is there, and those who brought it are about to say so.
                self._may_step.clear()
                await self._may_step.wait()
            finished = self._apply(chunk, decoding, tokens)
            step = step_of(chunk, decoding, duration_s, finished)
            self._admission.observe(step, for_others)

    def _apply(
        self, chunk: Chunk | None, decoding: Sequence[TokenSequence], tokens: Sequence[int]
    ) -> list[Finished]:
        """Takes in what a step computed; returns the requests that finished."""
        in_step, self._in_step = self._in_step, set()
        emitting = list(decoding)
        if chunk is not None:
            sequence = chunk.sequence
            self._prefills.computed(chunk)
            if chunk.is_last:
                self._decoding.append(sequence)
                emitting.append(sequence)
        finished = []
        for sequence, token in zip(emitting, tokens, strict=True):
            if sequence.cancelled:
                continue
            sequence.tokens.append(token)
            sequence.generation.emit()
            ended = sequence.finished(self._model.config.eos_token_ids)
            if ended is not None:
                finished.append(ended)
                self._keep(sequence)
                sequence.generation.end(ended)
                self._forget(sequence)
                self._leave(sequence)
        for sequence in in_step:
            if sequence.cancelled:
                self._leave_if_unused(sequence)
        return finished

    def _keep(self, sequence: TokenSequence) -> None:
        """Keeps the prompt's blocks for another worker, if that was asked for."""
        assert sequence.table is not None
        keep_s = sequence.request.keep_s
        if self._transfer is not None and keep_s and sequence.table.chain:
            sequence.generation.kept = self._transfer.keep(sequence.table, keep_s)

    def _cancel(self, sequence: TokenSequence) -> None:
        if self._sequences.get(sequence.request.request_id) is not sequence:
            return
        self._forget(sequence)
        sequence.cancelled = True
        if sequence.table is None:
            self._waiting.cancel(sequence)
            if self._transfer is not None and sequence.request.source is not None:
                self._transfer.decline(sequence.request.source)
        else:
            self._leave_if_unused(sequence)

    def _forget(self, sequence: TokenSequence) -> None:
        del self._sequences[sequence.request.request_id]
        # The generation refers to the sequence as well: a cycle would keep the prompt in memory.
        del sequence.generation

    def _leave_if_unused(self, sequence: TokenSequence) -> None:
        """Frees a cancelled request's blocks once nothing is computed or received in them."""
        arrival = sequence.arrival
        if arrival is not None:
            arrival.limit(0)
        if sequence not in self._in_step and (arrival is None or arrival.ended):
            self._leave(sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        assert sequence.table is not None
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        else:
            self._prefills.remove(sequence)
        self._cache.release(sequence.table)
        sequence.table = None
        self._waiting.notice()
