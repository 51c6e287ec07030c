"""Folders that adapters are loaded from, and which blocks are of another folder than now.

Engines hash the folder, which events do not name. A block counts as being of the folder that is
seen at the first look after its root was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from workers.bridge.events.block import Block


class AdapterFolders:
    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._fresh: list[Block] = []

    def add(self, block: Block, parent: Block | None) -> None:
        """Take in an adapter's block that no event has named before."""
        if parent is not None:
            block.folder, block.hidden = parent.folder, parent.hidden
        if block.folder is None:
            self._fresh.append(block)

    def restore(self, block: Block) -> None:
        """Take in an adapter's block that was known before."""
        loaded = self._folders.get(block.lora_name or "")
        if block.folder is None:
            self._fresh.append(block)
        elif loaded is not None:
            block.hidden = block.folder != loaded

    def look(self, folders: Mapping[str, str], known: Iterable[Block]) -> Iterator[Block]:
        """Yields those of `known` to hide from now on, or to show again."""
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
        self._fresh.clear()
