"""For engines you write, as none here calls it: make all KV unusable at once, as by new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from app.core.types import SequenceHash, Tier
from workers.kv.manager import BlockManager
from workers.kv.tables import BlockTable


class FencingBlockManager(BlockManager):
    """A block manager that can be made to forget all blocks, even while requests use them."""

    def __init__(
        self, num_slots: Mapping[Tier, int], *, now: Callable[[], float], **options: Any
    ) -> None:
        super().__init__(num_slots, now=now, **options)
        self._fenced: set[BlockTable] = set()
        """Tables from before the last fence: what they fill is not offered to others."""

    def fence(self) -> None:
        """From here on, no block that is there, being computed or being copied can be found."""
        self._fenced |= self._tables
        self._forget_all()

    def register(self, table: BlockTable, blocks: Iterable[SequenceHash]) -> None:
        if table not in self._fenced:
            super().register(table, blocks)

    def share(self, table: BlockTable, prefix: Sequence[SequenceHash]) -> int:
        return 0 if table in self._fenced else super().share(table, prefix)

    def release(self, table: BlockTable) -> None:
        self._fenced.discard(table)
        super().release(table)
