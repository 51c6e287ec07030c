"""Redis is emptied under requests, and workers register again one after another, or not at all."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from redis.asyncio import Redis

from app.router import fleet
from tests.door.conftest import registered, replica, sick_worker, until_serving
from tests.eventually import eventually
from tests.fakes.engine import FakeEngine

BY_REDIS, DEGRADED = {(200, "Redis")}, {(200, "degraded")}


@dataclass(slots=True)
class Emptied:
    """Workers of which Redis knows no more, by the names of their engines."""

    client: httpx.AsyncClient
    redis: Redis
    engines: dict[str, FakeEngine]

    async def back(self, *names):
        for name in names:
            await registered(self.redis, name, self.engines[name].url)

    async def answers(self, number=12):
        """Statuses, and what routers went by."""
        got = set()
        for n in range(number):
            body = {"model": "m", "prompt": [n + 1] * 40, "max_tokens": 1}
            answer = await self.client.post("/v1/completions", json=body)
            trust = answer.headers.get("x-kvroute-trust", answer.text)
            got.add((answer.status_code, "Redis" if trust in ("exact", "bound") else trust))
        return got

    async def readiness(self):
        return (await self.client.get("/readiness")).status_code

    async def until_known(self):
        async def look():
            return await self.answers(3) == BY_REDIS

        await eventually(look)


@asynccontextmanager
async def emptied(redis, url):
    about = {"token_s": 0.0}
    async with (
        sick_worker(redis, "a", **about) as a,
        sick_worker(redis, "b", **about) as b,
        sick_worker(redis, "c", **about) as c,
        replica(url) as client,
    ):
        await until_serving(client, 3)
        world = Emptied(client, redis, {"a": a, "b": b, "c": c})
        assert await world.answers() == BY_REDIS
        await redis.flushall()
        yield world


async def test_the_last_view_serves_until_all_workers_have_registered_again(
    redis, one_redis_server
):
    async with emptied(redis, one_redis_server.url) as world:
        assert (await world.answers(), await world.readiness()) == (DEGRADED, 200)
        await world.back("a")
        assert (await world.answers(), await world.readiness()) == (DEGRADED, 200)
        await world.back("b", "c")
        await world.until_known()


async def test_so_it_does_if_the_first_is_back_before_a_router_has_looked(redis, one_redis_server):
    async with emptied(redis, one_redis_server.url) as world:
        await world.back("c")
        before = {name: len(engine.asked) for name, engine in world.engines.items()}
        assert await world.answers() == DEGRADED
        after = {name: len(engine.asked) for name, engine in world.engines.items()}
        assert all(after[name] > before[name] for name in after)


async def test_a_worker_that_does_not_come_back_is_gone_after_a_while(
    redis, one_redis_server, monkeypatch
):
    monkeypatch.setattr(fleet, "RECOVERY_S", 0.5)
    async with emptied(redis, one_redis_server.url) as world:
        await world.back("a", "b")
        await world.until_known()
        assert len((await world.client.get("/v1/workers")).json()["workers"]) == 2


async def test_a_view_of_which_nothing_comes_back_is_not_kept_for_ever(
    redis, one_redis_server, monkeypatch
):
    async with emptied(redis, one_redis_server.url) as world:
        assert await world.answers() == DEGRADED
        monkeypatch.setattr(fleet, "KEPT_S", 0.0)
        await eventually(world.readiness, lambda status: status == 503)
        [(status, text)] = await world.answers(1)
        assert (status, "no_workers" in text) == (503, True)


async def test_a_worker_that_says_goodbye_is_gone_at_once(redis, one_redis_server):
    url = one_redis_server.url
    async with sick_worker(redis, "a"), sick_worker(redis, "b") as b, replica(url) as client:
        await until_serving(client, 2)
        world = Emptied(client, redis, {})
        assert await world.answers() == BY_REDIS
        await (await registered(redis, "b", b.url)).retire()
        before = len(b.asked)
        assert await world.answers() == BY_REDIS
        assert len(b.asked) == before
