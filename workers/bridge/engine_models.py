"""The models that an engine serves."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from xxhash import xxh3_64_intdigest

from app.core.errors import ConfigError
from workers.bridge.engine_http import EngineHttp, whole
from workers.bridge.facts import Overrides

PROBE = (
    "The quick brown fox, 1234567890 times:\n\tdef f(x): return x ** 2  # ½ of π\n"
    "Größe, naïveté, Ελλάδα, Привет, 你好世界, こんにちは, 안녕하세요, שלום, नमस्ते 🙂👩‍💻\r\n"
    "<s></s><|endoftext|><|im_start|>user<|eot_id|>[INST]   \u00a0…"
)
"""Tokenizers that agree on this agree, as a rule, on all."""


@dataclass(frozen=True, slots=True)
class Models:
    """names, adapters, tokenizer: as models, adapters and tokenizer of EngineFacts."""

    names: tuple[str, ...]
    adapters: tuple[str, ...]
    max_model_len: int | None
    tokenizer: str


async def models_of(engine: EngineHttp, overrides: Overrides) -> Models:
    """What /v1/models lists; adapters come and go while the engine runs.

    Raises EngineUnavailable, and ConfigError if there is no model and `overrides` names none.
    """
    answer = await engine.get_object("/v1/models") or {}
    listed = answer.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    own = [card for card in cards if not card.get("parent")]
    names = overrides.model or tuple(str(card["id"]) for card in own if card.get("id"))
    if not names:
        raise ConfigError("the engine lists no model at /v1/models: give the agent --model NAME")
    adapters = (card for card in cards if card.get("parent"))
    lengths = [
        length for card in own if (length := whole(card.get("max_model_len"), "max_model_len"))
    ]
    return Models(
        names,
        tuple(str(card["id"]) for card in adapters if card.get("id")),
        min(lengths, default=None),
        next((str(card["root"]) for card in own if card.get("root")), ""),
    )


async def tokenizer_hash(engine: EngineHttp, model: str) -> str:
    """Of the ids that the engine gives for PROBE; "" if it does not say."""
    answer = await engine.post_object("/tokenize", {"model": model, "prompt": PROBE})
    ids = (answer or {}).get("tokens")
    return f"{xxh3_64_intdigest(orjson.dumps(ids)):016x}" if isinstance(ids, list) and ids else ""
