"""A simulated engine: token-accurate, synchronous, and without a clock of its own.

Paged blocks with prefix reuse, first-in-first-out admission, continuous batching with chunked
prefill. Each step says how long it would have taken; whoever drives the engine waits that long, or
adds the times up. Only the tokens are invented.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.core.cache_stats import HitRate
from app.core.events import CacheEvent
from app.core.hashing import compute_local_hashes, next_sequence_hash
from app.core.types import SequenceHash
from app.core.worker_report import ForwardPassMetrics
from app.simulation.pool import BlockPool
from app.simulation.profiles import Profile
from app.simulation.steps import Finished, PromptTooLargeError, SimRequest, Step


@dataclass(eq=False, slots=True)
class _Running:
    """An admitted request. The pool holds `chain` as references and the rest as private blocks."""

    request: SimRequest
    chain: list[SequenceHash]
    num_blocks: int
    cached_tokens: int
    host_tokens: int
    prefilled: int
    emitted: int = 0
    due: int = 0
    """The value of `emitted` at which a block fills or the request ends."""

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + self.emitted


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens `start` to `stop` of a prompt, whose KV came from another worker."""

    start: int
    stop: int


@dataclass(slots=True)
class _Prefill:
    """The prefill work of one step."""

    tokens: int = 0
    pairs: float = 0.0
    loaded_tokens: int = 0
    done: list[_Running] = field(default_factory=list)
    """Requests whose prompt is complete."""
    begun: list[tuple[str, int]] = field(default_factory=list)
    """Requests that it admitted, and how many tokens of each were cached."""


class SimEngine:
    """Submit requests, then call `step` until it returns None.

    now: seconds, for when blocks were last used. kv_pool_tokens: overrides the profile's.
    host_pool_tokens: 0 means no host tier. on_generated: called with each block that output fills,
    its parent and its tokens; set it at any time.
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
        self.on_generated: (
            Callable[[SequenceHash, SequenceHash | None, Sequence[int]], None] | None
        ) = None
        self.profile = profile
        self.block_size = block_size
        self.pool = BlockPool(pool_tokens // block_size, host_pool_tokens // block_size, now)
        self._waiting: OrderedDict[str, SimRequest] = OrderedDict()
        self._received: dict[str, Received] = {}
        self._held: dict[str, Sequence[SequenceHash]] = {}
        self._running: dict[str, _Running] = {}
        # A request takes the whole batch or gets done, so at most one is left half computed.
        self._prefilling: _Running | None = None
        self._decoding: list[_Running] = []
        self._decode_context = 0
        self._hit_rate = HitRate()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SimRequest, received: Received | None = None) -> None:
        """Queue a request. received: KV for it, which is in the cache once it is admitted.

        It is of no use if what was held before it has been evicted meanwhile.

        Raises as `validate`, and ValueError if its id is in use.
        """
        self.validate(request)
        if request.request_id in self._waiting or request.request_id in self._running:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        self._waiting[request.request_id] = request
        if received is not None:
            self._received[request.request_id] = received

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
        """Keep what the device holds of a chain, for another worker, until `let_go`.

        Returns its leading blocks.
        """
        held = chain[: self.pool.match_device(chain)]
        self.pool.acquire(held, len(held))
        self._held[request_id] = held
        return len(held)

    def let_go(self, request_id: str) -> None:
        """Does nothing if it holds nothing for the request."""
        self.pool.release(self._held.pop(request_id, ()), 0)

    def warm(self, request: SimRequest) -> None:
        """Hold the prompt's blocks as if it had just been answered. Does nothing if requests in
        flight leave no room for them."""
        self.take_in(request.blocks)

    def take_in(self, chain: Sequence[SequenceHash]) -> None:
        """The same of blocks that have come from elsewhere."""
        held = chain[: self.pool.match(chain)]
        if self.pool.acquire(held, len(chain)) is not None:
            self.pool.register(chain[len(held) :], held[-1] if held else None)
            self.pool.release(chain, 0)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its blocks; does nothing if it is unknown or finished."""
        self._waiting.pop(request_id, None)
        self._received.pop(request_id, None)
        running = self._running.get(request_id)
        if running is None:
            return
        if running is self._prefilling:
            self._prefilling = None
        else:
            self._decoding.remove(running)
            self._decode_context -= running.context_tokens
        self._release(running)

    def step(self) -> Step | None:
        """Run one step; None if there is nothing to do."""
        if not self._running and not self._waiting:
            return None
        decode_seqs, decode_context = len(self._decoding), self._decode_context
        prefill = self._prefill(self.profile.max_batch_tokens - decode_seqs)
        due = self._decode()
        self._start_decoding(prefill.done)
        emitted = [running.request.request_id for running in self._decoding]
        due += [running for running in prefill.done if running.due == 1]
        load_s = prefill.loaded_tokens * self.profile.host_s_per_token
        compute_s = self.profile.compute_s(
            prefill.tokens + decode_seqs, prefill.pairs, decode_context
        )
        return Step(
            duration_s=compute_s + load_s,
            load_s=load_s,
            loaded_tokens=prefill.loaded_tokens,
            prefill_tokens=prefill.tokens,
            attention_pairs=prefill.pairs,
            decode_seqs=decode_seqs,
            decode_context_tokens=decode_context,
            emitted=emitted,
            first_tokens=[running.request.request_id for running in prefill.done],
            finished=self._complete(due),
            begun=prefill.begun,
        )

    def quiet_steps(self) -> int:
        """How many of the next steps only decode, if nothing is submitted or cancelled.

        No request ends in them and no block fills: for `skip`, in virtual time.
        """
        if self._waiting or self._prefilling or not self._decoding:
            return 0
        return min(running.due - running.emitted for running in self._decoding) - 1

    def decode_s(self, num_steps: int) -> float:
        """Seconds that the next `num_steps` take, if all of them are quiet."""
        seqs = len(self._decoding)
        context = num_steps * self._decode_context + seqs * num_steps * (num_steps - 1) // 2
        return num_steps * self.profile.compute_s(seqs, 0.0, 0) + self.profile.c_s * context

    def skip(self, num_steps: int) -> Step:
        """Run that many quiet steps at once; returns the average of one of them."""
        seqs = len(self._decoding)
        duration_s = self.decode_s(num_steps) / num_steps
        context = self._decode_context + seqs * (num_steps - 1) // 2
        for running in self._decoding:
            running.emitted += num_steps
        self._decode_context += seqs * num_steps
        return Step(
            duration_s=duration_s,
            load_s=0.0,
            loaded_tokens=0,
            prefill_tokens=0,
            attention_pairs=0.0,
            decode_seqs=seqs,
            decode_context_tokens=context,
            emitted=[running.request.request_id for running in self._decoding],
            first_tokens=[],
            finished=[],
        )

    def take_events(self) -> list[CacheEvent]:
        """Cache changes since the last call, in order. They are kept until taken."""
        return self.pool.take_events()

    def metrics(self) -> ForwardPassMetrics:
        """Blocks reserved for tokens still to come count as active and as used."""
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
        running = self._running.values()
        num_private = sum(r.num_blocks - len(r.chain) for r in running)
        self.pool.check([*(r.chain for r in running), *self._held.values()], num_private)
        assert self._decode_context == sum(r.context_tokens for r in self._decoding)
        prefilling = [] if self._prefilling is None else [self._prefilling]
        assert {id(r) for r in running} == {id(r) for r in self._decoding + prefilling}
        assert len(running) == len(self._decoding) + len(prefilling) <= self.profile.max_num_seqs
        assert self._running.keys().isdisjoint(self._waiting), "running and waiting"

    def _num_blocks(self, request: SimRequest) -> int:
        return -(-(request.prompt_tokens + request.max_tokens) // self.block_size)

    def _prefill(self, budget: int) -> _Prefill:
        """Compute up to `budget` prompt tokens, in order of arrival."""
        step = _Prefill()
        while step.tokens < budget:
            running = self._prefilling or self._admit(step)
            if running is None:
                break
            context, prompt_tokens = running.prefilled, running.request.prompt_tokens
            chunk = min(budget - step.tokens, prompt_tokens - context)
            step.tokens += chunk
            step.pairs += chunk * (context + chunk / 2)
            running.prefilled += chunk
            self._register_prompt(running)
            if running.prefilled == prompt_tokens:
                self._prefilling = None
                step.done.append(running)
            else:
                self._prefilling = running
        return step

    def _admit(self, step: _Prefill) -> _Running | None:
        """Start the head of the queue, if there is room for all that it will need."""
        if not self._waiting or len(self._running) == self.profile.max_num_seqs:
            return None
        request = next(iter(self._waiting.values()))
        num_blocks = self._num_blocks(request)
        # As in vLLM, the last token is always computed: its logits give the first new token.
        usable = request.blocks[: (request.prompt_tokens - 1) // self.block_size]
        prefix = usable[: self.pool.match(usable)]
        onboarded = self.pool.acquire(prefix, num_blocks)
        if onboarded is None:
            assert self._running or self._held, "an empty pool refused a request that fits"
            return None
        host_tokens = onboarded * self.block_size
        step.loaded_tokens += host_tokens
        cached_tokens = len(prefix) * self.block_size
        self._hit_rate.add(cached_tokens, request.prompt_tokens)
        del self._waiting[request.request_id]
        received = self._received.pop(request.request_id, None)
        prefilled = cached_tokens
        if received is not None and received.start <= cached_tokens:
            prefilled = max(cached_tokens, received.stop)
        running = _Running(request, list(prefix), num_blocks, prefilled, host_tokens, prefilled)
        self._running[request.request_id] = running
        step.begun.append((request.request_id, cached_tokens))
        return running

    def _register_prompt(self, running: _Running) -> None:
        """Register the blocks computed so far: requests admitted later in this step reuse them."""
        chain = running.chain
        filled = running.request.blocks[len(chain) : running.prefilled // self.block_size]
        self.pool.register(filled, chain[-1] if chain else None)
        chain += filled

    def _decode(self) -> list[_Running]:
        """One token for each decoding request. Returns those whose block fills, or that end."""
        self._decode_context += len(self._decoding)
        due = []
        for running in self._decoding:
            running.emitted += 1
            if running.emitted == running.due:
                due.append(running)
        return due

    def _start_decoding(self, prefilled: list[_Running]) -> None:
        for running in prefilled:
            running.emitted = 1
            running.due = self._next_due(running)
            self._decode_context += running.context_tokens
        self._decoding += prefilled

    def _next_due(self, running: _Running) -> int:
        # A token's KV is computed one step after the token itself.
        full_at = (len(running.chain) + 1) * self.block_size - running.request.prompt_tokens + 1
        return min(full_at, running.request.max_tokens)

    def _complete(self, due: list[_Running]) -> list[Finished]:
        """Register the blocks that filled, and end the requests that are done."""
        finished = []
        for running in due:
            request = running.request
            computed = running.context_tokens - 1
            if computed == (len(running.chain) + 1) * self.block_size:
                self._register_output(running)
            if running.emitted < request.max_tokens:
                running.due = self._next_due(running)
                continue
            self._decode_context -= running.context_tokens
            self._release(running)
            finished.append(
                Finished(
                    request.request_id,
                    request.prompt_tokens,
                    running.cached_tokens,
                    running.emitted,
                    host_tokens=running.host_tokens,
                )
            )
        if finished:
            self._decoding = [r for r in self._decoding if r.request.request_id in self._running]
        return finished

    def _register_output(self, running: _Running) -> None:
        """Hash and register the block that generated tokens have just filled."""
        request, chain = running.request, running.chain
        start = len(chain) * self.block_size - request.prompt_tokens
        tokens = request.output_tokens(max(start, 0), start + self.block_size)
        if start < 0:
            tokens = [*request.tail_tokens, *tokens]
        parent = chain[-1] if chain else None
        (local,) = compute_local_hashes(tokens, self.block_size, seed=request.seed)
        block = next_sequence_hash(parent, local)
        if self.on_generated is not None:
            self.on_generated(block, parent, tokens)
        self.pool.register((block,), parent)
        chain.append(block)

    def _release(self, running: _Running) -> None:
        del self._running[running.request.request_id]
        self.pool.release(running.chain, running.num_blocks - len(running.chain))
