"""Prompts that are to be computed, and the chunk that is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from app.core.cache_stats import HitRate
from app.core.errors import NotEnoughBlocks
from app.core.types import Tier
from workers.engines.torch.admission import AdaptiveAdmission
from workers.engines.torch.sequence import Chunk, TokenSequence
from workers.engines.torch.transfer import BlockTransfer
from workers.kv.arrival import Arrival
from workers.kv.cache import BlockCache


class Prefills:
    """Admitted requests whose prompts are incomplete, in order.

    on_arrival: called with a request whenever more of what it fetches is there, and at the end.
    put_back: called with a request that has no slots any more. num_fetched, num_lost: blocks that
    came from other workers, and that did not come as they should. hit_rate: of the prompts that
    were computed.
    """

    def __init__(
        self,
        cache: BlockCache,
        admission: AdaptiveAdmission,
        transfer: BlockTransfer | None,
        *,
        chunk_tokens: int,
        on_arrival: Callable[[TokenSequence], None],
        put_back: Callable[[TokenSequence], None],
    ) -> None:
        self.num_fetched = self.num_lost = 0
        self.hit_rate = HitRate()
        self._cache = cache
        self._admission = admission
        self._transfer = transfer
        self._chunk_tokens = chunk_tokens
        self._on_arrival = on_arrival
        self._put_back = put_back
        self._sequences: deque[TokenSequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def add(self, sequence: TokenSequence) -> None:
        """Adds an admitted request, and begins to fetch what it lacks and its source keeps."""
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
        """Returns a chunk of the first prompt that need not wait for what is on its way."""
        while True:
            sequence = next(filter(self._may_compute, self._sequences), None)
            if sequence is None:
                return None
            if arriving := sequence.arriving:
                return self._chunk_behind(sequence, arriving)
            if self._take_over(sequence):
                break
        assert sequence.table is not None
        # Earlier requests may have computed the same blocks since it was admitted.
        shared = self._cache.share(sequence.table, sequence.reusable(self._chunk_tokens))
        if shared:
            sequence.block_ids = sequence.table.block_ids
            sequence.cached += (Tier.DEVICE,) * shared
            sequence.prefilled += shared * sequence.block_size
        return self._chunk(sequence, sequence.prefilled)

    def computed(self, chunk: Chunk) -> None:
        """Takes in a computed chunk; a request whose whole prompt is computed leaves."""
        there = self._take_over(chunk.sequence)
        assert there, "a chunk was computed behind blocks that are lost"
        sequence = chunk.sequence
        sequence.prefilled = chunk.stop
        self._register(sequence)
        if chunk.is_last:
            self.hit_rate.add(sequence.num_cached * sequence.block_size, sequence.num_prompt)
            self.remove(sequence)

    def _may_compute(self, sequence: TokenSequence) -> bool:
        """Whether all that is on its way to the request will be there in time: if not, every other
        request waits. What another request fetches need not be computed."""
        if sequence.cancelled:
            return False
        arriving = sequence.arriving
        if not arriving:
            at = sequence.prefilled // sequence.block_size
            needed = sequence.reusable(self._chunk_tokens)[at : at + 1]
            others = (one for one in self._sequences if one is not sequence)
            return not needed or not any(needed[0] in one.fetched for one in others)
        chunk = self._chunk_behind(sequence, arriving)
        within_s = self._admission.compute_s(chunk.stop - chunk.start)
        return all(arrival.remaining_s <= within_s for arrival in arriving)

    def _chunk_behind(self, sequence: TokenSequence, arriving: Sequence[Arrival]) -> Chunk:
        fetched = sequence.arrival.num_blocks if sequence.arrival is not None else 0
        start = sequence.prefilled + fetched * sequence.block_size
        return self._chunk(sequence, start, arriving)

    def _chunk(
        self, sequence: TokenSequence, start: int, arriving: Sequence[Arrival] = ()
    ) -> Chunk:
        stop = min(start + self._chunk_tokens, sequence.num_prompt)
        return Chunk(sequence, start, stop, arriving)

    def _take_over(self, sequence: TokenSequence) -> bool:
        """Lets others find what has arrived; False: blocks were lost, and the request waits for
        slots in which to compute them."""
        table, arrival = sequence.table, sequence.arrival
        assert table is not None
        if table.loads:
            num_matched = table.num_matched
            try:
                self._cache.settle(table)
            except NotEnoughBlocks:
                self.num_lost += 0 if arrival is None else arrival.num_blocks
                sequence.arrival = sequence.table = None
                self._sequences.remove(sequence)
                self._put_back(sequence)
                return False
            table.loads.clear()
            if table.num_matched < num_matched:
                sequence.block_ids, sequence.cached = table.block_ids, tuple(table.tiers)
                sequence.prefilled = table.num_matched * sequence.block_size
                if arrival is not None:  # there is a gap before what it fetched
                    arrival.limit(0)
        if arrival is not None:
            self._take_fetched(sequence, arrival)
        return True

    def _take_fetched(self, sequence: TokenSequence, arrival: Arrival) -> None:
        sequence.arrival = None
        num_tokens = self._whole(arrival.num_good * sequence.block_size)
        sequence.num_fetched = num_tokens // sequence.block_size
        self.num_fetched += sequence.num_fetched
        self.num_lost += arrival.num_blocks - sequence.num_fetched
        sequence.prefilled += num_tokens
        self._register(sequence)
        if arrival.num_good == arrival.num_blocks:
            self._admission.learner.observe_transfer(num_tokens, arrival.seconds)

    def _register(self, sequence: TokenSequence) -> None:
        """Offers the whole chunks that are there for reuse.

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
        """Returns how many of the first `num_tokens` are in whole chunks."""
        return num_tokens - num_tokens % self._chunk_tokens
