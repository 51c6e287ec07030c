"""Tokens -> block hashes. u64 XXH3, little-endian, as the field's reference router computes them.

    local[i]    = XXH3_64(tokens of block i as LE u32 [+ LE u64 multimodal hashes], seed)
    seed        = 1337 + XXH3_64(lora_name, seed 0) + XXH3_64(cache_namespace, seed 1), mod 2^64
    sequence[0] = local[0]
    sequence[i] = XXH3_64(LE u64 sequence[i-1] + LE u64 local[i], seed 1337)

tests/data/hash_vectors.json holds vectors that this must reproduce bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest
from app.core.types import LocalHash, SequenceHash

BASE_SEED = 1337
U64 = (1 << 64) - 1
_pair = struct.Struct("<QQ").pack

Tokens = Sequence[int] | NDArray[np.integer] | bytes
"""Token ids: any sequence of ints, a numpy array of integers, or raw little-endian u32."""


def seed_for(lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """Returns the seed of the local hashes. An empty or absent name adds nothing."""
    seed = BASE_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & U64


def token_bytes(tokens: Tokens) -> bytes:
    """Returns `tokens` as little-endian u32. Raises InvalidRequest if one is not an integer in [0,
    2^32), or raw bytes are not a whole number of u32."""
    if isinstance(tokens, bytes):
        if len(tokens) % 4:
            raise InvalidRequest("token_ids", f"{len(tokens)} bytes are not a whole number of u32")
        return tokens
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise InvalidRequest("token_ids", f"not all are integers in [0, 2^32): {error}") from None


def _array_bytes(tokens: NDArray[np.integer]) -> bytes:
    if tokens.dtype == np.uint32:
        return tokens.astype("<u4", copy=False).tobytes()
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequest("token_ids", f"needs a flat integer array, got {tokens.dtype}")
    is_signed = tokens.dtype.kind == "i"
    # With a few thousand, an argmax takes a third of a max.
    if tokens.size and (
        tokens[tokens.argmax()] > 0xFFFFFFFF or (is_signed and tokens[tokens.argmin()] < 0)
    ):
        raise InvalidRequest("token_ids", "not all are in [0, 2^32)")
    return tokens.astype("<u4").tobytes()


def compute_local_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    seed: int = BASE_SEED,
    eagle: bool = False,
    mm_hashes: Sequence[Iterable[int]] | None = None,
) -> list[LocalHash]:
    """Returns one hash per full block, in prompt order. eagle: a block's window is `block_size + 1`
    tokens; the stride stays `block_size`. mm_hashes: for each full block, the u64 content hashes of
    the multimodal items that touch it. Raises InvalidRequest for bad tokens (see `token_bytes`)."""
    raw = token_bytes(tokens)
    stride = 4 * block_size
    window = stride + 4 * eagle
    count = max(0, (len(raw) - window) // stride + 1)
    blocks: Sequence[bytes]
    if eagle or mm_hashes:
        blocks = [raw[i * stride : i * stride + window] for i in range(count)]
        if mm_hashes:
            blocks = [
                block + np.array(sorted(items), "<u8").tobytes()
                for block, items in zip(blocks, mm_hashes, strict=True)
            ]
    else:
        # Not struct.unpack, which caches the compiled formats of the last hundred lengths.
        blocks = np.frombuffer(raw, f"V{stride}", count).tolist() if count else []
    # cast, not LocalHash(): NewType costs a call per block, as long as hashing one takes.
    return cast(list[LocalHash], [xxh3_64_intdigest(block, seed) for block in blocks])


def next_sequence_hash(parent: SequenceHash | None, local: LocalHash) -> SequenceHash:
    """Returns the sequence hash of the block `local` after `parent` (None: the first block)."""
    if parent is None:
        return SequenceHash(local)
    return SequenceHash(xxh3_64_intdigest(_pair(parent, local), BASE_SEED))


def compute_sequence_hashes(local_hashes: Sequence[LocalHash]) -> list[SequenceHash]:
    """Returns one hash per block, each covering the prefix up to its block."""
    if not local_hashes:
        return []
    h: int = local_hashes[0]
    chain = [h, *[h := xxh3_64_intdigest(_pair(h, local), BASE_SEED) for local in local_hashes[1:]]]
    return cast(list[SequenceHash], chain)


def compute_hashes(
    tokens: Tokens, block_size: int, *, seed: int = BASE_SEED
) -> tuple[list[LocalHash], list[SequenceHash]]:
    local = compute_local_hashes(tokens, block_size, seed=seed)
    return local, compute_sequence_hashes(local)


PROBE = (
    "The quick brown fox, 1234567890 times:\n\tdef f(x): return x ** 2  # ½ of π\n"
    "Größe, naïveté, Ελλάδα, Привет, 你好世界, こんにちは, 안녕하세요, שלום, नमस्ते 🙂👩‍💻\r\n"
    "<s></s><|endoftext|><|im_start|>user<|eot_id|>[INST]   \u00a0…"
)


def hash_of_probe(ids: Sequence[int]) -> str:
    """Returns a tokenizer's hash. ids: those of PROBE, special tokens added."""
    return f"{xxh3_64_intdigest(orjson.dumps(ids)):016x}"
