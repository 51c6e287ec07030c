"""Models that sleep, as clients of the OpenAI API see them."""

import asyncio

import pytest
from aiohttp import web

from app.state import models as directory
from app.state.scripts import ScriptRunner
from tests.door.conftest import completing, models, replica
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE


async def complete(_):
    return web.json_response({"choices": [{"text": "x"}]})


async def planner_wakes(redis):
    seconds, _ = await redis.time()
    await redis.hset(KEYS["planner"], mapping={"wakes": 1, "until_ms": 1000 * (seconds + 60)})


@pytest.fixture
async def sleeping_door(one_redis_server, redis):
    """A client of a replica whose only model, `m`, sleeps; prompts have at most 8 tokens."""
    await planner_wakes(redis)
    url, line = one_redis_server.url, {"wait_queue": 10, "wait_timeout_s": 600.0}
    async with replica(url, **line, max_prompt_tokens=8) as door:
        async with completing(redis, "a", complete) as worker:
            await eventually(lambda: sleeping(door), lambda found: found == {"m": False})
            await ScriptRunner(redis, 5.0).one(directory.announce(NAMESPACE, ["m"]))
            await worker.retire()
            await eventually(lambda: sleeping(door), lambda found: found == {"m": True})
        yield door


async def sleeping(door):
    return {card["id"]: card["asleep"] for card in (await door.get("/v1/models")).json()["data"]}


async def test_a_model_that_sleeps_is_listed_as_such_and_clients_can_read_it(
    one_redis_server, redis
):
    import openai  # here, as it takes half a second

    await planner_wakes(redis)
    async with replica(one_redis_server.url, wait_queue=10) as door:
        async with completing(redis, "a", complete) as worker:
            await eventually(lambda: sleeping(door), lambda found: found == {"m": False})
            assert (await scrape(door))("asleep") == 0
            await ScriptRunner(redis, 5.0).one(directory.announce(NAMESPACE, ["m"]))
            await worker.retire()
            await eventually(lambda: sleeping(door), lambda found: found == {"m": True})
        assert (await scrape(door))("asleep") == 1
        assert (await door.get("/v1/models/m")).json()["asleep"] is True
        assert (await door.get("/v1/models/other")).status_code == 404
        async with openai.AsyncOpenAI(base_url=f"{door.base_url}/v1/", api_key="any") as client:
            [listed] = [model async for model in client.models.list()]
            assert (listed.id, listed.object) == ("m", "model")
            assert (await client.models.retrieve("m")).id == "m"


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OF_TOKENS = {"model": "m", "prompt": [1] * 9}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"model": "m"}, 400),
        ("/v1/chat/completions", {"model": "m", "messages": []}, 400),
        ("/v1/chat/completions", {"model": "m", "messages": "hi"}, 400),
        ("/v1/chat/completions", {"model": "m", "messages": [{"content": "hi"}]}, 400),
        ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": "many"}, 400),
        ("/v1/chat/completions", CHAT | {"n": 0}, 400),
        ("/v1/chat/completions", CHAT | {"temperature": "hot"}, 400),
        ("/v1/chat/completions", CHAT | {"temperature": -1}, 400),
        ("/v1/chat/completions", CHAT | {"top_p": [1]}, 400),
        ("/v1/chat/completions", CHAT | {"presence_penalty": 3}, 400),
        ("/v1/chat/completions", CHAT | {"tools": 5}, 400),
        ("/v1/chat/completions", CHAT | {"stop": {"a": 1}}, 400),
        ("/v1/completions", {"model": "m"}, 400),
        ("/v1/completions", {"model": "m", "prompt": ""}, 400),
        ("/v1/completions", {"model": "m", "prompt": [-1, 2]}, 400),
        ("/v1/completions", OF_TOKENS, 400),  # too many
        ("/v1/messages", CHAT, 400),  # which needs a number of tokens
        ("/v1/responses", {"model": "m", "instructions": "hi"}, 400),
        ("/v1/embeddings", {"model": "m", "input": None}, 400),
        ("/v1/rerank", {"model": "m", "query": "a"}, 400),
        ("/v1/score", {"model": "m", "text_1": "a"}, 400),
        ("/tokenize", {"model": "m", "prompt": "hi"}, 503),
        ("/detokenize", {"model": "m", "tokens": [1]}, 503),
        ("/v1/messages/count_tokens", CHAT, 503),
        ("/v1/route", {"token_ids": [1, 2, 3, 4], "reserve": False}, 503),
        ("/find_best_worker", {"local_hashes": [1], "num_tokens": 4}, 503),
    ],
)
async def test_what_would_not_be_served_wakes_nobody(sleeping_door, redis, path, body, status):
    answer = await sleeping_door.post(path, json=body)
    assert answer.status_code == status, answer.text
    # Nobody has waited, whose ticket would be there until it is taken out.
    assert await redis.zrange(KEYS["flows"], 0, -1) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 1}),
        (
            "/v1/chat/completions",
            CHAT | {"n": 2, "temperature": "0.5", "top_p": 1, "stop": "x", "tools": None},
        ),
        ("/v1/completions", {"model": "m", "prompt": "hi"}),
        ("/v1/completions", {"model": "m", "prompt": ["hi", "there"]}),
        ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]]}),
        ("/v1/messages", CHAT | {"max_tokens": 1}),
        ("/v1/responses", {"model": "m", "input": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"model": "m", "input": [1, 2]}),
        ("/v1/embeddings", CHAT),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
        ("/v1/score", {"model": "m", "queries": "a", "documents": ["b"]}),
        ("/v1/route", {"token_ids": [1, 2, 3, 4]}),
    ],
)
async def test_what_would_be_served_wakes_a_model(sleeping_door, redis, path, body):
    asking = asyncio.create_task(sleeping_door.post(path, json=body))
    await eventually(lambda: redis.zrange(KEYS["flows"], 0, -1))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_who_wakes_a_model_waits_as_its_tenant_and_priority(sleeping_door, redis):
    body = {"model": "m", "prompt": [1, 2, 3]}
    asks = {"x-tenant-id": "acme", "x-priority": "high"}
    asking = asyncio.create_task(sleeping_door.post("/v1/completions", json=body, headers=asks))
    flows = await eventually(lambda: redis.zrange(KEYS["flows"], 0, -1))
    assert flows == [b"high:acme"]
    async with completing(redis, "b", complete):
        assert (await asking).status_code == 200


async def test_without_a_planner_a_model_without_a_worker_is_not_listed(one_redis_server, redis):
    async with (
        replica(one_redis_server.url, wait_queue=10) as door,
        completing(redis, "a", complete) as worker,
    ):
        await eventually(lambda: models(door), lambda found: found == ["m"])
        await worker.retire()
        await eventually(lambda: models(door), lambda found: not found)
