"""Other names for models: answered as the model's own, and never sent to engines."""

import pytest
from aiohttp import web

from app.core.settings.kinds import parse_aliases
from app.core.settings.router import RouterSettings
from app.door.answer_request import RERANKS, SCORES
from app.edge.app import create_app
from app.edge.reload import LiveSettings
from tests.door.conftest import completing, models, replica
from tests.eventually import eventually

ALIASES = "gpt-4o=m, gpt-4=m,\n code=sql,lost=gone"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages": MESSAGES | {"max_tokens": 1},
    "/v1/responses": {"input": "hi"},
    **{path: {"query": "a", "documents": ["b"]} for path in RERANKS},
    **{path: {"text_1": "a", "text_2": "b"} for path in SCORES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": MESSAGES,
}
"""A body for each path of which engines answer requests."""
ANSWER = {"choices": [], "content": [], "output": []}
"""Of any dialect."""


async def test_an_alias_is_answered_in_every_dialect_and_no_engine_sees_it(one_redis_server, redis):
    sent = []

    async def answer(request):
        sent.append((request.path, await request.json()))
        return web.json_response({"tokens": [1, 2], "count": 2} | ANSWER)

    engine = completing(redis, "a", answer, path="/{any:.*}", adapters=("sql",))
    async with engine, replica(one_redis_server.url, model_alias=ALIASES) as door:
        await eventually(lambda: models(door), lambda found: "m" in found)
        for path, body in BODIES.items():
            for alias, model in (("gpt-4o", "m"), ("code", "sql"), ("m", "m")):
                sent.clear()
                said = await door.post(path, json={"model": alias} | body)
                assert (path, said.status_code) == (path, 200), said.text
                assert sent
                assert {asked["model"] for _, asked in sent} == {model}
                assert path in [asked_at for asked_at, _ in sent]


async def test_aliases_are_listed_as_the_models_that_they_stand_for(one_redis_server, redis):
    async def answer(_):
        return web.json_response({"choices": []})

    engine = completing(redis, "a", answer, adapters=("sql",), max_model_len=64)
    async with engine, replica(one_redis_server.url, model_alias=ALIASES) as door:
        await eventually(lambda: models(door), lambda found: "m" in found)
        assert await models(door) == ["m", "sql", "gpt-4o", "gpt-4", "code"]
        for alias, root, parent in (("gpt-4", "m", None), ("code", "m", "m")):
            card = (await door.get(f"/v1/models/{alias}")).json()
            assert (card["id"], card["root"], card["parent"]) == (alias, root, parent)
            assert card["max_model_len"] == 64
        for path, body in (("/v1/models/lost", None), ("/v1/chat/completions", MESSAGES)):
            asked = door.post(path, json={"model": "lost"} | body) if body else door.get(path)
            refused = await asked
            assert refused.status_code == 404
            told = refused.json()["error"]
            assert told["param"] == "model"
            assert told["message"] == (
                "The model 'gone' does not exist. It is what model_alias has for 'lost'."
            )


async def test_an_alias_goes_before_a_model_of_its_name(one_redis_server, redis):
    asked = []

    async def answer(request):
        asked.append((await request.json())["model"])
        return web.json_response({"choices": []})

    engine = completing(redis, "a", answer, models=("m", "old"))
    async with engine, replica(one_redis_server.url, model_alias="old=m") as door:
        await eventually(lambda: models(door), lambda found: sorted(found) == ["m", "old"])
        said = await door.post("/v1/completions", json={"model": "old", "prompt": "hi"})
        assert (said.status_code, asked) == (200, ["m"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gpt-4o", "'gpt-4o': an alias and its model are needed"),
        ("=m", "'=m': an alias and its model are needed"),
        ("a=m,b= ", "'b=': an alias and its model are needed"),
        ("a=m,a=n", "'a=n': a stands for m already"),
        ("a=b,b=m", "'a=b': b is an alias itself"),
        ("a=a", "'a=a': a is an alias itself"),
    ],
)
def test_an_alias_that_cannot_be_meant_is_named(text, error):
    with pytest.raises(ValueError, match=error):
        parse_aliases(text)


def test_aliases_change_while_a_replica_runs():
    replica = create_app(RouterSettings(model_alias="a=m")).replica
    live = LiveSettings(replica, "file", lambda: RouterSettings(model_alias="b=m,c=m"))
    assert replica.door.models.aliases == {"a": "m"}
    live.reload()
    assert replica.door.models.aliases == {"b": "m", "c": "m"}
