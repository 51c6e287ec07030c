"""A router that is told to stop: what is under way goes on for a while, and then ends in order."""

import asyncio
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from app.state.scripts import ScriptRunner
from tests.door.conftest import models
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE, FakeWorker, worker_info
from tests.fakes.dialects import BODIES
from tests.fakes.engine import fake_engine

SLOW = 200
"""Tokens of an answer, 50 ms each: ten seconds."""
ENDINGS = {
    "/v1/chat/completions": ('"code":"stopping"', "data: [DONE]"),
    "/v1/completions": ('"code":"stopping"', "data: [DONE]"),
    "/v1/messages": ("event: error", '"overloaded_error"'),
    "/v1/responses": ("event: error", '"code":"stopping"'),
}


@asynccontextmanager
async def routed(redis, url, *flags):
    """A router of its own process, before an engine that takes its time."""
    async with fake_engine(token_s=0.05) as engine:
        info = replace(worker_info("a", kv_total_blocks=10_000), address=engine.url, models=("m",))
        worker = FakeWorker(ScriptRunner(redis, 5.0), KEYS, info)
        await worker.register()
        await worker.activate()
        where = (f"--redis-url={url}", f"--namespace={NAMESPACE}", "--port=0", *flags)
        process = await asyncio.to_thread(Process, "router", *where)
        try:
            async with httpx.AsyncClient(base_url=process.url) as client:
                await eventually(lambda: models(client), bool)
            yield process, engine
        finally:
            await asyncio.to_thread(process.end)


async def asked(url, path, *, stream):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "m", "stream": stream, **BODIES[path], limit: SLOW}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        answer = await client.post(path, json=body)
        return answer.status_code, dict(answer.headers), answer.text


async def refused(url):
    """Returns once new connections are."""

    async def connects():
        async with httpx.AsyncClient(base_url=url) as client:
            try:
                await client.get("/health")
            except httpx.TransportError:
                return False
        return True

    await eventually(connects, lambda connected: not connected)


async def test_what_takes_longer_than_a_stopping_router_waits_ends_as_its_dialect_ends(
    one_redis_server, redis
):
    async with routed(redis, one_redis_server.url, "--drain-s=0.3") as (process, engine):

        async def both(path):
            streams = (
                asked(process.url, path, stream=True),
                asked(process.url, path, stream=False),
            )
            stream, whole = await asyncio.gather(*streams)
            assert stream[0] == 200
            assert all(part in stream[2][-300:] for part in ENDINGS[path]), stream[2][-300:]
            assert (whole[0], whole[1]["retry-after"]) == (503, "1"), whole

        asking = [asyncio.create_task(both(path)) for path in ENDINGS]
        await eventually(_running(engine), lambda number: number == 2 * len(ENDINGS))
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.gather(*asking)
        assert await asyncio.to_thread(process.popen.wait, 30) == 0
        await eventually(_running(engine), lambda number: number == 0)
        assert await redis.hlen(KEYS["reservations"]) == 0
    assert "Traceback" not in process.said, process.said


async def test_a_stopping_router_lets_streams_end_and_accepts_no_more(one_redis_server, redis):
    async with routed(redis, one_redis_server.url, "--drain-s=60") as (process, engine):
        path = "/v1/chat/completions"
        async with httpx.AsyncClient(base_url=process.url) as kept:
            assert (await kept.get("/readiness")).status_code == 200
            asking = asyncio.create_task(asked(process.url, path, stream=True))
            await eventually(_running(engine), bool)
            process.popen.send_signal(signal.SIGTERM)
            await refused(process.url)
        status, _, text = await asking
        assert (status, text.count("tok"), text.rstrip().endswith("[DONE]")) == (200, SLOW, True)
        assert await asyncio.to_thread(process.popen.wait, 30) == 0


@pytest.mark.parametrize(
    "second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
async def test_a_second_signal_ends_a_router_at_once(one_redis_server, redis, second):
    async with routed(redis, one_redis_server.url, "--drain-s=60") as (process, engine):
        path = "/v1/completions"
        asking = asyncio.create_task(asked(process.url, path, stream=True))
        await eventually(_running(engine), bool)
        process.popen.send_signal(signal.SIGTERM)
        await refused(process.url)  # it has heard the first one
        process.popen.send_signal(second)
        _, _, text = await asking
        assert all(part in text[-300:] for part in ENDINGS[path])
        assert await asyncio.to_thread(process.popen.wait, 30) == 0
        assert engine.finished == 0
    assert "Traceback" not in process.said, process.said


def _running(engine):
    async def running():
        return engine.running

    return running
