"""The ids are those of vLLM 0.32; capture.py says how they were recorded."""

from functools import cache
from pathlib import Path

import orjson
import pytest

from app.door.answer_request import PATHS, Api
from app.tokens import Unrenderable, chat_of_messages, chat_of_response, load
from tests.tokens.capture import agents
from tests.tokens.models import FAMILIES

DATA = Path(__file__).parents[1] / "data/door"

KINDS = {Api.CHAT: "chats", Api.MESSAGES: "messages", Api.RESPONSES: "responses"}


def read(family, kind):
    return orjson.loads((DATA / family / f"{kind}.json").read_bytes())


CASES = [
    pytest.param(family, kind, body, ids, id=f"{family}-{kind}-{number}")
    for family in FAMILIES
    for kind in KINDS.values()
    for number, (body, ids) in enumerate(read(family, kind))
]
OF_AGENTS = [
    pytest.param(family, KINDS[PATHS[path]], body, ids, id=f"{family}-agents-{number}")
    for family in FAMILIES
    for number, ((path, body), ids) in enumerate(zip(agents(), read(family, "agents"), strict=True))
]


@cache
def renderer_of(family):
    return load(str(DATA / family))


async def ids_of(renderer, kind, body):
    if kind == "messages":
        return (await renderer.of_chat(chat_of_messages(body, renderer.habits))).tolist()
    if kind == "responses":
        return (await renderer.of_response(chat_of_response(body))).tolist()
    return (await renderer.of_chat(body)).tolist()


@pytest.mark.parametrize(("family", "kind", "body", "ids"), CASES + OF_AGENTS)
async def test_a_prompt_has_the_ids_that_the_engine_gives_it(family, kind, body, ids):
    renderer = renderer_of(family)
    if ids is None:
        with pytest.raises(Unrenderable):
            await ids_of(renderer, kind, body)
    else:
        assert await ids_of(renderer, kind, body) == ids
