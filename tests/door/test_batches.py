"""A request of many prompts: its longest one must fit, and their sum is its load."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.door.conftest import completing, replica, until_serving
from tests.eventually import eventually

TEXT = "word " * 200  # some 250 tokens
POOL = {"kv_total_blocks": 100, "block_size": 16}  # which hold 1,600 tokens
BATCHES = {
    "texts": ("/v1/embeddings", {"input": [TEXT] * 300}),
    "lists of ids": ("/v1/embeddings", {"input": [[7] * 50] * 2048}),
    "prompts": ("/v1/completions", {"prompt": [TEXT] * 64, "max_tokens": 1}),
    "prompts of ids": ("/v1/completions", {"prompt": [[7] * 250] * 64, "max_tokens": 1}),
    "documents": ("/v1/rerank", {"query": "q", "documents": [TEXT] * 1000}),
    "one and many": ("/v1/score", {"text_1": "q", "text_2": [TEXT] * 64}),
    "pairs": ("/score", {"queries": ["q"] * 64, "documents": [TEXT] * 64}),
}


@asynccontextmanager
async def fleet(redis, url, path, goes_on):
    async def complete(_):
        await goes_on.wait()
        return web.json_response({"choices": [{"text": "x", "finish_reason": "stop"}]})

    async with completing(redis, "a", complete, path=path, **POOL), replica(url) as door:
        await until_serving(door, 1)
        yield door


@pytest.mark.parametrize(("path", "members"), BATCHES.values(), ids=list(BATCHES))
async def test_the_longest_part_must_fit_and_the_sum_is_the_load(
    path, members, redis, one_redis_server
):
    goes_on = asyncio.Event()
    body = {"model": "m", **members}
    num_parts = max(len(value) for value in members.values() if isinstance(value, list))
    async with fleet(redis, one_redis_server.url, path, goes_on) as door:
        asked = asyncio.create_task(door.post(path, json=body))

        async def load():
            [worker] = (await door.get("/v1/workers")).json()["workers"]
            return int(worker["prefill_tokens"])

        least = 40 * num_parts
        await eventually(load, lambda tokens: least < tokens < 10 * least)
        goes_on.set()
        assert (await asked).status_code == 200
        # One part that fits nowhere is refused, as it would be alone.
        name, parts = next((n, v) for n, v in reversed(members.items()) if isinstance(v, list))
        whole = TEXT * 7 if isinstance(parts[0], str) else [7] * 1601
        too_long = await door.post(path, json=body | {name: [*parts[1:], whole]})
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
