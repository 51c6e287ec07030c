"""Texts that no engine would take are refused before they are tokenized, at little cost."""

import threading

import pytest
from aiohttp import web

from app.door.prompts import rendering
from tests.door.conftest import completing, replica, until_serving
from tests.door.test_answers import LLAMA, counted
from tests.eventually import eventually

MAX_TOKENS = 1000
LONG = "word after word " * 20_000


async def until_rendered(door):
    """Prompts, by the router itself."""
    await until_serving(door, 1)

    async def rendered():
        await door.post("/v1/completions", json={"model": "m", "prompt": "x"})
        return await counted(door, 'tokens_from_total{model="m",source="router"}')

    await eventually(rendered, lambda number: number > 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_as_engines_do(one_redis_server, redis, path, body):
    asked = []

    async def complete(request):
        asked.append(len(await request.read()))
        return web.json_response({"choices": []})

    about = {"tokenizer": str(LLAMA), "max_model_len": MAX_TOKENS}
    async with (
        completing(redis, "a", complete, **about),
        replica(one_redis_server.url) as door,
    ):
        await until_rendered(door)
        asked.clear()
        answer = await door.post(path, json={"model": "m", **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 1000 tokens" in error["message"]
        assert asked == []


CALLED = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": LONG}}
OF_MESSAGES = {"messages": [{"role": "assistant", "content": [CALLED]}], "max_tokens": 1}
OF_RESPONSES = {"input": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body", "converts"),
    [
        ("/v1/messages", OF_MESSAGES, "chat_of_messages"),
        ("/v1/responses", OF_RESPONSES, "chat_of_response"),
    ],
)
async def test_a_large_body_of_another_dialect_becomes_a_chat_in_a_thread(
    one_redis_server, redis, monkeypatch, path, body, converts
):
    here, convert = threading.get_ident(), getattr(rendering, converts)
    seen = []

    def noted(*args):
        seen.append(threading.get_ident() == here)
        return convert(*args)

    async def complete(_):
        return web.json_response({"output": [], "content": []})

    monkeypatch.setattr(rendering, converts, noted)
    about = {"tokenizer": str(LLAMA), "engine": "vllm 0.32.0"}
    async with (
        completing(redis, "a", complete, path=path, **about),
        replica(one_redis_server.url) as door,
    ):
        await until_rendered(door)
        small = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "input": "hi"}
        for asked in (small, body):
            assert (await door.post(path, json={"model": "m", **asked})).status_code == 200
    assert seen == [True, False]
