"""Waiting for a worker, as clients see it: through HTTP, at several replicas."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from app.cli import main
from tests.eventually import eventually
from tests.fake_worker import KEYS

PROMPT = list(range(1, 11))
WAITS = {"wait_queue": 50, "wait_timeout_s": 60.0}


async def route(client, request_id, **body):
    headers = body.pop("headers", {})
    return await client.post(
        "/v1/route", json={"token_ids": PROMPT, "request_id": request_id} | body, headers=headers
    )


async def flows(redis):
    return {flow.decode() for flow in await redis.zrange(KEYS["flows"], 0, -1)}


@pytest.fixture
async def full(workers):
    await workers.register("w1", max_requests=1)
    await workers.occupy("w1", "x", prefill_s=20.0)
    return workers


async def test_an_answer_says_how_long_it_waited(full, one_redis_server, replica, redis):
    async with replica(one_redis_server.url, **WAITS) as client:
        waiting = asyncio.ensure_future(route(client, "r1"))
        await eventually(lambda: flows(redis))
        await client.delete("/v1/requests/x")
        answer = await waiting
        assert answer.status_code == 200
        assert answer.json()["waited_ms"] > 0
        await client.delete("/v1/requests/r1")
        await eventually(lambda: flows(redis), lambda found: not found)
        assert "waited_ms" not in (await route(client, "r2")).json()
        where = ["--redis-url", one_redis_server.url, "--namespace", KEYS.namespace]

        async def explained():
            return str((await asyncio.to_thread(invoke, main, ["explain", "r1", *where])).output)

        invoke = CliRunner().invoke
        assert await eventually(explained, lambda text: "the request waited 0." in text)
        metrics = (await client.get("/metrics")).text
    assert "kvroute_waiting_requests 0.0" in metrics
    assert "kvroute_waited_seconds_count 1.0" in metrics
    assert 'kvroute_waits_total{outcome="routed",priority="normal",tenant="other"} 1.0' in metrics


@pytest.mark.parametrize(
    ("asked", "flow"),
    [
        ({}, "normal:"),
        ({"tenant": "a"}, "normal:a"),
        ({"headers": {"x-tenant-id": "b"}}, "normal:b"),
        ({"tenant": "a", "headers": {"x-tenant-id": "b"}, "priority": "high"}, "high:a"),
        ({"tenant": "a:b}{*", "priority": "low"}, "low:a:b}{*"),
    ],
)
async def test_the_tenant_comes_from_the_body_or_else_from_the_header(
    full, one_redis_server, replica, redis, asked, flow
):
    async with replica(one_redis_server.url, **WAITS) as client:
        waiting = asyncio.ensure_future(route(client, "r1", **asked))
        assert await eventually(lambda: flows(redis)) == {flow}
        await client.delete("/v1/requests/x")
        assert (await waiting).status_code == 200
    assert await flows(redis) == set()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"priority": "urgent"}, "priority"),
    ],
)
async def test_a_bad_tenant_or_priority_is_refused(full, one_redis_server, replica, asked, field):
    async with replica(one_redis_server.url, **WAITS) as client:
        answer = await route(client, "r1", **asked)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


async def test_inspect_waiting_lists_tenants_and_priorities_in_the_order_of_turns(
    full, one_redis_server, replica, redis
):
    async def kvroute(*arguments):
        where = ["--redis-url", one_redis_server.url, "--namespace", KEYS.namespace]
        command = ["inspect", "waiting", *arguments, *where]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert result.exit_code == 0, result.output
        return result.output

    assert "no requests are waiting" in await kvroute()
    async with replica(one_redis_server.url, **WAITS) as client:
        asked = [{"priority": "low"}, {"tenant": "a"}, {"tenant": "a"}]
        asked.append({"tenant": "a", "exclude": ["w2"]})
        tasks = [asyncio.ensure_future(route(client, f"r{i}", **a)) for i, a in enumerate(asked)]
        lines = {"waiting:low:": 1, "waiting:normal:a": 2, "picky:normal:a": 1}
        for key, requests in lines.items():
            await eventually(
                lambda k=key: redis.zcard(KEYS[k]), lambda found, n=requests: found == n
            )
        found = json.loads(await kvroute("--json"))
        assert [(f["tenant"], f["priority"], f["requests"]) for f in found] == [
            ("a", "normal", 3),
            ("", "low", 1),
        ]
        assert all(0 <= f["oldest_s"] < 60 for f in found)
        table = await kvroute()
        assert table.splitlines()[0].split() == ["tenant", "priority", "requests", "oldest"]
        for task in tasks:
            task.cancel()


async def test_only_tenants_with_a_weight_have_a_label_of_their_own_in_metrics(
    full, one_redis_server, replica
):
    settings = WAITS | {"wait_timeout_s": 0.02, "tenant_weights": "gold=4"}
    async with replica(one_redis_server.url, **settings) as client:
        tenants = ["gold", *(f"t{n}" for n in range(20))]
        answers = await asyncio.gather(*(route(client, t, tenant=t) for t in tenants))
        assert {a.status_code for a in answers} == {429}
        metrics = (await client.get("/metrics")).text
    found = [line for line in metrics.splitlines() if line.startswith("kvroute_waits_total")]
    labels = 'outcome="timed_out",priority="normal",tenant='
    assert sorted(found) == [
        f'kvroute_waits_total{{{labels}"gold"}} 1.0',
        f'kvroute_waits_total{{{labels}"other"}} 20.0',
    ]
