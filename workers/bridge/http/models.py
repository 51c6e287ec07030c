"""The models that an engine serves."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.errors import EngineUnfit
from app.core.tokenizer_hash import PROBE, hash_of_probe
from workers.bridge.http.engine import EngineHttp, whole
from workers.bridge.http.facts import Overrides


@dataclass(frozen=True, slots=True)
class EngineModels:
    """names, adapters, folders, tokenizer: as models, adapters, folders and tokenizer of
    EngineFacts. owner: of the first, as it says; "": it does not."""

    names: tuple[str, ...]
    adapters: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]
    max_model_len: int | None
    tokenizer: str
    owner: str = ""


async def models_of(engine: EngineHttp, overrides: Overrides) -> EngineModels:
    """What /v1/models lists; adapters come and go while the engine runs.

    Raises EngineUnavailable, and EngineUnfit if there is no model and `overrides` names none.
    """
    answer = await engine.get_object("/v1/models") or {}
    listed = answer.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    own = [card for card in cards if not card.get("parent")]
    names = overrides.model or tuple(str(card["id"]) for card in own if card.get("id"))
    if not names:
        raise EngineUnfit("the engine lists no model at /v1/models: give the agent --model NAME")
    adapters = [card for card in cards if card.get("parent") and card.get("id")]
    lengths = [length for card in own if (length := whole(card.get("max_model_len")))]
    return EngineModels(
        names,
        tuple(str(card["id"]) for card in adapters),
        tuple((str(card["id"]), str(card["root"])) for card in adapters if card.get("root")),
        min(lengths, default=None),
        next((str(card["root"]) for card in own if card.get("root")), ""),
        next((str(card["owned_by"]) for card in own if card.get("owned_by")), ""),
    )


async def tokenizer_hash(engine: EngineHttp, model: str) -> str:
    """Of the ids that the engine gives for PROBE; "" if it does not say."""
    answer = await engine.post_object("/tokenize", {"model": model, "prompt": PROBE})
    ids = (answer or {}).get("tokens")
    return hash_of_probe(ids) if isinstance(ids, list) and ids else ""
