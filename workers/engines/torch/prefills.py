"""Prompts that are to be computed: which chunk is next, and what need not be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from app.core.types import Tier
from workers.engines.torch.admission import AdaptiveAdmission
from workers.engines.torch.sequence import Chunk, TokenSequence
from workers.engines.torch.transfer import BlockTransfer
from workers.kv.cache import BlockCache
from workers.kv.transfer.receiver import Arrival


class Prefills:
    """Admitted requests whose prompts are incomplete, in order.

    on_arrival: called with a request whenever more of what it fetches is there, and at the end.
    num_fetched, num_lost: blocks that came from other workers, and that did not come as they
    should.
    """

    def __init__(
        self,
        cache: BlockCache,
        admission: AdaptiveAdmission,
        transfer: BlockTransfer | None,
        *,
        chunk_tokens: int,
        on_arrival: Callable[[TokenSequence], None],
    ) -> None:
        self.num_fetched = self.num_lost = 0
        self._cache = cache
        self._admission = admission
        self._transfer = transfer
        self._chunk_tokens = chunk_tokens
        self._on_arrival = on_arrival
        self._sequences: deque[TokenSequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def add(self, sequence: TokenSequence) -> None:
        """A request that was admitted; begins to fetch what it lacks and its source keeps."""
        source, held = sequence.request.source, len(sequence.cached)
        if source is not None and self._transfer is not None:
            kept = self._whole(source.num_tokens) // sequence.block_size
            lacking = sequence.reusable(self._chunk_tokens)[held:kept]
            if lacking:
                sequence.arrival = self._transfer.fetch(
                    source,
                    lacking,
                    sequence.block_ids[held : held + len(lacking)],
                    lambda: self._on_arrival(sequence),
                )
            else:
                self._transfer.decline(source)
        self._sequences.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        self._sequences.remove(sequence)

    def next_chunk(self) -> Chunk | None:
        """Of the first prompt that need not wait for what it fetches."""
        sequence = next(filter(self._may_compute, self._sequences), None)
        if sequence is None:
            return None
        assert sequence.table is not None
        arrival = sequence.arrival
        if arrival is not None and not arrival.is_settled:
            return self._chunk_behind(sequence, arrival)
        if arrival is not None:
            self._take_over(sequence)
        # Earlier requests may have computed the same blocks since it was admitted.
        shared = self._cache.share(sequence.table, sequence.reusable(self._chunk_tokens))
        if shared:
            sequence.block_ids = sequence.table.block_ids
            sequence.cached += (Tier.DEVICE,) * shared
            sequence.prefilled += shared * sequence.block_size
        return self._chunk(sequence, sequence.prefilled)

    def computed(self, chunk: Chunk) -> None:
        if chunk.arrival is not None:
            self._take_over(chunk.sequence)
        chunk.sequence.prefilled = chunk.stop
        self._register(chunk.sequence)

    def _may_compute(self, sequence: TokenSequence) -> bool:
        """Will all that it fetches be there in time? If it is not, every other request waits. And
        what another one fetches need not be computed."""
        arrival = sequence.arrival
        if arrival is None:
            at = sequence.prefilled // sequence.block_size
            needed = sequence.reusable(self._chunk_tokens)[at : at + 1]
            return not needed or not any(needed[0] in one.fetched for one in self._sequences)
        chunk = self._chunk_behind(sequence, arrival)
        return arrival.remaining_s <= self._admission.compute_s(chunk.stop - chunk.start)

    def _chunk_behind(self, sequence: TokenSequence, arrival: Arrival) -> Chunk:
        start = sequence.prefilled + arrival.num_blocks * sequence.block_size
        return self._chunk(sequence, start, arrival)

    def _chunk(self, sequence: TokenSequence, start: int, arrival: Arrival | None = None) -> Chunk:
        stop = min(start + self._chunk_tokens, sequence.num_prompt)
        return Chunk(sequence, start, stop, arrival)

    def _take_over(self, sequence: TokenSequence) -> None:
        """What has arrived is the request's, and can be found by others."""
        arrival, sequence.arrival = sequence.arrival, None
        assert arrival is not None
        assert arrival.is_settled
        num_tokens = self._whole(arrival.num_good * sequence.block_size)
        sequence.num_fetched = num_tokens // sequence.block_size
        self.num_fetched += sequence.num_fetched
        self.num_lost += arrival.num_blocks - sequence.num_fetched
        sequence.prefilled += num_tokens
        self._register(sequence)
        if arrival.num_good == arrival.num_blocks:
            self._admission.observe_transfer(num_tokens, arrival.seconds)

    def _register(self, sequence: TokenSequence) -> None:
        """Offer the whole chunks that are there for reuse.

        Blocks of a chunk that the prompt's end cut short are not offered: a forward pass of another
        length may give them other bits, and a request that computes the whole chunk would get them
        in place of its own.
        """
        table = sequence.table
        assert table is not None
        whole = self._whole(sequence.prefilled) // sequence.block_size
        self._cache.register(table, sequence.blocks[len(table.chain) : whole])
        sequence.block_ids = table.block_ids

    def _whole(self, num_tokens: int) -> int:
        """The tokens of whole chunks among the first `num_tokens`."""
        return num_tokens - num_tokens % self._chunk_tokens
