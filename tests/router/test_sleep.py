"""Requests that find no worker where a planner starts one for them."""

import asyncio

import pytest

from app.core.errors import NoWorkers
from app.policy.decision import RouteRequest
from app.router.prompt import Prompt
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers
from tests.router.test_router import PROMPT, request, running

LATE = r"no worker has started within 0\.1 s"
WAITS = {"wait_queue": 10, "wait_timeout_s": 60.0}


@pytest.fixture
async def workers(redis):
    """A fleet whose last worker has left."""
    fleet = FakeWorkers(redis)
    await fleet.register("w1")
    await fleet.retire("w1")
    return fleet


async def planner_says(redis, replica, *, wakes):
    seconds, _ = await redis.time()
    told = {"wakes": int(wakes), "until_ms": 1000 * (seconds + 60)}
    await redis.hset(KEYS["planner"], mapping=told)

    async def sleeps():
        return replica.fleet.sleeps

    await eventually(sleeps, lambda does: does is wakes)


@pytest.mark.parametrize("is_tokenized", [False, True])
async def test_a_request_waits_in_the_line_until_a_worker_has_started(
    one_redis_server, redis, workers, is_tokenized
):
    async with running(one_redis_server.url, **WAITS) as replica:
        await planner_says(redis, replica, wakes=True)
        prompt = Prompt(len(PROMPT), tokens=PROMPT) if is_tokenized else None
        going = asyncio.create_task(replica.route(request("r1"), prompt))
        await eventually(lambda: redis.exists(KEYS["flows"]))
        assert not going.done()
        await workers.register("w2")
        assert str((await going).worker.key) == "w2:0"
        assert list(await workers.reserved()) == ["r1"]


async def test_a_request_is_refused_once_no_worker_has_come_in_time(
    one_redis_server, redis, workers
):
    async with running(one_redis_server.url, wait_queue=10, wait_timeout_s=0.1) as replica:
        await planner_says(redis, replica, wakes=True)
        with pytest.raises(NoWorkers, match=LATE):
            await replica.route(request("r1"))
        with pytest.raises(NoWorkers, match=LATE):
            await replica.wake(RouteRequest("r", []))


async def test_without_a_planner_that_would_start_one_a_request_is_refused_at_once(
    one_redis_server, redis, workers
):
    async with running(one_redis_server.url, **WAITS) as replica:
        await planner_says(redis, replica, wakes=False)
        with pytest.raises(NoWorkers, match="no worker is alive"):
            await replica.route(request("r1"))
    async with running(one_redis_server.url) as replica:  # where nobody may wait
        await planner_says(redis, replica, wakes=True)
        with pytest.raises(NoWorkers, match="no worker is alive"):
            await replica.route(request("r2"))


async def test_a_caller_that_hangs_up_leaves_the_line(one_redis_server, redis, workers):
    async with running(one_redis_server.url, **WAITS) as replica:
        await planner_says(redis, replica, wakes=True)
        going = asyncio.create_task(replica.wake(RouteRequest("r", [])))
        await eventually(lambda: redis.exists(KEYS["flows"]))
        going.cancel()
        await eventually(lambda: redis.exists(KEYS["flows"]), lambda found: not found)


async def test_workers_that_are_full_do_not_sleep(one_redis_server, redis, workers):
    async with running(one_redis_server.url, **WAITS) as replica:
        await workers.register("w2", max_requests=1)
        await workers.occupy("w2", "x", prefill_s=100.0)
        async with asyncio.timeout(10):
            await replica.wake(RouteRequest("r", []))
