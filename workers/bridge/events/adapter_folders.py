"""Which blocks are of adapters that have been loaded again from another folder since.

Engines hash the folder, which events do not name. A block is of the one that is seen at the first
look after its root was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol


class AdapterBlock(Protocol):
    lora_name: str | None
    folder: str | None
    """What its adapter was loaded from; None: that is known only after the next look."""
    hidden: bool
    """Its adapter has been loaded from another folder since: no request finds the block."""


class AdapterFolders:
    """By the names of adapters."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._fresh: list[AdapterBlock] = []
        """Stored since the last look."""

    def add(self, block: AdapterBlock, parent: AdapterBlock | None) -> None:
        """A block of an adapter was stored, which no event has named before."""
        if parent is not None:
            block.folder, block.hidden = parent.folder, parent.hidden
        if block.folder is None:
            self._fresh.append(block)

    def restore(self, block: AdapterBlock) -> None:
        """A block of an adapter was known before."""
        loaded = self._folders.get(block.lora_name or "")
        if block.folder is None:
            self._fresh.append(block)
        elif loaded is not None:
            block.hidden = block.folder != loaded

    def look(
        self, folders: Mapping[str, str], known: Iterable[AdapterBlock]
    ) -> Iterator[AdapterBlock]:
        """Those of `known` to hide from now on, or to show again."""
        for block in self._fresh:
            block.folder = folders.get(block.lora_name or "")
        self._fresh.clear()
        if folders == self._folders:
            return
        self._folders = dict(folders)
        for block in known:
            loaded = folders.get(block.lora_name or "")
            known_both = block.folder is not None and loaded is not None
            if known_both and block.hidden == (block.folder == loaded):
                yield block

    def clear(self) -> None:
        """No block is left."""
        self._fresh.clear()
