"""Embeddings that a simulated model makes up: equal texts have equal ones."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest, shown
from workers.server.members import check_members

DIMENSIONS = 256
_DONE = frozenset({"model", "input", "encoding_format", "cache_salt"})


def embedded(fields: Mapping[str, Any], prompts: Sequence[bytes]) -> dict[str, object]:
    """The answer to a request. prompts: little-endian u32. Raises InvalidRequest."""
    check_members(fields, _DONE)
    encoding = fields.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        given = shown(encoding)
        raise InvalidRequest("encoding_format", f"must be float or base64, got {given}")
    is_text = encoding == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(prompt, is_text)}
        for index, prompt in enumerate(prompts)
    ]
    num_tokens = sum(map(len, prompts)) // 4
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "model": fields["model"], "data": data, "usage": usage}


def _vector(prompt: bytes, is_text: bool) -> str | list[float]:
    drawn = np.random.default_rng(xxh3_64_intdigest(prompt)).normal(size=DIMENSIONS)
    vector = (drawn / np.linalg.norm(drawn)).astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
