"""Agents that are killed or frozen while their engines are well, as processes of their own."""

import asyncio
from collections import Counter
from contextlib import ExitStack, asynccontextmanager

import pytest

from tests.door.conftest import replica, until_serving
from tests.door.test_away_agents import away, until_away
from tests.e2e.engines import agent, engine, overlap
from tests.eventually import eventually
from tests.redis_servers import stopped

"""Processes take seconds to start."""


class Fleet:
    """Engines `e0`, `e1` …, each with an agent beside it."""

    def __init__(self, redis_url, memory, number):
        self.redis_url, self.memory = redis_url, memory
        self.engines = []
        self.agents = []
        self._number = number
        self._stack = ExitStack()

    def __enter__(self):
        for number in range(self._number):
            one = self._stack.enter_context(engine())
            self.engines.append(one)
            self.agents.append(self.begin_agent(number))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def begin_agent(self, number, *more):
        url = self.engines[number].url
        beside = agent(url, self.redis_url, self.memory, worker_id=f"e{number}", more=more)
        return self._stack.enter_context(beside)


async def ask(client, prompt):
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return await client.post("/v1/completions", json=body)


class Clients:
    """Ask without a pause, until told to end; statuses: what came of it."""

    def __init__(self, client):
        self.statuses = Counter[int]()
        self._client = client

    async def run(self, number):
        while True:
            answer = await ask(self._client, [number, *range(60)])
            self.statuses[answer.status_code] += 1


@asynccontextmanager
async def asking(client):
    clients = Clients(client)
    tasks = [asyncio.create_task(clients.run(number)) for number in range(4)]
    try:
        yield clients
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
async def test_no_request_fails_while_all_agents_are_killed_and_begun_anew(
    one_redis_server, tmp_path
):
    url = one_redis_server.url
    with Fleet(url, tmp_path, 2) as fleet:
        async with replica(url) as client:
            await until_serving(client, 2)
            async with asking(client) as clients:
                for beside in fleet.agents:
                    beside.popen.kill()
                await until_away(client, "e0", "e1")
                so_far = clients.statuses.total()
                await eventually(lambda: total(clients), lambda n: n > so_far + 50)
                async with replica(url) as late:
                    await until_serving(late, 2)
                    assert (await ask(late, [1, 2, 3])).status_code == 200
                    assert await away(late) == ["e0", "e1"]
                await asyncio.to_thread(fleet.begin_agent, 0)
                await until_away(client, "e1")
                await asyncio.to_thread(fleet.begin_agent, 1)
                await until_away(client)
                await eventually(lambda: total(clients), lambda n: n > so_far + 100)
            assert clients.statuses.keys() == {200}


@pytest.mark.slow
async def test_a_frozen_agent_goes_on_as_it_was_and_knows_what_its_engine_holds(
    one_redis_server, tmp_path
):
    url, prompt = one_redis_server.url, list(range(100, 260))
    with Fleet(url, tmp_path, 1) as fleet:
        async with replica(url) as client:
            await until_serving(client, 1)
            incarnation = await incarnations(client)
            with stopped(fleet.agents[0].popen.pid):
                await until_away(client, "e0")
                assert (await ask(client, prompt)).status_code == 200
                await eventually(lambda: overlap(client, prompt, "e0"), lambda n: n >= 9)
            await until_away(client)
            assert await incarnations(client) == incarnation

            async def trusted():
                return (await ask(client, prompt)).headers["x-kvroute-trust"]

            await eventually(trusted, lambda trust: trust == "exact")
            await eventually(lambda: overlap(client, prompt, "e0"), lambda n: n >= 9)


@pytest.mark.slow
async def test_an_agent_that_says_goodbye_takes_its_worker_along_unless_the_engine_is_kept(
    one_redis_server, tmp_path
):
    url, prompt = one_redis_server.url, list(range(100, 260))
    with Fleet(url, tmp_path, 2) as fleet:
        async with replica(url) as client:
            await until_serving(client, 2)
            await asyncio.to_thread(fleet.agents[1].end)
            await eventually(lambda: incarnations(client), lambda found: list(found) == ["e0"])
            kept = await asyncio.to_thread(fleet.begin_agent, 1, "--keep-engine")
            await until_serving(client, 2)
            await asyncio.to_thread(fleet.agents[0].end)
            assert (await ask(client, prompt)).status_code == 200
            await eventually(lambda: overlap(client, prompt, "e1"), lambda n: n >= 9)
            await asyncio.to_thread(kept.end)
            await until_away(client, "e1")
            assert (await ask(client, prompt)).status_code == 200
            assert await overlap(client, prompt, "e1") >= 9
            await asyncio.to_thread(fleet.begin_agent, 1)
            await until_away(client)
            await eventually(lambda: overlap(client, prompt, "e1"), lambda n: n >= 9)


@pytest.mark.slow
async def test_an_engine_that_is_killed_after_its_agent_is_gone(one_redis_server, tmp_path):
    url = one_redis_server.url
    with Fleet(url, tmp_path, 2) as fleet:
        async with replica(url) as client:
            await until_serving(client, 2)
            for beside in fleet.agents:
                beside.popen.kill()
            await until_away(client, "e0", "e1")
            async with asking(client) as clients:
                fleet.engines[0].popen.kill()
                await eventually(lambda: incarnations(client), lambda found: list(found) == ["e1"])
            # Those that it had got half of cannot be asked again of another.
            assert clients.statuses[503] == 0


async def total(clients):
    return clients.statuses.total()


async def incarnations(client):
    found = (await client.get("/v1/workers")).json()["workers"]
    return {one["worker_id"]: one["incarnation"] for one in found}
