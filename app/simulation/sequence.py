"""A request in a simulated engine: its blocks, how far it has got, and what a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.hashing import compute_local_hashes, next_sequence_hash
from app.core.types import SequenceHash
from app.simulation.steps import SimRequest


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens `start` to `stop` of a prompt, whose KV came from another worker."""

    start: int
    stop: int


@dataclass(eq=False, slots=True)
class SimSequence:
    """A request, from its arrival on. Of its `num_blocks` in the pool, `chain` are references and
    the rest private."""

    request: SimRequest
    received: Received | None
    blocks: list[SequenceHash] = field(init=False)
    """Hashes of the full blocks of its prompt, and of those that its answer has filled."""
    chain: list[SequenceHash] = field(default_factory=list)
    num_blocks: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    computed: int = 0
    """Tokens whose KV it has, while its prompt is computed."""
    emitted: int = 0
    due: int = 0
    """The value of `emitted` at which a block fills or the request ends."""
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
    """The prefill work of one step."""

    tokens: int = 0
    pairs: float = 0.0
    loaded_tokens: int = 0
    done: list[SimSequence] = field(default_factory=list)
    """Those whose prompt is complete, and what had been generated when they were preempted."""
    begun: list[tuple[str, int]] = field(default_factory=list)
    """Requests that it admitted for the first time, and how many tokens of each were cached."""
    preempted: list[str] = field(default_factory=list)
