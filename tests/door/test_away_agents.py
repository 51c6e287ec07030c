"""Workers whose agents are away: their engines answer, so they stay in service."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from app.core.keys import MODELS
from app.core.roles import Role
from tests.door.conftest import completing, replica, sick_worker, until_serving
from tests.door.sick_fleet import sick_fleet, statuses
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.fakes.faults import WELL, Faults

PROMPT = list(range(200))


async def ask(client, prompt=PROMPT):
    body = {"model": "m", "prompt": prompt, "max_tokens": 2}
    return await client.post("/v1/completions", json=body)


async def away(client):
    """Names of the workers in service whose agents are away."""
    found = (await client.get("/v1/workers")).json()["workers"]
    return sorted(one["worker_id"] for one in found if one["state"] == "away")


async def until_away(client, *names):
    await eventually(lambda: away(client), lambda found: found == list(names))


async def served(client):
    found = (await client.get("/v1/workers")).json()["workers"]
    return sorted(one["worker_id"] for one in found)


async def end_leases(redis, *incarnations, left_ms=600):
    """What comes of it when agents renew no more. None: of all workers."""
    seconds, micros = await redis.time()
    ends_ms = int(seconds) * 1000 + int(micros) // 1000 + left_ms
    incs = incarnations or await redis.zrange(KEYS["leases"], 0, -1)
    await redis.zadd(KEYS["leases"], dict.fromkeys(incs, ends_ms))


@asynccontextmanager
async def fleet(redis, url, number=2, **about):
    """Engines `e0`, `e1` … without agents, and a client of a replica."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(sick_worker(redis, f"e{n}", **about))
            for n in range(number)
        ]
        client = await stack.enter_async_context(replica(url, wait_queue=0))
        await until_serving(client, number)
        yield engines, client


async def test_no_request_fails_when_all_agents_go_at_once(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url) as (_, client):
        await end_leases(redis)
        answers = []
        while await away(client) != ["e0", "e1"]:
            answers.append(await ask(client))
        answers += [await ask(client) for _ in range(20)]
        assert statuses(answers).keys() == {200}
        assert answers[-1].headers["x-kvroute-trust"] == "approximate"
        ready = await client.get("/readiness")
        assert ready.status_code == 200
        assert "agents: 2 of 2 are away" in ready.text
        metrics = (await client.get("/metrics")).text
        assert 'kvroute_worker_agent_away_seconds{worker="e1:0"}' in metrics
        shown = (await client.get("/console/api/workers")).json()
        state = shown["columns"].index("state")
        assert {row[state] for row in shown["rows"]} == {"away"}


async def test_blocks_of_a_worker_whose_agent_is_away_are_those_that_were_routed_there(
    redis, one_redis_server
):
    async with fleet(redis, one_redis_server.url) as (engines, client):
        await end_leases(redis)
        await until_away(client, "e0", "e1")
        first = await ask(client)
        assert first.headers["x-kvroute-overlap"].startswith("0/")

        async def again():
            return not (await ask(client)).headers["x-kvroute-overlap"].startswith("0/")

        await eventually(again, bool)
        before = [engine.requests["/v1/completions"] for engine in engines]
        assert (await ask(client)).headers["x-kvroute-worker"] == first.headers["x-kvroute-worker"]
        assert sum(engine.requests["/v1/completions"] for engine in engines) == sum(before) + 1


async def test_a_slot_is_promised_once_while_the_agent_is_away(redis, one_redis_server):
    """By two replicas, the second of which starts meanwhile."""
    url = one_redis_server.url
    async with fleet(redis, url, 1, max_requests=1, prefill_s=1.0) as (engines, client):
        await end_leases(redis)
        await until_away(client, "e0")
        async with replica(url, wait_queue=0) as other:
            await until_serving(other, 1)
            assert await away(other) == ["e0"]
            answers = await asyncio.gather(
                *(ask(one, [n] * 50) for n in range(4) for one in (client, other))
            )
        assert statuses(answers) == {200: 1, 429: 7}
        assert engines[0].requests["/v1/completions"] == 1


async def test_a_replica_that_starts_alone_finds_workers_whose_leases_lapsed_long_ago(
    redis, one_redis_server
):
    url = one_redis_server.url
    async with sick_worker(redis, "e0"), sick_worker(redis, "e1"):
        await end_leases(redis, left_ms=-3_600_000)
        async with replica(url) as client:

            async def ready():
                return (await client.get("/readiness")).status_code

            await eventually(ready, lambda status: status == 200)
            assert (await ask(client)).status_code == 200
            await until_away(client, "e0", "e1")


@pytest.mark.slow
async def test_an_engine_that_ends_while_its_agent_is_away_is_gone(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url) as (engines, client):
        await end_leases(redis)
        await until_away(client, "e0", "e1")
        engines[0].faults = Faults(away_s=3600.0)
        await eventually(lambda: served(client), lambda found: found == ["e1"])
        assert statuses([await ask(client) for _ in range(5)]) == {200: 5}
        engines[0].faults = WELL


@pytest.mark.slow
async def test_an_engine_that_is_away_for_a_moment_is_back_without_its_agent(
    redis, one_redis_server
):
    async with fleet(redis, one_redis_server.url, 1) as (engines, client):
        await end_leases(redis)
        await until_away(client, "e0")
        engines[0].faults = Faults(away_s=4.0)
        await eventually(lambda: served(client), lambda found: not found)
        await until_away(client, "e0")
        assert (await ask(client)).status_code == 200


async def test_what_has_got_the_address_of_an_engine_is_not_taken_for_it(redis, one_redis_server):
    """As when a pod's address is given to one with another model."""
    async with (
        sick_worker(redis, "e0"),
        sick_worker(redis, "e1", models=("m",)) as other,
        replica(one_redis_server.url) as client,
    ):
        await until_serving(client, 2)
        other._models = ("another",)
        await end_leases(redis)
        await until_away(client, "e0")
        await eventually(lambda: served(client), lambda found: found == ["e0"])


async def test_an_engine_that_says_that_it_is_not_well_is_gone(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url) as (engines, client):
        engines[0].faults = Faults(health_status=503)
        await end_leases(redis)
        await until_away(client, "e1")
        await eventually(lambda: served(client), lambda found: found == ["e1"])


@pytest.mark.slow
async def test_bytes_that_come_are_life_where_no_answer_is_had_in_time(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url, 1, token_s=0.1) as (engines, client):
        engines[0].faults = Faults(health_s=60.0)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 80, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            await end_leases(redis)
            await until_away(client, "e0")
            text = "".join([piece async for piece in pieces])
        assert "[DONE]" in text
        assert "error" not in text


@pytest.mark.slow
async def test_engines_that_are_late_to_answer_a_look_are_not_given_up(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url) as (engines, client):
        for engine in engines:
            engine.faults = Faults(health_s=3.0)
        await end_leases(redis)
        await until_away(client, "e0", "e1")

        async def shortest_s():
            assert await served(client) == ["e0", "e1"]
            found = (await client.get("/v1/workers")).json()["workers"]
            return float(min(one["since_s"] for one in found))

        await eventually(shortest_s, lambda age_s: age_s > 5.0)  # longer than a lease


async def test_one_that_is_away_is_dearer_than_those_that_are_heard_of(redis, one_redis_server):
    async with fleet(redis, one_redis_server.url, 3, prefill_s=0.05) as (engines, client):
        leases = await redis.zrange(KEYS["leases"], 0, -1)
        first = min(leases, key=int)
        await end_leases(redis, first)
        await until_away(client, "e0")
        asked = {"token_ids": PROMPT, "reserve": False, "explain": True}
        candidates = (await client.post("/v1/route", json=asked)).json()["candidates"]
        assert [one["terms"]["agent_away"] > 0 for one in candidates] == [True, False, False]
        answers = await asyncio.gather(*(ask(client, [n] * 50) for n in range(60)))
        assert statuses(list(answers)) == {200: 60}
        assert engines[0].requests["/v1/completions"] > 0
        trust = {a.headers["x-kvroute-worker"]: a.headers["x-kvroute-trust"] for a in answers}
        assert trust == {"e0:0": "approximate", "e1:0": "exact", "e2:0": "exact"}


async def test_pairs_go_on_while_agents_are_away(redis, one_redis_server):
    """Each is the only one of its role."""
    url = one_redis_server.url
    about = {"kv_transfer": "test"}
    async with (
        sick_worker(redis, "p", role=Role.PREFILL, **about),
        sick_worker(redis, "d", role=Role.DECODE, **about),
        replica(url) as client,
    ):
        await until_serving(client, 2)
        await end_leases(redis)
        await until_away(client, "d", "p")
        workers = (await client.get("/v1/workers")).json()["workers"]
        assert {one["role"] for one in workers} == {"prefill", "decode"}
        assert (await ask(client)).status_code == 200


async def test_names_of_models_stay_in_the_directory_while_all_agents_are_away(
    redis, one_redis_server
):
    async with fleet(redis, one_redis_server.url) as (_, client):
        await redis.delete(MODELS)
        await end_leases(redis)
        await until_away(client, "e0", "e1")
        found = await eventually(lambda: redis.hget(MODELS, "m"), bool)
        assert found.startswith(b"test ")


async def test_nobody_is_vouched_for_where_that_is_off(redis, one_redis_server):
    async with (
        sick_worker(redis, "e0"),
        replica(one_redis_server.url, agent_away_s=0.0) as client,
    ):
        await until_serving(client, 1)
        await end_leases(redis)
        await eventually(lambda: served(client), lambda found: not found)
        assert (await ask(client)).status_code == 503


async def test_an_engine_without_the_paths_that_are_looked_at_lives_by_answering(
    redis, one_redis_server
):
    async def never(_):
        raise AssertionError("nobody asks")

    async with (
        completing(redis, "plain", never),
        replica(one_redis_server.url) as client,
    ):
        await until_serving(client, 1)
        await end_leases(redis)
        await until_away(client, "plain")


@pytest.mark.slow
async def test_a_sick_worker_whose_agent_is_there_is_not_taken_for_one_whose_agent_is_away(
    redis, one_redis_server
):
    """Its agent leaves the lease lapsed, again and again."""
    async with sick_fleet(redis, one_redis_server.url, engines=3) as sick:
        sick.fall_ill(Faults(status=500))
        seen = set[str]()

        async def paused():
            seen.update(await away(sick.doors[0]))
            await sick.ask_many(3, at_once=3)
            found = (await sick.doors[0].get("/v1/workers")).json()["paused"]
            return any((one["until_s"] or 0) > 3 for one in found)

        await eventually(paused)
        for _ in range(40):
            seen.update(await away(sick.doors[0]))
            await sick.ask()
        assert not seen
