"""The list of models, as clients of OpenAI's API read it."""

from __future__ import annotations

import time

from fastapi import APIRouter
from typing_extensions import TypedDict

from app.door.answer_request import MODELS
from app.door.errors import UnknownModel
from app.door.model import Model
from app.edge.errors import OpenAIError
from app.edge.services import Replica, Rules, errors

BEGUN_S = int(time.time())
"""Start of this process: models have no other date."""
ROUTER = APIRouter()


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    asleep: bool


class ModelCards(TypedDict):
    object: str
    data: list[ModelCard]


@ROUTER.get(MODELS, responses=errors(401, error=OpenAIError))
async def models(replica: Replica, rules: Rules) -> ModelCards:
    """List the models that have a live worker, and those that sleep until a request comes, each
    under its aliases, too."""
    known = replica.door.models
    await known.until_known()
    cards = {model.name: _card(model.name, model) for model in known}
    cards |= {name: _card(name) for name in known.sleeping()}
    for alias, name in known.aliases.items():
        cards.pop(alias, None)
        if name in cards:
            cards[alias] = {**cards[name], "id": alias}
    shown = [card for name, card in cards.items() if rules is None or rules.may_ask(name)]
    return {"object": "list", "data": shown}


@ROUTER.get(MODELS + "/{model:any_text}", responses=errors("4XX", 503, error=OpenAIError))
async def one_model(model: str, replica: Replica, rules: Rules) -> ModelCard:
    """Describe a model."""
    known = replica.door.models
    await known.until_known()
    if rules is not None and not rules.may_ask(model):
        raise UnknownModel(model)
    name = known.aliases.get(model, model)
    return _card(model, None if name in known.sleeping() else known.find(model))


def _card(name: str, model: Model | None = None) -> ModelCard:
    """Returns a model's card. name: under which it is asked for. model: None while it sleeps, and
    nothing else is known."""
    return {
        "id": name,
        "object": "model",
        "created": BEGUN_S,
        "owned_by": "kvroute",
        "root": model.base if model else name,
        "parent": model.base if model and model.lora_name else None,
        "max_model_len": max(w.max_model_len for w in model.workers) or None if model else None,
        "asleep": model is None,
    }
