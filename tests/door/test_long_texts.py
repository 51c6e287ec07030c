"""Texts that no engine would take are refused before they are tokenized, at little cost."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from tests.door.conftest import completing, replica, until_serving
from tests.door.test_answers import LLAMA, counted
from tests.eventually import eventually

MAX_TOKENS = 1000
LONG = "word after word " * 20_000


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
        await until_serving(door, 1)

        async def rendered() -> float:
            await door.post("/v1/completions", json={"model": "m", "prompt": "x"})
            return await counted(door, 'tokens_from_total{model="m",source="router"}')

        await eventually(rendered, lambda number: number > 0)
        asked.clear()
        answer: httpx.Response = await door.post(path, json={"model": "m", **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 1000 tokens" in error["message"]
        assert asked == []
