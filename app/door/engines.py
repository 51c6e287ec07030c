"""What the engines of workers take besides the API that they share."""

from __future__ import annotations

import re
from functools import lru_cache

from app.door.asked import Api

TRANSFER = "kv_transfer_params"
"""In which vLLM takes ids, and is told how KV travels."""
_VLLM_TAKES_IDS = (0, 32)
_VERSION = re.compile(r"(\d+)\.(\d+)")


@lru_cache(maxsize=256)
def ids_field(api: Api, engine: str) -> str:
    """Where an engine takes ids that we rendered; "": nowhere. engine: as in WorkerInfo."""
    kind, _, version = engine.partition(" ")
    if kind == "openai":
        return ""  # of the API, only text is sure
    if api is Api.COMPLETIONS:
        return "prompt"
    if kind == "sglang":
        return "input_ids" if api is Api.CHAT else ""
    if kind.startswith("kvroute"):
        return TRANSFER
    if kind == "vllm":
        match = _VERSION.match(version)
        if match and (int(match[1]), int(match[2])) >= _VLLM_TAKES_IDS:
            return TRANSFER
    return ""


def returns_ids(engine: str) -> bool:
    """Whether its events name the ids of their tokens if `return_token_ids` asks for them."""
    return engine.startswith(("vllm", "kvroute"))
