"""Clients of several replicas that compete at the same moment for the last slots."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from app.ops import verify
from app.state.connect import connect
from tests.edge.test_metrics import scrape
from tests.fake_worker import KEYS

CLIENTS = 200
REPLICAS = 4
PROMPT = list(range(1, 42))


async def route(client, request_id):
    """The worker's id, or the status code if there is none."""
    answer = await client.post("/v1/route", json={"token_ids": PROMPT, "request_id": request_id})
    if answer.status_code == 200:
        assert answer.json()["reserved"]
        return str(answer.json()["worker_id"])
    assert answer.json()["error"]["code"] == "all_workers_busy"
    assert answer.headers["retry-after"] == "1"
    return answer.status_code


@pytest.mark.parametrize("slots", [{"w1": 1}, {"w1": 1, "w2": 1}, {"w1": 3, "w2": 40, "w3": 7}])
async def test_replicas_together_reserve_exactly_the_slots_that_there_are(
    workers, one_redis_server, replica, slots
):
    for name, count in slots.items():
        await workers.register(name, max_requests=count)
    await workers.publish("w1", PROMPT)
    async with AsyncExitStack() as stack:
        url = one_redis_server.url
        clients = [await stack.enter_async_context(replica(url)) for _ in range(REPLICAS)]
        for turn in range(3):
            answers = await asyncio.gather(
                *(route(clients[n % REPLICAS], f"r{n}") for n in range(CLIENTS))
            )
            assert Counter(answers) == slots | {429: CLIENTS - sum(slots.values())}, turn
            assert await workers.reserved() == {
                f"r{n}": f"{answer}:0" for n, answer in enumerate(answers) if answer != 429
            }
            assert {name: (await workers.load(name)).requests for name in slots} == slots
            # Every request is released twice, through any replica, even if it was refused.
            ended = [f"r{n}" for n in range(CLIENTS)] * 2
            random.Random(turn).shuffle(ended)
            await asyncio.gather(
                *(clients[i % REPLICAS].delete(f"/v1/requests/{r}") for i, r in enumerate(ended))
            )
            for name in slots:
                load = await workers.load(name)
                assert (load.requests, load.blocks, load.prefill_tokens, load.prefill_us) == (
                    0,
                    0,
                    0,
                    0,
                )
        assert await workers.reserved() == {}
        seen = [await scrape(client) for client in clients]

        def counted(name, **labels):
            return sum(one(f"{name}_total", **labels) for one in seen)

        won, asked = 3 * sum(slots.values()), 3 * CLIENTS
        assert counted("decisions", policy="latency", outcome="routed") == won
        assert counted("decisions", policy="latency", outcome="all_busy") == asked - won
        # Every refused reservation was decided again, with or without success.
        refused = sum(
            counted("reserve_conflicts", reason=why) for why in ("changed", "full", "lapsed")
        )
        assert refused == counted("decision_retries") > 0
    async with connect(one_redis_server.url) as redis:
        findings, _ = await verify.verify(redis, KEYS, 1 << 10)
    assert findings == []
