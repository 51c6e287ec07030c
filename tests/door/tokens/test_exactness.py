"""The ids are those of vLLM 0.32; capture.py says how they were recorded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.door.tokens import Renderer, Unrenderable, chat_of_messages, chat_of_response, load
from tests.door.tokens.models import FAMILIES

DATA = Path(__file__).parents[2] / "data/door"

CASES = [
    pytest.param(family, kind, body, ids, id=f"{family}-{kind}-{number}")
    for family in FAMILIES
    for kind in ("chats", "messages", "responses")
    for number, (body, ids) in enumerate(
        orjson.loads((DATA / family / f"{kind}.json").read_bytes())
    )
]


@cache
def renderer_of(family: str) -> Renderer:
    return load(str(DATA / family))


async def ids_of(renderer: Renderer, kind: str, body: dict[str, Any]) -> list[int]:
    if kind == "messages":
        return (await renderer.of_chat(chat_of_messages(body, renderer.habits))).tolist()
    if kind == "responses":
        return (await renderer.of_response(chat_of_response(body))).tolist()
    return (await renderer.of_chat(body)).tolist()


@pytest.mark.parametrize(("family", "kind", "body", "ids"), CASES)
async def test_a_prompt_has_the_ids_that_the_engine_gives_it(
    family: str, kind: str, body: dict[str, Any], ids: list[int] | None
) -> None:
    renderer = renderer_of(family)
    if ids is None:
        with pytest.raises(Unrenderable):
            await ids_of(renderer, kind, body)
    else:
        assert await ids_of(renderer, kind, body) == ids
