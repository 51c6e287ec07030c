"""`kvroute planner explain` and `kvroute whatif --workers` on a real Redis."""

import asyncio
import json

from app.state import planner
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running
from tests.ops.conftest import kvroute, said

PREDICTED = {"size": 2, "requests": 9, "attainment": 0.5, "ttft_p99_s": 3.0, "hit_rate": 0.25}
PROPOSAL = {
    "at_s": 0.0,
    "policy": "slo",
    "size": 2,
    "desired": 3,
    "reason": "slo_missed",
    "victim": None,
    "inputs": {"requests": 9.0},
    "candidates": [PREDICTED],
}


def test_proposals_are_shown_with_what_they_were_made_from(url):
    async def propose():
        async with connect(url) as redis:
            runner = ScriptRunner(redis, 5)
            token = (await runner.one(planner.lead(KEYS, "a", 60_000))).token
            shown = {"values": '{"w1": 2.5}'}
            assert await runner.one(planner.propose(KEYS, token, {}, PROPOSAL, shown))

    asyncio.run(propose())
    printed = kvroute(url, "planner", "explain").output
    for text in ("slo_missed", "requests=9", "50.0%", "25.0%", "3.00"):
        assert text in printed
    assert json.loads(kvroute(url, "planner", "explain", "--json").output) == [PROPOSAL]
    assert "worth: without it, 2.50 s" in kvroute(url, "inspect", "worker", "w1").output
    [shown] = json.loads(kvroute(url, "inspect", "worker", "w1", "--json").output)
    assert shown["unique_value_s"] == 2.5


def test_pools_are_shown_as_such(url):
    pools = {
        "pools": {"prefill": 1, "decode": 3},
        "desired_pools": {"prefill": 2, "decode": 2},
        "candidates": [PREDICTED | {"pools": {"prefill": 5, "decode": 7}}],
    }

    async def propose():
        async with connect(url) as redis:
            runner = ScriptRunner(redis, 5)
            token = (await runner.one(planner.lead(KEYS, "a", 60_000))).token
            assert await runner.one(planner.propose(KEYS, token, {}, PROPOSAL | pools))

    asyncio.run(propose())
    printed = kvroute(url, "planner", "explain").output
    for text in ("1p3d", "2p2d", "5p7d"):
        assert text in printed


def test_without_proposals_and_decisions_that_is_said(url, raw):
    assert said(url, "planner", "explain") == (
        1,
        "Error: no planner has proposed anything in 'test'\n",
    )
    for given in ([], ["--workers", "3"]):
        assert said(url, "whatif", *given) == (
            1,
            "Error: no decision of the last minutes is kept\n",
        )


async def test_fewer_and_more_workers_are_played(one_redis_server):
    url = one_redis_server.url
    async with (
        connect(url) as redis,
        running(fake_agent(ScriptRunner(redis, 5), KEYS, "w1")),
        running(fake_agent(ScriptRunner(redis, 5), KEYS, "w2")),
        started_replica(url) as replica,
    ):
        for number in range(12):
            asked = {"token_ids": [number % 3, *range(40)]}
            assert (await replica.post("/v1/route", json=asked)).status_code == 200
        await eventually(lambda: redis.xlen(KEYS["decisions"]), lambda kept: kept == 12)
        result = await asyncio.to_thread(kvroute, url, "whatif", "--workers", "1", "--json")
        assert result.exit_code == 0, result.output
        one, two = json.loads(result.output)
        assert (one["size"], two["size"]) == (1, 2)
        assert one["requests"] == two["requests"] == 12
        assert one["hit_rate"] >= two["hit_rate"] > 0
        result = await asyncio.to_thread(kvroute, url, "whatif", "--policy", "random", "--json")
        [now] = json.loads(result.output)
        assert (now["size"], now["requests"]) == (2, 12)
