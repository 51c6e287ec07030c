"""The stand-in for engines says what engines say, and is well until it is told otherwise."""

import asyncio
import re

import aiohttp
import httpx
import pytest
import zmq.asyncio

from app.core.events import Stored
from app.core.hashing import compute_hashes
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from tests.fakes.faults import WELL, Faults
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.stream import EventStream
from workers.bridge.events.vllm import Batch
from workers.bridge.http.discovery import discover
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.load import LoadReader

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/responses": {"input": "hello"},
}


@pytest.fixture
async def engine():
    async with fake_engine(adapters=["poems"]) as engine:
        yield engine


@pytest.fixture
async def client(engine):
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


async def ask(client, path, *, stream=True):
    body = {"model": "m", "stream": stream, **BODIES[path]}
    return (await client.post(path, json=body)).raise_for_status().text


@pytest.mark.parametrize("path", BODIES)
async def test_its_streams_fail_as_told(engine, client, path):
    well = await ask(client, path)
    hows = (
        *("error first", "error before tokens", "error within"),
        *("empty", "unfinished"),
    )
    for how in hows:
        engine.faults = Faults(how=how)
        answer = await ask(client, path)
        assert ("event: error" in answer or '"error":{' in answer) == how.startswith("error")
        assert ("tok " in answer) == (how in ("error within", "unfinished"))
        assert answer != well
    resets = ("reset first", "reset within")
    for how in resets:
        engine.faults = Faults(how=how)
        with pytest.raises(httpx.TransportError):
            await ask(client, path)
    engine.faults = WELL
    assert await ask(client, path) == well


async def test_what_hangs_goes_on_once_it_is_well(engine, client):
    hows = ("silent", "hang", "stall")
    for number, how in enumerate(hows, 1):
        engine.faults = Faults(how=how)
        asking = asyncio.create_task(ask(client, "/v1/completions"))

        async def started():
            return engine.started

        await eventually(started, number.__eq__)
        assert (await client.get("/health")).status_code == 200
        assert not asking.done()
        engine.faults = WELL
        assert "[DONE]" in await asking
    assert (engine.finished, engine.aborted, engine.running) == (3, 0, 0)


async def test_it_counts_who_gives_up(engine, client):
    engine.faults = Faults(how="stall")
    asking = asyncio.create_task(ask(client, "/v1/completions"))

    async def counts():
        return engine.running, engine.aborted

    await eventually(counts, lambda found: found == (1, 0))
    asking.cancel()
    await eventually(counts, lambda found: found == (0, 1))


async def test_faults_are_for_those_whom_they_name(engine, client):
    engine.faults = Faults(status=404, only='"poems"', times=1)

    async def status(model):
        body = {"model": model, **BODIES["/v1/completions"]}
        return (await client.post("/v1/completions", json=body)).status_code

    assert [await status(model) for model in ("m", "poems", "poems")] == [200, 404, 200]


async def test_it_may_be_away_for_a_while(engine, client):
    engine.faults = Faults(how="stall")
    asking = asyncio.create_task(ask(client, "/v1/completions"))

    async def running():
        return engine.running

    await eventually(running)
    engine.faults = Faults(away_s=2.0)
    with pytest.raises(httpx.TransportError):
        await asking
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")

    async def answers():
        try:
            return (await client.get("/health")).is_success
        except httpx.ConnectError:
            return False

    await eventually(answers)


async def test_an_agent_can_follow_it(engine, client):
    async with aiohttp.ClientSession() as session:
        facts = await discover(session, engine.url)
        assert (facts.kind, facts.models, facts.adapters) == ("vllm", ("m",), ("poems",))
        reader = LoadReader(EngineHttp(session, engine.url), "vllm")
        await ask(client, "/v1/completions")
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


OBJECT = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/P"}, "rainy": {"type": "boolean"}},
    "required": ["place"],
    "$defs": {"P": {"type": "string"}},
}
MADE = '{"place":"the quick","rainy":true}'
USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "weather", "parameters": OBJECT}
CHAT = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}
MESSAGE = {"messages": [USER], "max_tokens": 99}
MESSAGE |= {"tools": [{"name": "weather", "input_schema": OBJECT}]}
RESPONSE = {"input": "hello", "tools": [{"type": "function"} | FUNCTION]}
NAMED = {"type": "function", "name": "weather"}
TOLD = [USER, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
FORMAT = {"type": "json_schema", "schema": OBJECT}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", CHAT, MADE),
        ("/v1/chat/completions", CHAT | {"tool_choice": "none"}, "tok tok "),
        ("/v1/chat/completions", CHAT | {"messages": TOLD}, "tok tok "),
        ("/v1/chat/completions", CHAT | {"messages": TOLD, "tool_choice": "required"}, MADE),
        ("/v1/chat/completions", CHAT | {"messages": [*TOLD, USER]}, MADE),
        ("/v1/messages", MESSAGE | {"tool_choice": {"type": "tool", "name": "weather"}}, MADE),
        ("/v1/messages", MESSAGE | {"messages": [USER, RESULT]}, "tok tok "),
        ("/v1/responses", RESPONSE | {"tool_choice": NAMED}, MADE),
        (
            "/v1/responses",
            RESPONSE | {"input": [USER, {"type": "function_call_output", "call_id": "1"}]},
            "tok tok ",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "response_format": {"type": "json_schema", "json_schema": FORMAT},
            },
            MADE,
        ),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 99, "output_config": {"format": FORMAT}},
            MADE,
        ),
        ("/v1/responses", {"input": "hello", "text": {"format": FORMAT}}, MADE),
        ("/v1/completions", {"prompt": "x", "max_tokens": 9, "stop": "ok tok"}, '"t"'),
    ],
)
async def test_tools_objects_and_stops_in_each_api(client, path, body, says):
    """Whole, and in the pieces of a stream."""
    body = {"model": "m"} | body
    whole = (await client.post(path, json=body)).raise_for_status().text
    assert (says in whole.replace('\\"', '"')) or (says == MADE and '"rainy":true' in whole)
    stream = (await client.post(path, json=body | {"stream": True})).raise_for_status().text
    pieces = re.findall(
        r'"(?:content|text|partial_json|delta|arguments)":"((?:[^"\\]|\\.)*)"', stream
    )
    assert says.strip('"') in "".join(pieces).replace('\\"', '"')


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
