"""Models that sleep, as clients of the OpenAI API see them."""

from __future__ import annotations

import asyncio

import httpx
from aiohttp import web
from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from app.state import models as directory
from app.state.scripts import ScriptRunner
from tests.door.conftest import completing, models, replica
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE


async def complete(_: web.Request) -> web.Response:
    return web.json_response({"choices": [{"text": "x"}]})


async def planner_wakes(redis: Redis) -> None:
    seconds, _ = await redis.time()
    await redis.hset(KEYS["planner"], mapping={"wakes": 1, "until_ms": 1000 * (seconds + 60)})


async def asleep(door: httpx.AsyncClient) -> dict[str, bool]:
    return {card["id"]: card["asleep"] for card in (await door.get("/v1/models")).json()["data"]}


async def test_a_model_that_sleeps_is_listed_as_such_and_clients_can_read_it(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    import openai  # here, as it takes half a second

    await planner_wakes(redis)
    async with replica(one_redis_server.url, wait_queue=10) as door:
        async with completing(redis, "a", complete) as worker:
            await eventually(lambda: asleep(door), lambda found: found == {"m": False})
            assert (await scrape(door))("asleep") == 0
            await ScriptRunner(redis, 5.0).one(directory.announce(NAMESPACE, ["m"]))
            await worker.retire()
            await eventually(lambda: asleep(door), lambda found: found == {"m": True})
        assert (await scrape(door))("asleep") == 1
        assert (await door.get("/v1/models/m")).json()["asleep"] is True
        assert (await door.get("/v1/models/other")).status_code == 404
        async with openai.AsyncOpenAI(base_url=f"{door.base_url}/v1/", api_key="any") as client:
            [listed] = [model async for model in client.models.list()]
            assert (listed.id, listed.object) == ("m", "model")
            assert (await client.models.retrieve("m")).id == "m"


async def test_who_wakes_a_model_waits_as_its_tenant_and_priority(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    await planner_wakes(redis)
    async with replica(one_redis_server.url, wait_queue=10, wait_timeout_s=60.0) as door:
        async with completing(redis, "a", complete) as worker:
            await eventually(lambda: models(door), lambda found: found == ["m"])
            await ScriptRunner(redis, 5.0).one(directory.announce(NAMESPACE, ["m"]))
            await worker.retire()
            await eventually(lambda: asleep(door), lambda found: found == {"m": True})
        body = {"model": "m", "prompt": [1, 2, 3]}
        asks = {"x-tenant-id": "acme", "x-priority": "high"}
        asking = asyncio.create_task(door.post("/v1/completions", json=body, headers=asks))
        flows = await eventually(lambda: redis.zrange(KEYS["flows"], 0, -1))
        assert flows == [b"high:acme"]
        async with completing(redis, "b", complete):
            assert (await asking).status_code == 200


async def test_without_a_planner_a_model_without_a_worker_is_not_listed(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    async with (
        replica(one_redis_server.url, wait_queue=10) as door,
        completing(redis, "a", complete) as worker,
    ):
        await eventually(lambda: models(door), lambda found: found == ["m"])
        await worker.retire()
        await eventually(lambda: models(door), lambda found: not found)
