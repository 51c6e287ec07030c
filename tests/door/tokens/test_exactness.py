"""The ids are those of vLLM 0.32; capture.py says how they were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from app.door.tokens import Unrenderable, load
from tests.door.tokens.models import FAMILIES

DATA = Path(__file__).parents[2] / "data/door"

CASES = [
    pytest.param(family, body, ids, id=f"{family}-{number}")
    for family in FAMILIES
    for number, (body, ids) in enumerate(orjson.loads((DATA / family / "chats.json").read_bytes()))
]


@pytest.mark.parametrize(("family", "body", "ids"), CASES)
async def test_a_chat_has_the_ids_that_the_engine_gives_it(
    family: str, body: dict[str, Any], ids: list[int] | None
) -> None:
    renderer = load(str(DATA / family))
    if ids is None:
        with pytest.raises(Unrenderable):
            await renderer.of_chat(body)
    else:
        assert (await renderer.of_chat(body)).tolist() == ids
