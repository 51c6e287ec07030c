"""Events of an engine's KV cache, in the engine's own terms, and the meaning of each by itself.

The meaning of the fields is taken from vllm/distributed/kv_events.py and its consumers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest
from app.core.hashing import U64, token_bytes
from app.core.types import Tier

BlockHash = int | bytes
"""An opaque number modulo 2^64: an int may be signed or unsigned, bytes are big-endian."""

_TIERS: dict[str, Tier | None] = {
    **dict.fromkeys(("gpu", "device"), Tier.DEVICE),
    **dict.fromkeys(("cpu", "cpu_pinned", "cpu_tier1"), Tier.HOST),
    **dict.fromkeys(("cpu_tier2", "disk", "nvme", "storage"), Tier.DISK),
    # Not this worker's own.
    **dict.fromkeys(("external", "network", "remote", "shared"), None),
}
_DIGEST = re.compile("[0-9a-fA-F]{64}")
PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
"""Layers that need the blocks within a window to go on after a block."""
STATE_KINDS = frozenset({"mamba"})
"""Layers that need only their last block, the state, to go on after it."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that an engine has stored. The fields have the order of arrays, in which older engines
    publish events.

    token_ids: of all blocks, `block_size` each; of a pair, the first counts. Empty: an offload
    of blocks that were, or will be, announced with their tokens.

    lora_id: above 0 for an adapter, even one without a name.

    extra_keys: for each block, what its hash covers besides tokens, or None. If there is no
    cache_salt, a bare string among those of a chain's first block, other than the adapter's name,
    is the salt: items have their position with them.

    kv_cache_spec_sliding_window: tokens that a layer of the group sees, the current one included.

    locality: LOCAL or None for this worker's blocks, REMOTE for blocks that lie elsewhere.

    lookahead_token_ids: for each block, tokens after it that its hash covers too, as a drafter has
    read them. Of pairs, that is each one's second token.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether its blocks are reused only by prompts that go on as the first one did."""
        tokens = self.token_ids
        return bool(self.lookahead_token_ids or (tokens and not isinstance(tokens[0], int)))


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks of which an engine has dropped a copy.

    remaining_copy_counts: how many copies of each block are left; None: one less than before.
    """

    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    remaining_copy_counts: list[int] | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Every block of every tier is gone."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


def key_of(block_hash: BlockHash) -> int:
    """Returns one number for all spellings of a hash."""
    # vLLM sends the last 64 bits of a digest as an int, some versions' offloads all of it.
    return (block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")) & U64


def tier_of(event: BlockStored | BlockRemoved) -> Tier | None:
    """Returns None for blocks that are not this worker's own, or in an unknown medium."""
    if event.locality is not None and event.locality.upper() != "LOCAL":
        return None
    return Tier.DEVICE if event.medium is None else _TIERS.get(event.medium.lower())


def is_medium_known(event: BlockStored | BlockRemoved) -> bool:
    return event.medium is None or event.medium.lower() in _TIERS


def tokens_of(event: BlockStored, block_size: int) -> bytes:
    """Returns the tokens of an event that has some, packed as u32; a wider one is folded to u32.
    Raises InvalidRequest for a number of tokens that is not the blocks', or of extra keys, and for
    a block size of which the index's, `block_size`, is no divisor."""
    if event.block_size < 1 or event.block_size % block_size:
        raise InvalidRequest(
            "block_size", f"{event.block_size} is not a multiple of the index's {block_size}"
        )
    if len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise InvalidRequest(
            "token_ids",
            f"{len(event.token_ids)} tokens are not {len(event.block_hashes)} blocks of "
            f"{event.block_size}",
        )
    if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
        raise InvalidRequest(
            "extra_keys", f"{len(event.extra_keys)} entries for {len(event.block_hashes)} blocks"
        )
    try:
        return token_bytes(event.token_ids)
    except InvalidRequest:
        pass  # there are pairs, or wide tokens
    try:
        tokens = [folded(t if isinstance(t, int) else t[0]) for t in event.token_ids]
    except (LookupError, TypeError) as error:
        raise InvalidRequest("token_ids", f"neither tokens nor pairs: {error}") from None
    return token_bytes(tokens)


def folded(token: int) -> int:
    """Returns the token as u32. SGLang puts numbers of up to 2^62 in the place of an image, by its
    content: so chains stay distinct, and removals find what was stored."""
    if token < 1 << 32:
        return token
    return xxh3_64_intdigest((token & U64).to_bytes(8, "little")) & 0xFFFFFFFF


def unnamed_adapter(event: BlockStored) -> str | None:
    """Returns a name for an adapter that older vLLM reports by number only. No request has this
    name, because another worker may give the same number to another adapter."""
    return f"lora_id {event.lora_id}" if event.lora_id else None


def salt_in(event: BlockStored) -> str | None:
    """Returns the salt of an event without a parent. vLLM puts it only among the extra keys of the
    first block, after the adapter's name and the images."""
    keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
    if event.lora_name in keys:
        keys.remove(event.lora_name)
    names = [key for key in keys if isinstance(key, str) and key]
    return names[-1] if names else None


def items_of(
    event: BlockStored, lora_name: str | None, cache_salt: str | None, per_block: int
) -> list[list[int]] | None:
    """Returns for each of our blocks the hashes of what else it holds, such as images. If one block
    of the engine is several of ours, each of them counts as holding its items: events do not say
    how far an item extends."""
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
    # Newer engines send an identifier together with the position where the item begins.
    if isinstance(key, list | tuple) and key:
        key = key[0]
    if isinstance(key, str) and _DIGEST.fullmatch(key):
        return int(key[:16], 16)
    return xxh3_64_intdigest(key if isinstance(key, bytes) else str(key).encode())
