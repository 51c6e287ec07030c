"""Embeddings that a simulated model makes up: equal texts have equal ones."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest, shown
from workers.server.answer import Piece, Usage
from workers.server.members import check_members, count

DEFAULT_DIMENSIONS = 256
MAX_DIMENSIONS = 8192
_DONE = frozenset({"model", "input", "dimensions", "encoding_format", "cache_salt"})


class EmbeddingForm:
    """fields: of the request. prompts: little-endian u32. Raises InvalidRequest."""

    def __init__(self, fields: Mapping[str, Any], prompts: Sequence[bytes]) -> None:
        check_members(fields, _DONE)
        if fields.get("encoding_format") not in (None, "float", "base64"):
            given = shown(fields["encoding_format"])
            raise InvalidRequest("encoding_format", f"must be float or base64, got {given}")
        self._model = fields["model"]
        self._prompts = prompts
        self._length = count(fields, "dimensions", most=MAX_DIMENSIONS) or DEFAULT_DIMENSIONS
        self._is_text = fields.get("encoding_format") == "base64"

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(prompt)}
            for index, prompt in enumerate(self._prompts)
        ]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return orjson.dumps(
            {"object": "list", "model": self._model, "data": data, "usage": tokens},
            option=orjson.OPT_SERIALIZE_NUMPY,
        )

    def _shown(self, prompt: bytes) -> str | NDArray[np.float32]:
        drawn = np.random.default_rng(xxh3_64_intdigest(prompt)).normal(size=self._length)
        vector = (drawn / np.linalg.norm(drawn)).astype("<f4")
        return base64.b64encode(vector.tobytes()).decode() if self._is_text else vector
