"""Requests that wait for slots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from app.core.errors import NotEnoughBlocks
from workers.engines.torch.sequence import TokenSequence
from workers.kv.cache import BlockCache
from workers.kv.tables import BlockTable

PREFETCHED_REQUESTS = 2
"""Requests behind the first that waits for which blocks are loaded ahead. With more, they would
evict each other's blocks, and cached blocks that are not in use at the moment."""


class WaitingRequests:
    """Waiting requests, in order of arrival.

    may_begin: can one more request run? begin: called once a request has slots.
    """

    def __init__(
        self,
        cache: BlockCache,
        chunk_tokens: int,
        *,
        may_begin: Callable[[], bool],
        begin: Callable[[TokenSequence, BlockTable], None],
    ) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._may_begin = may_begin
        self._begin = begin
        self._sequences: deque[TokenSequence] = deque()
        self._may_admit = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def add(self, sequence: TokenSequence) -> None:
        self._sequences.append(sequence)
        if len(self) == 1:
            self.notice()

    def put_back(self, sequence: TokenSequence) -> None:
        """Makes a request that has no slots after all the next to get some."""
        self._sequences.appendleft(sequence)
        self.notice()

    def cancel(self, sequence: TokenSequence) -> None:
        self._sequences.remove(sequence)
        if sequence.admitting is not None:
            sequence.admitting.cancel()
        self.notice()

    def notice(self) -> None:
        """Says that there may be room, or that another request is the first."""
        self._may_admit.set()

    def prefetch(self) -> None:
        """Loads blocks ahead for the next requests. Call while the cache runs."""
        for sequence in islice(self._sequences, 1, 1 + PREFETCHED_REQUESTS):
            # Only once: without room for its blocks, they would come and go for ever.
            if not sequence.prefetched:
                sequence.prefetched = True
                self._cache.prefetch(sequence.reusable(self._chunk_tokens))

    async def admit_forever(self) -> None:
        """Admits one by one, in order of arrival, so that large requests are not overtaken."""
        while True:
            self._may_admit.clear()
            if not self._sequences or not self._may_begin():
                await self._may_admit.wait()
                continue
            sequence = self._sequences[0]
            table = await self._admit(sequence)
            if table is not None:
                self._sequences.remove(sequence)
                self._begin(sequence, table)
                self.prefetch()
            elif not sequence.cancelled:
                # Too much is in use: there will be room when a request ends, if not before.
                await self._may_admit.wait()

    async def _admit(self, sequence: TokenSequence) -> BlockTable | None:
        """Returns slots; None: the request was cancelled, or there is no room."""
        admitting = asyncio.create_task(
            self._cache.begin(sequence.reusable(self._chunk_tokens), sequence.num_blocks)
        )
        sequence.admitting = admitting
        try:
            await asyncio.wait([admitting])
        except asyncio.CancelledError:
            admitting.cancel()
            await asyncio.wait([admitting])
            raise
        finally:
            sequence.admitting = None
        if admitting.cancelled():
            return None
        try:
            table = admitting.result()
        except NotEnoughBlocks:
            return None
        if sequence.cancelled:
            self._cache.release(table)
            return None
        return table
