"""Translates an engine's own KV cache events into ours.

vLLM and SGLang identify blocks by hashes of their own, with block sizes of their own. Neither means
anything to another engine, so the chain is hashed again from the token ids that the events carry.
The meaning of the fields is taken from vllm/distributed/kv_events.py and its consumers.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest
from app.core.events import CacheEvent, Cleared, Removed, Stored
from app.core.hashing import U64, compute_local_hashes, next_sequence_hash, seed_for, token_bytes
from app.core.types import SequenceHash, Tier

BlockHash = int | bytes
"""Opaque; taken modulo 2^64: an int may be signed or unsigned, bytes are a big-endian number."""

MAX_WAIT_S = 5.0
MAX_WAITING = 4096
REMEMBERED = 16_384
"""How many blocks that no tier holds any more are still known: an offload may be announced after
the block has left the device."""

_TIERS: dict[str, Tier | None] = {
    **dict.fromkeys(("gpu", "device"), Tier.DEVICE),
    **dict.fromkeys(("cpu", "cpu_pinned", "cpu_tier1"), Tier.HOST),
    **dict.fromkeys(("cpu_tier2", "disk", "nvme", "storage"), Tier.DISK),
    # Not this worker's own.
    **dict.fromkeys(("external", "network", "remote", "shared"), None),
}
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention over the whole prefix: what a sliding window or a recurrent state keeps cannot be
reused block by block."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """token_ids: of all blocks, `block_size` each; of a pair, the first counts. Empty: an offload
    of blocks that were, or will be, announced with their tokens.

    extra_keys: for each block, what its hash covers besides tokens, or None. If there is no
    cache_salt, a plain string among those of a chain's first block is the salt.
    lora_id: above 0 for an adapter, even one without a name.
    locality: LOCAL or None for this worker's blocks, REMOTE for blocks that lie elsewhere.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int] | Sequence[Sequence[int]]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    lora_id: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of every tier is gone."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared

_Place = tuple[Tier, int | None]
"""A tier, and a group of the engine's layers."""
_References = tuple[tuple[_Place, int], ...]
"""How many copies of a block were announced in each place."""


@dataclass(slots=True)
class _Block:
    """A block of the engine: one or more of ours, and what its children inherit."""

    blocks: tuple[SequenceHash, ...]
    parent: SequenceHash | None
    tokens: int
    """XXH3_64 of the block's tokens."""
    lora_name: str | None
    cache_salt: str | None
    references: _References = ()

    def lies_in(self, tier: Tier) -> bool:
        return any(held is tier for (held, _), _ in self.references)

    def is_of(self, tokens: int, parent: SequenceHash | None) -> bool:
        return self.tokens == tokens and self.parent == parent


class ExternalBlocks:
    """What one engine holds, by its own hashes.

    block_size: tokens per block of the index. The engine's block size must be a multiple of it.
    now: monotonic seconds. joined_late: the engine held blocks before the first event. A block that
    waits in vain for its parent is then taken to follow one of those, and left out until it is
    stored again.

    announces_copies: a block is held until it has been removed as often as it was stored. vLLM
    stores each copy of a block and removes each, unless a request's kv_cache_report_mode is `full`.
    If False, one removal from a tier suffices: SGLang has no copies, but stores some blocks again.
    """

    def __init__(
        self,
        block_size: int,
        now: Callable[[], float] = time.monotonic,
        *,
        joined_late: bool = False,
        announces_copies: bool = True,
    ) -> None:
        self.num_left_out = 0
        """How many of the engine's blocks were left out: for a metric."""
        self._block_size = block_size
        self._now = now
        self._joined_late = joined_late
        self._announces_copies = announces_copies
        self._known: dict[BlockHash, _Block] = {}
        self._unreferenced: OrderedDict[BlockHash, None] = OrderedDict()
        self._copies: dict[Tier, dict[SequenceHash, int]] = {tier: {} for tier in Tier}
        """How many of the engine's blocks in a tier are, or contain, the same one of ours."""
        self._group: int | None = None
        """The group that counts, once an event has named a kind."""
        self._waiting: dict[BlockHash, list[BlockStored | BlockRemoved]] = {}
        """Events that can be understood only once that block is known."""
        self._awaits: dict[BlockHash, list[BlockHash]] = {}
        """For each block in `_waiting`, the blocks that it waits for, the latest last: two events
        may store it as part of stretches that begin at different places."""
        self._waits_since: dict[BlockHash, float] = {}
        """For each block that another's tokens wait for."""
        self._num_waiting = 0
        self._overrun = False

    @property
    def is_blind(self) -> bool:
        """Whether events were missed: some have waited over MAX_WAIT_S for a parent that has not
        come, or more than MAX_WAITING would have to wait. Only a new incarnation is correct again,
        with a new ExternalBlocks and what the engine replays or announces from then on.

        Never, if it joined late: nothing that could be done would bring those blocks back. Nor
        because of an offload without tokens: an engine may load a block that it has not stored
        since it started, and announce its tokens later or never."""
        if self._joined_late:
            return False
        oldest = next(iter(self._waits_since.values()), self._now())
        return self._overrun or self._now() - oldest > MAX_WAIT_S

    def take(self, event: EngineEvent) -> list[CacheEvent]:
        """What `event` means for the index.

        Raises InvalidRequest, having changed nothing; treat that like a missed event.
        """
        changes: list[CacheEvent] = []
        # What waited for a block comes right after it, and what waited for that comes right after
        # that.
        # Nothing that may wait is refused later.
        levels: list[Iterator[EngineEvent]] = [iter((event,))]
        while levels:
            following = next(levels[-1], None)
            if following is None:
                levels.pop()
                continue
            meant, stored = self._take_one(following)
            changes += meant
            levels.append(self._released(stored))
        return changes

    def _take_one(self, event: EngineEvent) -> tuple[list[CacheEvent], Sequence[BlockHash]]:
        """What `event` alone means, and the blocks that other events may be waiting for."""
        match event:
            case AllBlocksCleared():
                self._clear()
                return [Cleared()], ()
            case BlockStored() | BlockRemoved() if not self._counts(event):
                return [], ()
        tier = _tier_of(event.medium, event.locality)
        if tier is None:
            return [], ()
        if isinstance(event, BlockRemoved):
            return self._remove(event, tier), ()
        if not event.token_ids:
            return self._store_announced(event, tier), ()
        return self._store(event, tier)

    def _clear(self) -> None:
        self._known.clear()
        self._unreferenced.clear()
        for copies in self._copies.values():
            copies.clear()
        self._waiting.clear()
        self._awaits.clear()
        self._waits_since.clear()
        self._num_waiting = 0
        self._overrun = False

    def _counts(self, event: BlockStored | BlockRemoved) -> bool:
        """Is the event's group the one that stands for all?

        It is the first one with attention over the whole prefix. vLLM reuses a block only if all
        groups hold it, and as a rule evicts it from all at about the same time. Groups use the same
        hashes, even where their blocks differ in size. Offloads without tokens do not name the
        kind.
        """
        group = event.group_idx
        kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else None
        if kind is not None and kind.lower() not in _PREFIX_KINDS:
            return False
        if kind is not None and self._group is None:
            self._group = group
        return group is None or self._group is None or group == self._group

    def _store(
        self, event: BlockStored, tier: Tier
    ) -> tuple[list[CacheEvent], Sequence[BlockHash]]:
        """Also returns the blocks that are known from now on."""
        hashes = [_key(h) for h in event.block_hashes]
        tokens = self._checked_tokens(event)
        parent: _Block | None = None
        if event.parent_block_hash is not None:
            wanted = _key(event.parent_block_hash)
            parent = self._known.get(wanted)
            if parent is None:
                self._wait(wanted, replace(event, block_hashes=hashes))
                return [], ()
        stored = self._blocks_of(event, hashes, tokens, parent)
        chain = tuple(own for block in stored for own in block.blocks)
        changes: list[CacheEvent] = [Stored(chain, stored[0].parent, tier)]
        for name, block in zip(hashes, stored, strict=True):
            before = self._known.get(name)
            if before is None or before.blocks != block.blocks:
                changes += self._forget(name)
                self._known[name] = before = block
            self._refer(name, before, tier, event.group_idx)
        return changes, hashes

    def _blocks_of(
        self,
        event: BlockStored,
        hashes: Sequence[BlockHash],
        tokens: bytes,
        parent: _Block | None,
    ) -> list[_Block]:
        """What each of the event's blocks is in the index: as known, or made of its tokens."""
        last = parent.blocks[-1] if parent else None
        size = len(tokens) // len(hashes)
        digests = [xxh3_64_intdigest(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        # An event without extra keys does not say what a known block holds besides tokens: vLLM's
        # offloads name neither images nor, at the root, the salt.
        known = [None if event.extra_keys else self._known.get(name) for name in hashes]
        kin = parent
        if kin is None and known[0] is not None and known[0].is_of(digests[0], None):
            kin = known[0]
        lora_name = event.lora_name or (kin.lora_name if kin else _unnamed_adapter(event))
        cache_salt = event.cache_salt or (kin.cache_salt if kin else _salt_in(event))
        per_block = event.block_size // self._block_size
        local = compute_local_hashes(
            tokens,
            self._block_size,
            seed=seed_for(lora_name, cache_salt),
            mm_hashes=_items(event, lora_name, cache_salt, per_block),
        )
        stored: list[_Block] = []
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
                block = _Block(tuple(own), last, digests[at], lora_name, cache_salt)
            stored.append(block)
            last = block.blocks[-1]
        return stored

    def _checked_tokens(self, event: BlockStored) -> bytes:
        if event.block_size < 1 or event.block_size % self._block_size:
            raise InvalidRequest(
                "block_size",
                f"{event.block_size} is not a multiple of the index's {self._block_size}",
            )
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            raise InvalidRequest(
                "token_ids",
                f"{len(event.token_ids)} tokens are not {len(event.block_hashes)} blocks of "
                f"{event.block_size}",
            )
        if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
            raise InvalidRequest(
                "extra_keys",
                f"{len(event.extra_keys)} entries for {len(event.block_hashes)} blocks",
            )
        try:
            tokens = [t if isinstance(t, int) else t[0] for t in event.token_ids]
        except (LookupError, TypeError) as error:
            raise InvalidRequest("token_ids", f"neither tokens nor pairs: {error}") from None
        return token_bytes(tokens)

    def _store_announced(self, event: BlockStored, tier: Tier) -> list[CacheEvent]:
        changes: list[CacheEvent] = []
        for name in map(_key, event.block_hashes):
            known = self._known.get(name)
            if known is None:
                # After the block's own tokens, if those are waiting.
                wanted = self._awaits.get(name, [name])[-1]
                self._wait(wanted, replace(event, block_hashes=[name]))
            else:
                changes.append(Stored(known.blocks, known.parent, tier))
                self._refer(name, known, tier, event.group_idx)
        return changes

    def _remove(self, event: BlockRemoved, tier: Tier) -> list[CacheEvent]:
        gone: list[SequenceHash] = []
        for name in map(_key, event.block_hashes):
            known = self._known.get(name)
            if known is not None:
                gone += self._unrefer(name, known, tier, event.group_idx)
            elif name in self._awaits:
                # It was stored, but is not understood yet. What has to wait may be left out later:
                # then a removal must not be, where a store of the block is still waiting.
                awaited = self._awaits[name]
                for wanted in tuple(awaited) if self._joined_late else awaited[-1:]:
                    self._wait(wanted, replace(event, block_hashes=[name]))
        return [Removed(tuple(gone), tier)] if gone else []

    def _refer(self, name: BlockHash, block: _Block, tier: Tier, group: int | None) -> None:
        if not block.lies_in(tier):
            copies = self._copies[tier]
            for own in block.blocks:
                copies[own] = copies.get(own, 0) + 1
        place = tier, group
        if self._announces_copies or all(held != place for held, _ in block.references):
            block.references = _counted(block.references, place, 1)
        self._unreferenced.pop(name, None)

    def _unrefer(
        self, name: BlockHash, block: _Block, tier: Tier, group: int | None
    ) -> Iterator[SequenceHash]:
        """Our blocks that are no longer in `tier`, the last one first."""
        left = _counted(block.references, (tier, group), -1)
        if left == block.references:
            return
        block.references = left
        if not block.lies_in(tier):
            yield from self._give_up_copy(block, tier)
        if not block.references:
            self._unreferenced[name] = None
            if len(self._unreferenced) > REMEMBERED:
                oldest, _ = self._unreferenced.popitem(last=False)
                del self._known[oldest]

    def _give_up_copy(self, block: _Block, tier: Tier) -> Iterator[SequenceHash]:
        copies = self._copies[tier]
        for own in reversed(block.blocks):
            copies[own] -= 1
            if not copies[own]:
                del copies[own]
                yield own

    def _forget(self, name: BlockHash) -> Iterator[CacheEvent]:
        """The engine gave this name to another block, so the one before it is gone."""
        block = self._known.pop(name, None)
        if block is None:
            return
        self._unreferenced.pop(name, None)
        for tier in Tier:
            if block.lies_in(tier):
                gone = tuple(self._give_up_copy(block, tier))
                if gone:
                    yield Removed(gone, tier)

    def _wait(self, wanted: BlockHash, event: BlockStored | BlockRemoved) -> None:
        num_blocks = len(event.block_hashes)
        self._make_room(num_blocks)
        if self._num_waiting + num_blocks > MAX_WAITING:
            self._overrun = True
            self.num_left_out += num_blocks
            return
        self._num_waiting += num_blocks
        self._waiting.setdefault(wanted, []).append(event)
        if isinstance(event, BlockStored) and event.token_ids:
            self._waits_since.setdefault(wanted, self._now())
        for name in event.block_hashes:
            awaited = self._awaits.setdefault(name, [])
            if wanted not in awaited:
                awaited.append(wanted)

    def _make_room(self, num_blocks: int) -> None:
        """Leave out what may be: offloads of blocks without tokens if too much waits, and, having
        joined late, what has waited too long as well as the oldest of what is too much."""
        num_allowed = MAX_WAITING - num_blocks
        if self._num_waiting > num_allowed:
            for wanted in self._waiting.keys() - self._waits_since.keys():
                self._leave_out(wanted)
        while self._joined_late and self._waits_since:
            wanted, since = next(iter(self._waits_since.items()))
            if self._now() - since <= MAX_WAIT_S and self._num_waiting <= num_allowed:
                break
            self._leave_out(wanted)

    def _leave_out(self, wanted: BlockHash) -> None:
        for event in self._released([wanted]):
            if isinstance(event, BlockStored):
                self.num_left_out += len(event.block_hashes)

    def _released(self, names: Iterable[BlockHash]) -> Iterator[EngineEvent]:
        """What waited for these blocks, in order of arrival."""
        for name in names:
            self._waits_since.pop(name, None)
            for event in self._waiting.pop(name, ()):
                self._num_waiting -= len(event.block_hashes)
                for waited in event.block_hashes:
                    awaited = self._awaits.get(waited, [])
                    if name in awaited:
                        awaited.remove(name)
                        if not awaited:
                            del self._awaits[waited]
                yield event


@lru_cache(maxsize=4096)
def _counted(references: _References, place: _Place, change: int) -> _References:
    """`references` with one more or one less in `place`; the same if there is none to take away.

    Cached, so that blocks share them: a Counter for each would take as much as all the rest.
    """
    counts = dict(references)
    counts[place] = counts.get(place, 0) + change
    if counts[place] < 0:
        return references
    return tuple((held, count) for held, count in counts.items() if count)


def _key(block_hash: BlockHash) -> int:
    # vLLM sends the last 64 bits of a digest as an int, some versions' offloads all of it.
    return (block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")) & U64


def _tier_of(medium: str | None, locality: str | None) -> Tier | None:
    """None: not this worker's own."""
    if locality is not None and locality.upper() != "LOCAL":
        return None
    if medium is None:
        return Tier.DEVICE
    if medium.lower() not in _TIERS:
        raise InvalidRequest("medium", f"{medium!r} is not one of {', '.join(_TIERS)}")
    return _TIERS[medium.lower()]


def _unnamed_adapter(event: BlockStored) -> str | None:
    """A name for an adapter that is known by number only, as older vLLM reports it. No request has
    this name, because another worker may give the same number to another adapter."""
    return f"lora_id {event.lora_id}" if event.lora_id else None


def _salt_in(event: BlockStored) -> str | None:
    """The salt of an event without a parent. vLLM puts it only among the extra keys of the first
    block, after the adapter's name and the images."""
    keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
    if event.lora_name in keys:
        keys.remove(event.lora_name)
    names = [key for key in keys if isinstance(key, str) and key and not _DIGEST.fullmatch(key)]
    return names[-1] if names else None


def _items(
    event: BlockStored, lora_name: str | None, cache_salt: str | None, per_block: int
) -> list[list[int]] | None:
    """For each of our blocks, the hashes of what else it holds, such as images.

    If one block of the engine is several of ours, each of them counts as holding its items: events
    do not say how far an item extends.
    """
    if not event.extra_keys or not any(event.extra_keys):
        return None
    # Not a set: an identifier with its position is a list, as msgpack decodes it.
    named = [name for name in (lora_name, cache_salt) if name]
    return [
        [_item_hash(key) for key in keys or () if key not in named]
        for keys in event.extra_keys
        for _ in range(per_block)
    ]


def _item_hash(key: object) -> int:
    """u64 of an item's identifier: its first 16 digits if it is a hex digest, otherwise XXH3_64.

    Newer engines send an identifier together with the position where the item begins.
    """
    if isinstance(key, list | tuple) and key:
        key = key[0]
    if isinstance(key, str) and _DIGEST.fullmatch(key):
        return int(key[:16], 16)
    return xxh3_64_intdigest(key if isinstance(key, bytes) else str(key).encode())
