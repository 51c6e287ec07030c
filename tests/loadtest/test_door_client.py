"""One request as an OpenAI client makes it, through a router to a simulated worker."""

import asyncio

import orjson
import pytest
from click.testing import CliRunner

from app.cli import main
from loadtest.client import FailureKind, RequestError
from loadtest.door_client import DoorClient
from tests.door.conftest import replica, until_serving, worker_here

PROMPT = bytes(4 * 640)


async def test_a_request_is_answered_by_one_call(one_redis_server):
    url = one_redis_server.url
    async with worker_here(url, "a"), replica(url) as door:
        await until_serving(door, 1)
        async with DoorClient(str(door.base_url), deadline_s=20) as client:
            assert await client.workers() == ["a:0"]
            first = await client.send("r1", lambda: PROMPT, output_tokens=7)
            await asyncio.sleep(0.3)
            again = await client.send("r2", lambda: PROMPT, output_tokens=7)
    assert (first.failure, first.attempts, first.worker) == (None, 1, "a:0")
    assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (640, 7, 0)
    assert again.cached_tokens > 500
    assert first.first_token_s is not None
    assert first.end_s is not None
    assert first.sent_s <= first.first_token_s <= first.end_s


async def test_a_cluster_without_models_is_told_at_once(one_redis_server):
    async with replica(one_redis_server.url) as door:
        with pytest.raises(RequestError, match="no model has a live worker") as caught:
            async with DoorClient(str(door.base_url)):
                pass
    assert caught.value.kind is FailureKind.UNAVAILABLE


async def test_what_the_router_refuses_is_not_sent_again(one_redis_server):
    url = one_redis_server.url
    async with worker_here(url, "a"), replica(url, max_prompt_tokens=100) as door:
        await until_serving(door, 1)
        async with DoorClient(str(door.base_url), deadline_s=20) as client:
            outcome = await client.send("r1", lambda: PROMPT, output_tokens=7)
    assert (outcome.failure, outcome.attempts) == (FailureKind.REFUSED, 1)


async def test_a_trace_is_replayed_through_the_door(one_redis_server, tmp_path):
    url = one_redis_server.url
    figures = tmp_path / "figures.json"
    async with worker_here(url, "a", block_size=64), replica(url) as door:
        await until_serving(door, 1)
        base = str(door.base_url).rstrip("/")
        command = ["replay", "--url", base, "--api", "openai", "--speedup", "100"]
        command += ["--requests", "10", "--warmup", "0", "--json", str(figures)]
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert done.exit_code == 0, done.output
    found = orjson.loads(figures.read_bytes())["policies"]["default"]
    assert (found["requests"], found["failed"]) == (10, 0)
    assert found["requests_per_worker"] == {"a:0": 10}
    assert found["decision_p50_ms"] is None


def test_requests_of_the_openai_api_name_no_policy():
    done = CliRunner().invoke(main, ["replay", "--api", "openai", "--policy", "random"])
    assert done.exit_code == 2
    assert "the policy is that of the routers" in done.output
