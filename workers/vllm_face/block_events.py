"""What our engines say of their KV cache, as vLLM would say it: with the tokens of each block.

Our engines know blocks by their hashes alone. So the tokens of a block are kept here, from when a
request brings or generates them until no tier and no request has the block any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from app.core.events import CacheEvent, Cleared, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
GROUP = 0
"""Of layers: our engines have only one."""


@dataclass(slots=True)
class _Block:
    parent: SequenceHash | None
    tokens: bytes | None = None
    """Little-endian u32; None: an earlier life of the engine stored it, and no request has brought
    them since."""
    tiers: tuple[Tier, ...] = ()
    requests: int = 0

    @property
    def is_announced(self) -> bool:
        return self.tokens is not None and bool(self.tiers)


class BlockEvents:
    """Sequence hashes serve as the engine's hashes.

    The device's blocks come with their tokens, those of other tiers by their hashes, as vLLM
    announces offloads. What other tiers hold from an earlier life is announced once a request has
    brought its tokens.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[SequenceHash, _Block] = {}
        self._requests: dict[str, Sequence[SequenceHash]] = {}
        self._left: list[Sequence[SequenceHash]] = []

    @property
    def num_blocks(self) -> int:
        """Of how many blocks the tokens are kept, or awaited."""
        return len(self._blocks)

    def arrived(
        self, request_id: str, blocks: Sequence[SequenceHash], prompt: bytes
    ) -> list[EngineEvent]:
        """A request has come, whose prompt begins with these full blocks. Returns what can be said
        only now."""
        self._requests[request_id] = blocks
        late: list[EngineEvent] = []
        size = 4 * self._block_size
        parent = None
        for at, name in enumerate(blocks):
            block = self._block(name, parent)
            block.requests += 1
            if block.tokens is None:
                block.tokens = prompt[at * size : (at + 1) * size]
                late += self._late(name, block)
            parent = name
        return late

    def generated(
        self, name: SequenceHash, parent: SequenceHash | None, tokens: Sequence[int]
    ) -> None:
        """An engine's own output has filled a block, which it will announce next."""
        block = self._block(name, parent)
        if block.tokens is None:
            block.tokens = np.array(tokens, "<u4").tobytes()

    def left(self, request_id: str) -> None:
        """The request has ended; its last blocks may still be announced, until `settle`."""
        self._left.append(self._requests.pop(request_id))

    def settle(self) -> None:
        """Forget what only requests have that left before."""
        for blocks in self._left:
            for name in blocks:
                block = self._blocks[name]
                block.requests -= 1
                self._drop_unused(name, block)
        self._left.clear()

    def take(self, events: Iterable[CacheEvent]) -> list[EngineEvent]:
        """What our engine's events are in terms of vLLM's."""
        said: list[EngineEvent] = []
        for event in events:
            match event:
                case Stored():
                    said += self._stored(event)
                case Removed():
                    said += self._removed(event)
                case Cleared():
                    self._clear()
                    said.append(AllBlocksCleared())
        return said

    def _block(self, name: SequenceHash, parent: SequenceHash | None) -> _Block:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(parent)
        return block

    def _drop_unused(self, name: SequenceHash, block: _Block) -> None:
        if not block.requests and not block.tiers:
            del self._blocks[name]

    def _stored(self, event: Stored) -> list[EngineEvent]:
        """One event for each stretch of blocks that are new in the tier and told in one way."""
        told: list[tuple[SequenceHash, bool | None]] = []
        parent = event.parent
        for name in event.blocks:
            block = self._block(name, parent)
            whole: bool | None = None
            if event.tier not in block.tiers:
                if block.tokens is not None:
                    whole = event.tier is Tier.DEVICE or not block.tiers
                block.tiers += (event.tier,)
            told.append((name, whole))
            parent = name
        return [
            self._told([name for name, _ in stretch], event.tier, whole=whole)
            for whole, stretch in groupby(told, key=itemgetter(1))
            if whole is not None
        ]

    def _late(self, name: SequenceHash, block: _Block) -> list[EngineEvent]:
        return [
            self._told([name], tier, whole=at == 0 or tier is Tier.DEVICE)
            for at, tier in enumerate(block.tiers)
        ]

    def _told(self, names: list[SequenceHash], tier: Tier, *, whole: bool) -> BlockStored:
        """whole: with parent and tokens, otherwise by the hashes alone."""
        medium = MEDIA[tier]
        if not whole:
            return BlockStored(names, None, [], 0, medium=medium, group_idx=GROUP)
        tokens = b"".join(self._blocks[name].tokens or b"" for name in names)
        return BlockStored(
            names,
            self._blocks[names[0]].parent,
            np.frombuffer(tokens, "<u4").tolist(),
            self._block_size,
            medium=medium,
            extra_keys=[None] * len(names),
            group_idx=GROUP,
            kv_cache_spec_kind="full_attention",
        )

    def _removed(self, event: Removed) -> list[EngineEvent]:
        gone: list[SequenceHash] = []
        for name in event.blocks:
            block = self._blocks.get(name)
            if block is None or event.tier not in block.tiers:
                continue
            if block.is_announced:
                gone.append(name)
            block.tiers = tuple(tier for tier in block.tiers if tier is not event.tier)
            self._drop_unused(name, block)
        return [BlockRemoved(gone, MEDIA[event.tier], GROUP)] if gone else []

    def _clear(self) -> None:
        for name, block in list(self._blocks.items()):
            block.tiers = ()
            self._drop_unused(name, block)
