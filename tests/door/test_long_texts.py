"""Texts that no engine would take are refused before they are tokenized, at little cost."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis

from app.door import prompts
from app.local.redis_server import EmbeddedRedis
from tests.door.conftest import completing, replica, until_serving
from tests.door.test_answers import LLAMA, counted
from tests.eventually import eventually

MAX_TOKENS = 1000
LONG = "word after word " * 20_000


async def until_rendered(door: httpx.AsyncClient) -> None:
    """Prompts, by the router itself."""
    await until_serving(door, 1)

    async def rendered() -> float:
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
async def test_a_text_that_cannot_fit_is_refused_as_engines_do(
    one_redis_server: EmbeddedRedis, redis: Redis, path: str, body: dict[str, Any]
) -> None:
    asked: list[int] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(len(await request.read()))
        return web.json_response({"choices": []})

    about = {"tokenizer": str(LLAMA), "max_model_len": MAX_TOKENS}
    async with (
        completing(redis, "a", complete, **about),
        replica(one_redis_server.url) as door,
    ):
        await until_rendered(door)
        asked.clear()
        answer: httpx.Response = await door.post(path, json={"model": "m", **body})
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
    one_redis_server: EmbeddedRedis,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    converts: str,
) -> None:
    here, convert = threading.get_ident(), getattr(prompts, converts)
    seen: list[bool] = []

    def noted(*args: Any) -> Any:
        seen.append(threading.get_ident() == here)
        return convert(*args)

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"output": [], "content": []})

    monkeypatch.setattr(prompts, converts, noted)
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
