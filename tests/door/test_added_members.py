"""What a router adds to a request is taken back once an engine refuses it, and left out then."""

from pathlib import Path

import orjson
import pytest
from aiohttp import web

from app.core.settings.router import RouterSettings
from app.core.types import Incarnation
from app.edge.app import create_app
from tests.door.conftest import completing, replica, until_serving

QWEN = str(Path(__file__).parents[1] / "data/door/qwen")
VLLM = "vllm 0.33.0"
TEXTS, CHAT = "/v1/completions", "/v1/chat/completions"
TURNS = {"messages": [{"role": "user", "content": "hi there"}]}
CASES = {
    "stream_options": (TEXTS, {"prompt": "hi"}, {"engine": "openai"}, {}),
    "return_token_ids": (TEXTS, {"prompt": [1, 2, 3]}, {"engine": VLLM}, {"migrate": True}),
    "kv_transfer_params": (CHAT, TURNS, {"engine": VLLM, "tokenizer": QWEN}, {}),
    "prompt": (TEXTS, {"prompt": "hi there"}, {"engine": VLLM, "tokenizer": QWEN}, {}),
}


def strict(refuses, heard):
    """An engine that refuses what `refuses` names of a body."""

    async def complete(request):
        body = await request.json()
        heard.append(body)
        if name := refuses(body):
            message = f"[{{'loc': ('body', '{name}'), 'msg': 'Extra inputs are not permitted'}}]"
            return web.json_response({"error": {"message": message, "code": 422}}, status=422)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        choice = {"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": "stop"}
        await answer.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    return complete


@pytest.mark.parametrize("name", CASES)
async def test_it_is_taken_back_once_and_remembered(name, redis, one_redis_server):
    path, asks, about, settings = CASES[name]
    heard = []

    def refuses(body):
        is_added = body.get(name) is not None and body.get(name) != asks.get(name)
        return name if is_added else ""

    async with (
        completing(redis, "a", strict(refuses, heard), path=path, **about),
        replica(one_redis_server.url, **settings) as door,
    ):
        await until_serving(door, 1)
        for _ in range(3):
            answer = await door.post(path, json={"model": "m", "stream": True, **asks})
            assert (answer.status_code, "[DONE]" in answer.text) == (200, True), answer.text
    refused = [body for body in heard if refuses(body)]
    assert (len(refused), len(heard)) == (1, 4)
    assert all(body.get(name) == asks.get(name) for body in heard if not refuses(body))


async def test_what_the_client_says_itself_is_refused_once(redis, one_redis_server):
    heard = []
    complete = strict(lambda body: "stream_options" if "stream_options" in body else "", heard)
    async with (
        completing(redis, "a", complete, engine="openai"),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        body = {"model": "m", "prompt": "hi", "stream": True}
        options = {"stream_options": {"include_usage": True}}
        assert (await door.post(TEXTS, json=body | options)).status_code == 400
        assert len(heard) == 1
        assert (await door.post(TEXTS, json=body)).status_code == 200


def test_of_engines_that_refuse_members_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr("app.door.door.MAX_REFUSING", 2)
    door = create_app(RouterSettings()).replica.door
    for engine in (1, 2, 3):
        door.note_refused("default", Incarnation(engine), frozenset({"prompt"}))
    left = [engine for engine in (1, 2, 3) if door.refused_by("default", Incarnation(engine))]
    assert left == [2, 3]
    assert not door.refused_by("other", Incarnation(3))
