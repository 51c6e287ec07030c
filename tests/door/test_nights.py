"""What is slow or wrong without failing is named within WITHIN_S, and only then."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from app.state.scripts import ScriptRunner
from tests.door.sick_fleet import COMPLETIONS, asked, sick_fleet
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running
from tests.fakes.faults import Faults

WITHIN_S = 15.0
NIGHTS = {
    "slow": (Faults(prefill_s=2.5), 1, "m", "KvrouteFirstTokensLate"),
    "blame": (Faults(status=401), 3, "m", "KvrouteRequestsFail"),
    "typo": (Faults(), 0, "mm", "KvrouteModelsUnknown"),
}
"""What befalls how many of three engines, what a third of clients ask for, and what is found."""


async def findings(door):
    """What a replica finds amiss in requests, and what it advises."""
    overview = (await door.get("/console/api/overview")).json()
    return {
        each["name"]: each["remedy"]
        for each in overview["findings"]
        if each["name"].startswith("Kvroute")
    }


async def listed(door):
    """Ids of the workers."""
    return {each["worker_id"] for each in (await door.get("/v1/workers")).json()["workers"]}


@asynccontextmanager
async def asking(fleet, models):
    """While as many clients ask as there are names of models in the list."""

    async def client(number):
        while True:
            number += len(models)
            body = asked(COMPLETIONS, stream=True) | {"model": models[number % len(models)]}
            await fleet.doors[0].post(COMPLETIONS, json=body)
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(client(number)) for number in range(len(models))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("night", NIGHTS)
async def test_what_is_amiss_is_named_in_time_and_only_then(one_redis_server, redis, night):
    faults, number, model, name = NIGHTS[night]
    async with sick_fleet(redis, one_redis_server.url) as fleet:
        async with asking(fleet, ["m"] * 6):
            await asyncio.sleep(3.0)
            assert name not in await findings(fleet.doors[0])
        fleet.fall_ill(faults, number)
        async with asking(fleet, [model, "m", "m"] * 2):
            found = await eventually(
                lambda: findings(fleet.doors[0]), lambda found: name in found, within_s=WITHIN_S
            )
    assert not any("add workers" in remedy for remedy in found.values())


async def test_a_worker_that_comes_and_goes_is_named(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, engines=1) as fleet:
        for _ in range(2):
            assert "KvrouteWorkersRestart" not in await findings(fleet.doors[0])
            agent = fake_agent(ScriptRunner(redis, 5.0), KEYS, "loop", models=("m",))
            async with running(agent):
                await eventually(lambda: listed(fleet.doors[0]), lambda names: "loop" in names)
            await agent.stop()
        await eventually(
            lambda: findings(fleet.doors[0]),
            lambda found: "KvrouteWorkersRestart" in found,
            within_s=WITHIN_S,
        )


async def test_a_fleet_that_is_too_small_is_named_until_it_has_less_to_do(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, engines=2) as fleet:
        [door] = fleet.doors

        async def routed(number):
            body = {"token_ids": [number] * 60_000, "request_id": f"r{number}"}
            answer = await door.post("/v1/route", json=body)
            assert answer.status_code == 200, answer.text
            return set(await findings(door))

        # While one of two has nothing to do, there is no queue.
        assert "KvrouteQueuesLong" not in await routed(1)
        numbers = iter(range(2, 100))
        await eventually(lambda: routed(next(numbers)), lambda seen: "KvrouteQueuesLong" in seen)
        for number in range(1, next(numbers)):
            await door.delete(f"/v1/requests/r{number}")
        await eventually(
            lambda: findings(door), lambda seen: "KvrouteQueuesLong" not in seen, within_s=WITHIN_S
        )


async def test_a_router_that_is_short_of_cpu_is_named(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, engines=1) as fleet:

        async def held():
            while True:
                time.sleep(0.1)  # noqa: ASYNC251 - as a process does that gets no CPU
                await asyncio.sleep(0)

        async def named():
            holding = asyncio.create_task(held())
            await asyncio.sleep(1.0)
            holding.cancel()
            return await findings(fleet.doors[0])

        found = await eventually(
            named, lambda seen: "KvrouteLoopLate" in seen, within_s=2 * WITHIN_S
        )
        assert "core" in found["KvrouteLoopLate"]
