"""A simulated engine: token-accurate, synchronous, and without a clock of its own.

Paged blocks with prefix reuse, continuous batching with chunked prefill, and vLLM's scheduling: a
request is admitted, in order of arrival, once there is room for its prompt, and takes a block
whenever its answer fills one. If none is free, the youngest is preempted: it frees its blocks, and
is admitted again before any other, to compute its prompt and what it had generated. Each step says
how long it would have taken; whoever drives the engine waits that long, or adds the times up. Only
the tokens are invented.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from app.core.cache_stats import HitRate
from app.core.events import CacheEvent
from app.core.types import SequenceHash
from app.core.worker_report import ForwardPassMetrics
from app.simulation.pool import BlockPool, Slot
from app.simulation.profiles import Profile
from app.simulation.running import Prefill, Received, Running, SimSequence
from app.simulation.steps import EngineStep, Finished, PromptTooLargeError, SimRequest


class SimEngine:
    """Engine to which requests are submitted, and whose `step` runs until it returns None.

    now: seconds, for when blocks were last used. kv_pool_tokens: overrides the profile's.
    host_pool_tokens: 0 means no host tier.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        block_size: int,
        now: Callable[[], float],
        kv_pool_tokens: int | None = None,
        host_pool_tokens: int = 0,
    ) -> None:
        pool_tokens = profile.kv_pool_tokens if kv_pool_tokens is None else kv_pool_tokens
        self.profile = profile
        self.block_size = block_size
        self.pool = BlockPool(pool_tokens // block_size, host_pool_tokens // block_size, now)
        self.num_preemptions = 0
        self._waiting: OrderedDict[str, SimSequence] = OrderedDict()
        self._held: dict[str, Sequence[Slot]] = {}
        self._running = Running(self.pool, block_size)
        self._hit_rate = HitRate()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SimRequest, received: Received | None = None) -> None:
        """Queue a request. received: KV for it, which is in the cache once it is admitted, and of
        no use if what was held before it has been evicted meanwhile.

        Raises as `validate`, and ValueError if its id is in use.
        """
        self.validate(request)
        if request.request_id in self._waiting or self._running.get(request.request_id):
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        self._waiting[request.request_id] = SimSequence(request, received)

    def validate(self, request: SimRequest) -> None:
        """Raises PromptTooLargeError if it needs more than the whole pool, and ValueError if it has
        no prompt or output, or if its blocks do not fit its length."""
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError(
                f"prompt_tokens {request.prompt_tokens}, max_tokens {request.max_tokens}: "
                "both must be at least 1"
            )
        hashed = len(request.blocks) * self.block_size
        if hashed + len(request.tail_tokens) != request.prompt_tokens:
            raise ValueError(
                f"{len(request.blocks)} blocks of {self.block_size} and {len(request.tail_tokens)} "
                f"tail tokens are not {request.prompt_tokens} prompt tokens"
            )
        if self._num_blocks(request) > self.pool.num_blocks:
            raise PromptTooLargeError(
                request.prompt_tokens,
                request.max_tokens,
                "the KV pool holds",
                self.pool.num_blocks * self.block_size,
            )

    def hold(self, request_id: str, chain: Sequence[SequenceHash]) -> int:
        """Keep what the device holds of a chain, for another worker, until `let_go`; returns its
        leading blocks."""
        held = chain[: self.pool.match_device(chain)]
        acquired = self.pool.acquire(held, len(held))
        assert acquired is not None, "no more is held than the device has"
        self._held[request_id] = acquired.slots
        return len(held)

    def let_go(self, request_id: str) -> None:
        """Let go of what is held for the request, if anything."""
        self.pool.release(self._held.pop(request_id, ()), 0)

    def warm(self, request: SimRequest) -> None:
        """Hold the prompt's blocks as if it had just been answered, unless requests in flight leave
        no room."""
        self.take_in(request.blocks)

    def take_in(self, chain: Sequence[SequenceHash]) -> None:
        """Hold blocks that have come from elsewhere, unless requests in flight leave no room."""
        held = chain[: self.pool.match(chain)]
        acquired = self.pool.acquire(held, len(chain))
        if acquired is not None:
            slots = acquired.slots
            slots += self.pool.register(chain[len(held) :], slots[-1] if slots else None)
            self.pool.release(slots, 0)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its blocks; does nothing if it is unknown or finished."""
        self._waiting.pop(request_id, None)
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._running.leave(sequence)

    def step(self) -> EngineStep | None:
        """Run one step; returns None if there is nothing to do."""
        if not len(self._running) and not self._waiting:
            return None
        running = self._running
        preempted = self._grow()
        decode_seqs, decode_context = len(running.decoding), running.decode_context
        budget = self.profile.max_batch_tokens - decode_seqs
        prefill = self._prefill(budget, admits=not preempted)
        due = running.decode()
        running.start_decoding(prefill.done)
        emitted = running.decoding_ids
        finished = self._complete(due + [s for s in prefill.done if s.due == s.emitted])
        running.note_growing([*due, *prefill.done])
        load_s = prefill.loaded_tokens * self.profile.host_s_per_token
        num_tokens = prefill.tokens + decode_seqs
        compute_s = self.profile.compute_s(num_tokens, prefill.pairs, decode_context, decode_seqs)
        return EngineStep(
            duration_s=compute_s + load_s,
            load_s=load_s,
            loaded_tokens=prefill.loaded_tokens,
            prefill_tokens=prefill.tokens,
            attention_pairs=prefill.pairs,
            decode_seqs=decode_seqs,
            decode_context_tokens=decode_context,
            emitted=emitted,
            first_tokens=[s.request.request_id for s in prefill.done if s.emitted == 1],
            finished=finished,
            begun=prefill.begun,
            preempted=preempted + prefill.preempted,
        )

    def quiet_steps(self) -> int:
        """Returns how many of the next steps only decode, end no request and fill no block, if
        nothing is submitted or cancelled: for `skip`, in virtual time."""
        return 0 if self._waiting else self._running.quiet_steps()

    def decode_s(self, num_steps: int) -> float:
        """Returns seconds that the next `num_steps` take, if all of them are quiet."""
        seqs = len(self._running.decoding)
        context = num_steps * self._running.decode_context + seqs * num_steps * (num_steps - 1) // 2
        return num_steps * self.profile.compute_s(seqs, 0.0, 0, seqs) + self.profile.c_s * context

    def skip(self, num_steps: int) -> EngineStep:
        """Run that many quiet steps at once; returns the average of one of them."""
        seqs = len(self._running.decoding)
        duration_s = self.decode_s(num_steps) / num_steps
        context = self._running.decode_context + seqs * (num_steps - 1) // 2
        self._running.skip(num_steps)
        return EngineStep(
            duration_s=duration_s,
            load_s=0.0,
            loaded_tokens=0,
            prefill_tokens=0,
            attention_pairs=0.0,
            decode_seqs=seqs,
            decode_context_tokens=context,
            emitted=self._running.decoding_ids,
            first_tokens=[],
            finished=[],
        )

    def take_events(self) -> list[CacheEvent]:
        """Returns cache changes since the last call, in order. They are kept until taken."""
        return self.pool.take_events()

    def metrics(self) -> ForwardPassMetrics:
        return ForwardPassMetrics(
            request_active_slots=len(self._running),
            request_total_slots=self.profile.max_num_seqs,
            kv_active_blocks=self.pool.num_used,
            kv_total_blocks=self.pool.num_blocks,
            num_requests_waiting=len(self._waiting),
            gpu_cache_usage_perc=self.pool.num_used / self.pool.num_blocks,
            gpu_prefix_cache_hit_rate=self._hit_rate.value,
            kv_idle_before_evict_s=self.pool.idle_before_evict_s,
        )

    def check(self) -> None:
        """Raises AssertionError if the books do not balance."""
        self._running.check(self._held.values())
        assert len(self._running) <= self.profile.max_num_seqs
        assert not any(map(self._running.get, self._waiting)), "running and waiting"

    def _num_blocks(self, request: SimRequest) -> int:
        return -(-(request.prompt_tokens + request.max_tokens) // self.block_size)

    def _grow(self) -> list[str]:
        """Take a block for each token of this step that begins one, the oldest request first.

        Where none is left, the youngest requests are preempted. Returns which.
        """
        preempted: list[str] = []
        for sequence in self._running.growing():
            while self._running.needs_block(sequence):
                if not self._running.take_blocks(sequence, sequence.context_tokens):
                    preempted.append(self._preempt_youngest())
        return preempted

    def _preempt_youngest(self) -> str:
        sequence = self._running.youngest
        while len(sequence.blocks) < sequence.context_tokens // self.block_size:
            sequence.hash_block(self.block_size)
        self._running.leave(sequence)
        sequence.chain, sequence.num_blocks, sequence.computed = [], 0, 0
        request_id = sequence.request.request_id
        self._waiting[request_id] = sequence
        self._waiting.move_to_end(request_id, last=False)
        self.num_preemptions += 1
        return request_id

    def _prefill(self, budget: int, *, admits: bool) -> Prefill:
        """Compute up to `budget` tokens of prompts, in order of arrival."""
        step = Prefill()
        while step.tokens < budget:
            sequence = self._running.prefilling or (self._admit(step, budget) if admits else None)
            if sequence is None:
                break
            context, target = sequence.computed, sequence.context_tokens
            chunk = min(budget - step.tokens, target - context)
            if not self._running.take_blocks(sequence, context + chunk):
                # Others took what was free when it was admitted, and it is the youngest.
                step.preempted.append(self._preempt_youngest())
                break
            step.tokens += chunk
            step.pairs += chunk * (context + chunk / 2)
            sequence.computed += chunk
            self._running.register_computed(sequence)
            if sequence.computed == target:
                self._running.prefilling = None
                step.done.append(sequence)
        return step

    def _admit(self, step: Prefill, budget: int) -> SimSequence | None:
        """Start the head of the queue, if there is room for its prompt."""
        if not self._waiting or len(self._running) == self.profile.max_num_seqs:
            return None
        sequence = next(iter(self._waiting.values()))
        request, context = sequence.request, sequence.context_tokens
        num_blocks = -(-context // self.block_size)
        # As in vLLM, the last token is always computed: its logits give the next one.
        usable = sequence.blocks[: (context - 1) // self.block_size]
        prefix = usable[: self.pool.match(usable)]
        if not self.pool.has_room(prefix, num_blocks):
            assert len(self._running) or self._held, "an empty pool refused a request that fits"
            return None
        sequence.computed = len(prefix) * self.block_size
        # Those of the first chunk alone: it may be preempted before the next.
        first = min(context, sequence.computed + budget - step.tokens)
        num_blocks = -(-first // self.block_size)
        acquired = self.pool.acquire(prefix, num_blocks)
        assert acquired is not None
        sequence.chain, sequence.num_blocks = acquired.slots, num_blocks
        host_tokens = acquired.onboarded * self.block_size
        step.loaded_tokens += host_tokens
        del self._waiting[request.request_id]
        self._running.add(sequence)
        if not sequence.was_admitted:
            self._begin(sequence, host_tokens, step)
        return sequence

    def _begin(self, sequence: SimSequence, host_tokens: int, step: Prefill) -> None:
        """Note the first admission of a request, which its figures are of."""
        request, cached_tokens = sequence.request, sequence.computed
        sequence.was_admitted = True
        sequence.cached_tokens, sequence.host_tokens = cached_tokens, host_tokens
        self._hit_rate.add(cached_tokens, request.prompt_tokens)
        received = sequence.received
        if received is not None and received.start <= cached_tokens:
            sequence.computed = sequence.cached_tokens = max(cached_tokens, received.stop)
        step.begun.append((request.request_id, cached_tokens))

    def _complete(self, due: list[SimSequence]) -> list[Finished]:
        """Register the blocks that filled, and end the requests that are done."""
        finished = []
        for sequence in due:
            request = sequence.request
            if sequence.context_tokens - 1 == (len(sequence.chain) + 1) * self.block_size:
                self._register_output(sequence)
            if sequence.emitted < request.max_tokens:
                sequence.due = sequence.next_due(self.block_size)
                continue
            self._running.leave(sequence)
            finished.append(
                Finished(
                    request.request_id,
                    request.prompt_tokens,
                    sequence.cached_tokens,
                    sequence.emitted,
                    host_tokens=sequence.host_tokens,
                )
            )
        return finished

    def _register_output(self, sequence: SimSequence) -> None:
        chain = sequence.chain
        if len(sequence.blocks) == len(chain):
            sequence.hash_block(self.block_size)
        block = sequence.blocks[len(chain)]
        chain += self.pool.register((block,), chain[-1] if chain else None)
