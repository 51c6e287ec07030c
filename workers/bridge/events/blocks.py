"""Translates an engine's own KV cache events into ours.

vLLM and SGLang identify blocks by hashes of their own, with block sizes of their own. Neither means
anything to another engine, so the chain is hashed again from the token ids that the events carry.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import repeat
from typing import NamedTuple

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from app.core.events import CacheEvent, Cleared, Ends, Removed, Stored
from app.core.hashing import compute_local_hashes, next_sequence_hash, seed_for
from app.core.types import SequenceHash, Tier
from workers.bridge.events.adapter_folders import AdapterFolders
from workers.bridge.events.block import Block, Copies, Place, with_copy, without_copy
from workers.bridge.events.events import (
    PREFIX_KINDS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    is_medium_known,
    items_of,
    key_of,
    salt_in,
    tier_of,
    tokens_of,
    unnamed_adapter,
)
from workers.bridge.events.pending import PendingEvents
from workers.bridge.events.windows import Chain, Windows

REMEMBERED = 16_384
"""Blocks that are still known though no tier holds them: an offload may be announced after the
block has left the device."""


class HeldBlocks(NamedTuple):
    """Snapshot of EngineBlocks. group: the one that counts. rows: each block that is held, as it
    was, by its name at the engine."""

    group: int | None
    chunk_blocks: int
    rows: list[tuple[BlockHash, Block]]


class EngineBlocks:
    """Blocks that one engine holds, by its own hashes.

    block_size: tokens per block of the index, a divisor of the engine's block size. now: monotonic
    seconds. joined_late: the engine held blocks before the first event. A block that waits in vain
    for its parent is then taken to follow one of those, and left out until it is stored again.

    announces_copies: a block is held until it has been removed as often as it was stored. vLLM
    stores each copy of a block and removes each, unless a request's kv_cache_report_mode is `full`.
    If False, one removal from a tier suffices: SGLang has no copies, but stores some blocks again.
    recomputed_blocks, lookahead_blocks: as the worker registers them.
    """

    def __init__(
        self,
        block_size: int,
        now: Callable[[], float] = time.monotonic,
        *,
        joined_late: bool = False,
        announces_copies: bool = True,
        recomputed_blocks: int = 0,
        lookahead_blocks: int = 0,
    ) -> None:
        self._block_size = block_size
        self._lookahead_blocks = lookahead_blocks
        self._announces_copies = announces_copies
        self._known: dict[BlockHash, Block] = {}
        self._unreferenced: OrderedDict[BlockHash, None] = OrderedDict()
        self._copies = Copies()
        self._group: int | None = None
        """Group that counts, once an event has named a kind."""
        self._largest = 0
        """Tokens in the largest block of that group that the device has stored."""
        self._windows = Windows(
            self._chain_of,
            copies=announces_copies,
            block_size=block_size,
            recomputed=recomputed_blocks,
        )
        self._pending = PendingEvents(now, joined_late=joined_late)
        self._adapters = AdapterFolders()
        self.chunk_blocks = 1
        """Blocks of the index that the engine reads from other tiers than its device at once, or
        none of them. vLLM announces each such chunk by an event of its own, without extra keys."""
        self.num_unknown_media = 0
        """Events that were left out, as they name a medium that is not known."""

    @property
    def num_held(self) -> int:
        """Returns the number of blocks of the index on the engine's device."""
        return self._copies.num_in(Tier.DEVICE)

    def held(self) -> Iterator[Stored]:
        """Yields what the engine holds, as if stored just now."""
        for block in self._known.values():
            for tier in Tier:
                if block.lies_in(tier) and not block.hidden:
                    yield Stored(block.blocks, block.parent, tier)

    def snapshot(self) -> HeldBlocks | None:
        """Returns what is known, for `restore`; None while events wait, which would be lost, and of
        an engine with windows."""
        if self._pending.num_waiting or self._windows.are_any:
            return None
        rows = [(name, copy(block)) for name, block in self._known.items() if block.references]
        return HeldBlocks(self._group, self.chunk_blocks, rows)

    def restore(self, snapshot: HeldBlocks) -> None:
        """Takes over what an EngineBlocks with the same arguments knew; this one knows nothing
        yet."""
        self._group, self.chunk_blocks = snapshot.group, snapshot.chunk_blocks
        for name, block in snapshot.rows:
            self._known[name] = block
            if block.lora_name is not None:
                self._adapters.restore(block)
            for tier in Tier:
                if block.lies_in(tier):
                    self._copies.add(block, tier)

    def load_adapters(self, folders: Mapping[str, str]) -> list[CacheEvent]:
        """Returns the changes to show now that the engine says that it has these adapters. folders:
        by name, the folder that each was loaded from."""
        changes: list[CacheEvent] = []
        for block in self._adapters.look(folders, self._known.values()):
            changes += self._turn(block)
        return changes

    def _turn(self, block: Block) -> Iterator[CacheEvent]:
        tiers = [tier for tier in Tier if block.lies_in(tier)]
        if not block.hidden:
            gone = {tier: tuple(self._copies.take_away(block, tier)) for tier in tiers}
            yield from (Removed(blocks, tier) for tier, blocks in gone.items() if blocks)
        block.hidden = not block.hidden
        if not block.hidden:
            for tier in tiers:
                self._copies.add(block, tier)
                yield Stored(block.blocks, block.parent, tier)

    @property
    def num_left_out(self) -> int:
        return self._pending.num_left_out

    @property
    def is_blind(self) -> bool:
        """Whether events were missed: some have waited over MAX_WAIT_S for a parent that has not
        come, or more than MAX_WAITING would have to wait. Only a new incarnation is correct again,
        with a new EngineBlocks and what the engine replays or announces from then on. Never, if it
        joined late: nothing that could be done would bring those blocks back. Nor because of an
        offload without tokens: an engine may load a block that it has not stored since it started,
        and announce its tokens later or never."""
        return self._pending.is_blind

    def take(self, event: EngineEvent) -> list[CacheEvent]:
        """Returns what `event` means for the index. Raises InvalidRequest, having changed nothing;
        treat that like a missed event."""
        changes: list[CacheEvent] = []
        # What waited for a block comes right after it, and what waited for that right after that.
        # Nothing that may wait is refused later.
        levels: list[Iterator[EngineEvent]] = [iter((event,))]
        while levels:
            following = next(levels[-1], None)
            if following is None:
                levels.pop()
                continue
            meant, stored = self._take_one(following)
            changes += meant
            levels.append(self._pending.released(stored))
        return changes

    def _take_one(self, event: EngineEvent) -> tuple[list[CacheEvent], Sequence[BlockHash]]:
        """Returns what `event` alone means, and the blocks that other events may be waiting for."""
        if isinstance(event, AllBlocksCleared):
            return [Cleared(), *self._clear()], ()
        tier = tier_of(event)
        if tier is None:
            self.num_unknown_media += not is_medium_known(event)
            return [], ()
        if isinstance(event, BlockRemoved):
            return self._take_removed(event, tier), ()
        if not self._counts(event):
            return self._take_window(event, tier), ()
        if not event.token_ids:
            return [*self._store_announced(event, tier), *self._store_in_window(event, tier)], ()
        if tier is Tier.DEVICE and event.kv_cache_spec_kind and event.block_size < self._largest:
            # vLLM also announces the part of a block at the end of a prompt, after another part
            # that it does not announce.
            return [], ()
        changes, stored = self._store(event, tier)
        if tier is Tier.DEVICE:
            self._largest = max(self._largest, event.block_size)
        if stored:
            changes += self._look_ahead(event)
            changes += self._store_in_window(event, tier)
            changes += self._windows.locate(stored)
        return changes, stored

    def _take_removed(self, event: BlockRemoved, tier: Tier) -> list[CacheEvent]:
        changes: list[CacheEvent] = []
        is_of_window = self._windows.concern(event.group_idx)
        if is_of_window:
            changes += self._windows.remove(event, tier)
        if self._counts(event) and (event.group_idx == self._group or not is_of_window):
            changes += self._remove(event, tier)
        return changes

    def _take_window(self, event: BlockStored, tier: Tier) -> list[CacheEvent]:
        changes: list[CacheEvent] = []
        # Blocks of offloads may be larger than the group's.
        if (
            event.kv_cache_spec_kind is not None
            and tier is Tier.DEVICE
            and event.block_size > 0
            and not self._windows.concern(event.group_idx)
        ):
            changes += self._windows.learn(event)
        return changes + self._store_in_window(event, tier)

    def _store_in_window(self, event: BlockStored, tier: Tier) -> list[CacheEvent]:
        if not self._windows.concern(event.group_idx):
            return []
        return [*self._windows.store(event, tier)]

    def _look_ahead(self, event: BlockStored) -> list[CacheEvent]:
        """Says how far the engine looks ahead, if it does, or was thought to. Two blocks of such an
        engine may be one of the index, and only one of them lead to what follows: the engine's
        chain has to be whole."""
        group = event.group_idx
        if not (event.looks_ahead or self._lookahead_blocks) or self._windows.concern(group):
            return []
        tokens = max(map(len, event.lookahead_token_ids or ((0,),))) if event.looks_ahead else 0
        return [*self._windows.learn(event, -(-tokens // self._block_size))]

    def _chain_of(self, name: BlockHash) -> Chain | None:
        block = self._known.get(name)
        return None if block is None else (block.blocks, block.parent)

    def _clear(self) -> list[Ends]:
        self._known.clear()
        self._adapters.clear()
        self._unreferenced.clear()
        self._copies.clear()
        self._pending.clear()
        return self._windows.clear()

    def _counts(self, event: BlockStored | BlockRemoved) -> bool:
        """Whether the event's group stands for all: the first one with attention over the whole
        prefix. Groups use the same hashes, even where their blocks differ in size. Offloads without
        tokens do not name the kind."""
        group = event.group_idx
        kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else None
        if kind is not None and kind.lower() not in PREFIX_KINDS:
            return False
        if kind is not None and self._group is None:
            self._group = group
        return group is None or self._group is None or group == self._group

    def _store(
        self, event: BlockStored, tier: Tier
    ) -> tuple[list[CacheEvent], Sequence[BlockHash]]:
        hashes = [key_of(h) for h in event.block_hashes]
        tokens = tokens_of(event, self._block_size)
        parent: Block | None = None
        if event.parent_block_hash is not None:
            wanted = key_of(event.parent_block_hash)
            parent = self._known.get(wanted)
            if parent is None:
                self._pending.wait(wanted, replace(event, block_hashes=hashes))
                return [], ()
        stored = self._blocks_of(event, hashes, tokens, parent)
        chain = tuple(own for block in stored for own in block.blocks)
        if tier is not Tier.DEVICE and self._announces_copies and event.extra_keys is None:
            self.chunk_blocks = max(self.chunk_blocks, len(chain))
        changes: list[CacheEvent] = []
        if not stored[0].hidden:
            changes.append(Stored(chain, stored[0].parent, tier))
        for name, block in zip(hashes, stored, strict=True):
            before = self._known.get(name)
            if before is None or before.blocks != block.blocks:
                changes += self._forget(name)
                self._known[name] = before = block
            self._refer(name, before, tier, event.group_idx)
        return changes, hashes

    def _blocks_of(
        self, event: BlockStored, hashes: Sequence[BlockHash], tokens: bytes, parent: Block | None
    ) -> list[Block]:
        """Returns each of the event's blocks in the index: as known, or made of its tokens."""
        last = parent.blocks[-1] if parent else None
        size = len(tokens) // len(hashes)
        digests = [xxh3_64_intdigest(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        # An event without extra keys does not say what a known block holds besides tokens: vLLM's
        # offloads name neither images nor, at the root, the salt.
        known = [None if event.extra_keys else self._known.get(name) for name in hashes]
        kin = parent
        if kin is None and known[0] is not None and known[0].is_of(digests[0], None):
            kin = known[0]
        lora_name = event.lora_name or (kin.lora_name if kin else unnamed_adapter(event))
        cache_salt = event.cache_salt or (kin.cache_salt if kin else salt_in(event))
        per_block = event.block_size // self._block_size
        local = compute_local_hashes(
            tokens,
            self._block_size,
            seed=seed_for(lora_name, cache_salt),
            mm_hashes=items_of(event, lora_name, cache_salt, per_block),
        )
        stored: list[Block] = []
        for at, block in enumerate(known):
            if (
                block is None
                or not block.is_of(digests[at], last)
                or (block.lora_name, block.cache_salt) != (lora_name, cache_salt)
            ):
                own: list[SequenceHash] = []
                above = last
                for one in local[at * per_block : (at + 1) * per_block]:
                    above = next_sequence_hash(above, one)
                    own.append(above)
                block = Block(tuple(own), last, digests[at], lora_name, cache_salt)
                if lora_name is not None:
                    self._adapters.add(block, stored[-1] if stored else parent)
            stored.append(block)
            last = block.blocks[-1]
        return stored

    def _store_announced(self, event: BlockStored, tier: Tier) -> list[CacheEvent]:
        changes: list[CacheEvent] = []
        for name in map(key_of, event.block_hashes):
            known = self._known.get(name)
            if known is None:
                self._pending.wait_to_store(name, event)
            else:
                if not known.hidden:
                    changes.append(Stored(known.blocks, known.parent, tier))
                self._refer(name, known, tier, event.group_idx)
        return changes

    def _remove(self, event: BlockRemoved, tier: Tier) -> list[CacheEvent]:
        gone: list[SequenceHash] = []
        left: Iterable[int | None] = event.remaining_copy_counts or repeat(None)
        for name, copies in zip(map(key_of, event.block_hashes), left, strict=False):
            known = self._known.get(name)
            if known is not None:
                gone += self._unrefer(name, known, (tier, event.group_idx), copies)
            else:
                # It may have been stored, but not be understood yet.
                self._pending.wait_to_remove(name, event)
        return [Removed(tuple(gone), tier)] if gone else []

    def _refer(self, name: BlockHash, block: Block, tier: Tier, group: int | None) -> None:
        if not block.lies_in(tier):
            self._copies.add(block, tier)
        block.references = with_copy(block.references, (tier, group), copies=self._announces_copies)
        self._unreferenced.pop(name, None)

    def _unrefer(
        self, name: BlockHash, block: Block, place: Place, copies: int | None
    ) -> Iterator[SequenceHash]:
        """Yields our blocks that are no longer in the place's tier, the last one first. copies: how
        many are left there; None: one less than before."""
        left = without_copy(block.references, place, copies)
        if left == block.references:
            return
        tier, _ = place
        block.references = left
        if not block.lies_in(tier):
            yield from self._copies.take_away(block, tier)
        if not block.references:
            self._unreferenced[name] = None
            if len(self._unreferenced) > REMEMBERED:
                oldest, _ = self._unreferenced.popitem(last=False)
                del self._known[oldest]

    def _forget(self, name: BlockHash) -> Iterator[CacheEvent]:
        """Ends a block whose name the engine has given to another one."""
        block = self._known.pop(name, None)
        if block is None:
            return
        self._unreferenced.pop(name, None)
        for tier in Tier:
            if block.lies_in(tier):
                gone = tuple(self._copies.take_away(block, tier))
                if gone:
                    yield Removed(gone, tier)
