"""The stand-in for engines beside the agent that follows it, and as a process."""

import aiohttp
import httpx
import pytest
import zmq.asyncio

from app.core.events import Stored
from app.core.hashing import compute_hashes
from tests.e2e.engines import Process
from tests.fakes.engine import fake_engine
from tests.fakes.faults import Faults
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.stream import EventStream
from workers.bridge.events.vllm import Batch
from workers.bridge.http.discovery import discover
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.load import LoadReader


@pytest.fixture
async def engine():
    async with fake_engine(adapters=["poems"]) as engine:
        yield engine


@pytest.fixture
async def client(engine):
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


async def test_an_agent_can_follow_it(engine, client):
    async with aiohttp.ClientSession() as session:
        facts = await discover(session, engine.url)
        assert (facts.kind, facts.models, facts.adapters) == ("vllm", ("m",), ("poems",))
        reader = LoadReader(EngineHttp(session, engine.url), "vllm")
        body = {"model": "m", "prompt": [1, 2, 3], "stream": True}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        engine.faults = Faults(more_running=200, more_waiting=100, kv_usage=1.0)
        [load] = (await reader.read()).loads.values()
    assert (load.running, load.waiting, load.kv_usage) == (200, 100, 1.0)
    assert (load.prompt_tokens, load.generated_tokens, load.finished_requests) == (3, 8, 1)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_each_kind_tells_of_its_blocks_on_its_own_wire(kind):
    prompt = list(range(40))
    async with fake_engine(kind=kind) as engine, aiohttp.ClientSession() as session:
        facts = await discover(session, engine.url)
        assert (facts.kind, facts.block_size) == (kind, 16)
        blocks = EngineBlocks(16)
        with zmq.asyncio.Context() as context, EventStream(context, facts.sources[0]) as stream:
            for _ in range(2):
                body = {"model": "m", "prompt": prompt, "max_tokens": 1}
                async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                    usage = (await answer.json())["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 32
            async for item in stream.follow():
                if isinstance(item, Batch):
                    changes = [change for event in item.events for change in blocks.take(event)]
                    assert changes == [Stored(tuple(compute_hashes(prompt, 16)[1]), None)]
                    return


async def test_as_a_process_it_is_told_over_http():
    process = Process("--prefill-s=0", "--token-s=0", module="tests.fakes.engine")
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=30) as client:
            await client.post("/faults", json={"status": 503, "headers": {"retry-after": "7"}})
            asked = {"model": "m", "prompt": "hello"}
            answer = await client.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            await client.post("/faults", json={})
            assert (await client.post("/v1/completions", json=asked)).is_success
            shown = (await client.get("/faults")).json()
            assert (shown["finished"], shown["faults"]["status"]) == (1, 200)
    finally:
        process.end()
