"""Requests in a simulated engine: how far each has got, and the blocks that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.core.hashing import compute_local_hashes, next_sequence_hash
from app.core.types import SequenceHash
from app.simulation.pool import BlockPool, Slot
from app.simulation.steps import SimRequest


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens `start` to `stop` of a prompt, whose KV came from another worker."""

    start: int
    stop: int


@dataclass(eq=False, slots=True)
class SimSequence:
    """A request, from its arrival on. Of its `num_blocks` in the pool, `chain` are references and
    the rest private.

    blocks: hashes of the full blocks of its prompt, and of those that its answer has filled.
    computed: tokens whose KV it has, while its prompt is computed. due: the value of `emitted` at
    which a block fills or the request ends.
    """

    request: SimRequest
    received: Received | None
    blocks: list[SequenceHash] = field(init=False)
    chain: list[Slot] = field(default_factory=list)
    num_blocks: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    computed: int = 0
    emitted: int = 0
    due: int = 0
    was_admitted: bool = False

    def __post_init__(self) -> None:
        self.blocks = list(self.request.blocks)

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + self.emitted

    def next_due(self, block_size: int) -> int:
        # A token's KV is computed one step after the token itself.
        full_at = (len(self.chain) + 1) * block_size - self.request.prompt_tokens + 1
        return min(full_at, self.request.max_tokens)

    def hash_block(self, block_size: int) -> None:
        """Add the hash of the next block, which its answer has filled."""
        request = self.request
        start = len(self.blocks) * block_size - request.prompt_tokens
        tokens = request.output_tokens(max(start, 0), start + block_size)
        if start < 0:
            tokens = [*request.tail_tokens, *tokens]
        (local,) = compute_local_hashes(tokens, block_size, seed=request.seed)
        parent = self.blocks[-1] if self.blocks else None
        self.blocks.append(next_sequence_hash(parent, local))


@dataclass(slots=True)
class Prefill:
    """Prefill work of one step.

    done: requests whose prompt is complete, and what had been generated when they were preempted.
    begun: requests admitted for the first time, and how many tokens of each were cached.
    """

    tokens: int = 0
    pairs: float = 0.0
    loaded_tokens: int = 0
    done: list[SimSequence] = field(default_factory=list)
    begun: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


class Running:
    """Admitted requests, the oldest first. A request takes the whole batch or gets done, so at most
    one, the youngest, has only a part of its prompt computed."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._all: dict[str, SimSequence] = {}
        self._growing: list[SimSequence] = []
        self.prefilling: SimSequence | None = None
        self.decoding: list[SimSequence] = []
        self.decode_context = 0
        """Tokens of the requests that decode."""

    def __len__(self) -> int:
        return len(self._all)

    def get(self, request_id: str) -> SimSequence | None:
        return self._all.get(request_id)

    @property
    def youngest(self) -> SimSequence:
        return next(reversed(self._all.values()))

    @property
    def decoding_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.decoding]

    def add(self, sequence: SimSequence) -> None:
        self._all[sequence.request.request_id] = self.prefilling = sequence

    def take_blocks(self, sequence: SimSequence, num_tokens: int) -> bool:
        """Whether it has blocks for that many tokens in all, or could be given them."""
        lacking = -(-num_tokens // self._block_size) - sequence.num_blocks
        if lacking > 0:
            if self._pool.acquire((), lacking) is None:
                return False
            sequence.num_blocks += lacking
        return True

    def growing(self) -> list[SimSequence]:
        """Returns requests whose next token needs a block that they lack, the oldest first."""
        return [sequence for sequence in self._growing if self.needs_block(sequence)]

    def note_growing(self, sequences: Iterable[SimSequence]) -> None:
        """Note requests whose last block may have filled in this step, the oldest first."""
        self._growing = [sequence for sequence in sequences if self.needs_block(sequence)]

    def needs_block(self, sequence: SimSequence) -> bool:
        has_tokens = sequence.num_blocks * self._block_size
        is_running = self._all.get(sequence.request.request_id) is sequence
        return is_running and sequence.context_tokens > has_tokens

    def register_computed(self, sequence: SimSequence) -> None:
        """Register the blocks computed so far: requests admitted later in this step reuse them."""
        chain = sequence.chain
        filled = sequence.blocks[len(chain) : sequence.computed // self._block_size]
        chain += self._pool.register(filled, chain[-1] if chain else None)

    def decode(self) -> list[SimSequence]:
        """Add one token to each request that decodes; returns those whose block fills, or that
        end."""
        self.decode_context += len(self.decoding)
        due = []
        for sequence in self.decoding:
            sequence.emitted += 1
            if sequence.emitted == sequence.due:
                due.append(sequence)
        return due

    def quiet_steps(self) -> int:
        """Returns how many of the next steps only decode, end no request and fill no block."""
        if self.prefilling or self._growing or not self.decoding:
            return 0
        return min(sequence.due - sequence.emitted for sequence in self.decoding) - 1

    def skip(self, num_steps: int) -> None:
        """Decode as in so many quiet steps."""
        for sequence in self.decoding:
            sequence.emitted += num_steps
        self.decode_context += num_steps * len(self.decoding)

    def start_decoding(self, done: list[SimSequence]) -> None:
        """Give a token to each request whose prompt is computed."""
        for sequence in done:
            sequence.emitted += 1
            sequence.due = sequence.next_due(self._block_size)
            self.decode_context += sequence.context_tokens
        self.decoding += done

    def leave(self, sequence: SimSequence) -> None:
        """Remove a request, finished or not; its blocks come free."""
        if sequence is self.prefilling:
            self.prefilling = None
        else:
            self.decoding.remove(sequence)
            self.decode_context -= sequence.context_tokens
        del self._all[sequence.request.request_id]
        self._pool.release(sequence.chain, sequence.num_blocks - len(sequence.chain))

    def check(self, held: Iterable[Sequence[Slot]]) -> None:
        """Raises AssertionError if the books do not balance. held: chains kept for others."""
        running = self._all.values()
        num_private = sum(r.num_blocks - len(r.chain) for r in running)
        self._pool.check([*(r.chain for r in running), *held], num_private)
        assert self.decode_context == sum(r.context_tokens for r in self.decoding)
        prefilling = [] if self.prefilling is None else [self.prefilling]
        assert [*map(id, running)] == [*map(id, self.decoding + prefilling)], "not by admission"
