"""Engines that tell nothing of what they cache: what was routed there counts, for them alone."""

import httpx
import pytest

from tests.e2e.engines import agent_here, engine
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from tests.fakes.said import TEXT

LEASE_S = 60.0
PROMPT = list(range(100, 180))
"""Five blocks."""


async def workers_of(router):
    answer = (await router.get("/v1/workers")).json()
    return {worker["worker_id"]: worker for worker in answer["workers"]}


async def ask(router, model, prompt):
    asked = {"model": model, "prompt": prompt, "max_tokens": 1}
    answer = await router.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer


def told(answer):
    return tuple(answer.headers[f"x-kvroute-{name}"] for name in ("worker", "overlap", "trust"))


@pytest.mark.slow
async def test_a_fleet_of_both_kinds_knows_of_each_what_can_be_known(one_redis_server, tmp_path):
    url = one_redis_server.url
    with engine() as tells, engine(publishes=False) as silent:
        async with (
            agent_here(tells.url, url, tmp_path, "exact", lease_ttl_s=LEASE_S),
            agent_here(silent.url, url, tmp_path, "guessed", lease_ttl_s=LEASE_S),
            started_replica(url, show_decision=True) as router,
        ):

            async def registered():
                return await workers_of(router)

            workers = await eventually(registered, lambda seen: len(seen) == 2)
            assert workers["exact"]["trust"] == "exact"
            assert "start it with --kv-events-config" in workers["guessed"]["trust_cause"]

            async def held(worker):
                """Blocks that a worker is taken to hold, and how surely."""
                other = {"exact": "guessed", "guessed": "exact"}[worker]
                asked = {"token_ids": PROMPT, "reserve": False, "exclude": [other]}
                answer = (await router.post("/v1/route", json=asked)).json()
                return sum(answer["overlap_blocks"].values()), answer["trust"]

            for worker, process in (("exact", tells), ("guessed", silent)):
                assert (await held(worker))[0] == 0
                async with httpx.AsyncClient(base_url=process.url) as beside:
                    await ask(beside, "m", PROMPT)  # by whom no router knows
            await eventually(lambda: held("exact"), lambda seen: seen == (5, "exact"))
            assert await held("guessed") == (0, "approximate")

            elsewhere = [*PROMPT[:64], *range(1, 60)]
            asked = {"token_ids": elsewhere, "exclude": ["exact"]}
            assert (await router.post("/v1/route", json=asked)).json()["worker_id"] == "guessed"
            await eventually(lambda: held("guessed"), lambda seen: seen == (4, "approximate"))


@pytest.mark.slow
async def test_any_server_of_openais_api_is_a_worker(one_redis_server, tmp_path):
    redis_url = one_redis_server.url
    async with (
        fake_engine(kind="openai") as engine,
        agent_here(engine.url, redis_url, tmp_path, "plain", lease_ttl_s=LEASE_S),
        started_replica(redis_url, show_decision=True) as router,
    ):

        async def registered():
            return await workers_of(router)

        workers = await eventually(registered)
        assert workers["plain"]["engine"] == "openai openai"
        assert workers["plain"]["trust"] == "approximate"
        answer = await ask(router, "m", "once upon a time")
        assert answer.json()["choices"][0]["text"] == TEXT
        assert engine.bodies[-1]["prompt"] == "once upon a time"
        assert told(answer)[0] == "plain:0"
