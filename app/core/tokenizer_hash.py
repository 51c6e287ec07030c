"""Whether two tokenizers agree, by what they make of one text full of traps."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from xxhash import xxh3_64_intdigest

PROBE = (
    "The quick brown fox, 1234567890 times:\n\tdef f(x): return x ** 2  # ½ of π\n"
    "Größe, naïveté, Ελλάδα, Привет, 你好世界, こんにちは, 안녕하세요, שלום, नमस्ते 🙂👩‍💻\r\n"
    "<s></s><|endoftext|><|im_start|>user<|eot_id|>[INST]   \u00a0…"
)
"""Tokenizers that agree on this agree, as a rule, on all."""


def hash_of_probe(ids: Sequence[int]) -> str:
    """The hash of a tokenizer. ids: what it makes of PROBE, special tokens added."""
    return f"{xxh3_64_intdigest(orjson.dumps(ids)):016x}"
