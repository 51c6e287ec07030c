"""Identities of KV blocks, by which their content is served: in slots, on disk, on the wire.

The index knows blocks by 64 bits of XXH3. A second block with a given hash is found in a minute. In
the index such a block promises what is not held; served by its hash, it would answer one client
from another client's prompt. An identity has 256 bits that nobody can make collide. It needs no
secret, so workers need nothing in common to know each other's blocks, nor a worker to know those of
its earlier lives.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType

from app.core.hashing import compute_hashes, seed_for
from app.core.types import SequenceHash

BlockIdentity = NewType("BlockIdentity", bytes)
"""BLAKE2b of the identity of the block before, or of the prompt's salt, and of the block's tokens;
then the block's sequence hash, big-endian, by which the index is told of the block."""
_DIGEST_BYTES = 32
IDENTITY_BYTES = _DIGEST_BYTES + 8


def identities_of(prompt: bytes, block_size: int, salt: str = "") -> list[BlockIdentity]:
    """Returns one for each full block, in order. prompt: token ids, little-endian u32."""
    _, hashes = compute_hashes(prompt, block_size, seed=seed_for(cache_namespace=salt))
    # No block's digest is made as this one is: no salt can stand for a prompt's beginning.
    digest = blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"salt").digest()
    identities, size = [], 4 * block_size
    for at, sequence_hash in enumerate(hashes):
        tokens = prompt[at * size : (at + 1) * size]
        digest = blake2b(digest + tokens, digest_size=_DIGEST_BYTES).digest()
        identities.append(BlockIdentity(digest + sequence_hash.to_bytes(8)))
    return identities


def hash_of(block: BlockIdentity) -> SequenceHash:
    return SequenceHash(int.from_bytes(block[_DIGEST_BYTES:]))
