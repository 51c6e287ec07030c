"""What an engine tells of its KV, at the port where others ask before they fetch."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from app.core.settings.agent import EngineAgentSettings
from workers.bridge.http import kv_fingerprint
from workers.bridge.http.facts import EngineFacts
from workers.bridge.registration import kv_hosts

FACTS = EngineFacts(
    kind="vllm",
    version="0.32.0",
    models=("m",),
    adapters=(),
    max_model_len=None,
    block_size=16,
    capacity_tokens=1000,
    reuse_tokens=16,
    recomputed_tokens=0,
    sources=(),
    announces_copies=True,
    started_s=None,
    tokenizer="llama",
    kv_dtype="auto",
)
METADATA = {"engine_id": "e", "block_size": 16, "kv_cache_layout": "HND", "num_blocks": 10}
PAYLOAD = msgspec.msgpack.encode(
    {"compatibility_hash": "5f0c" * 16, "agent_metadata_bytes": msgspec.msgpack.encode(METADATA)}
)


@asynccontextmanager
async def side_channel(answer):
    """Its port, and what it was asked. None: it does not answer."""
    asked = []
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as listening:
        port = listening.bind_to_random_port("tcp://127.0.0.1")

        async def serve():
            while True:
                identity, _, question = await listening.recv_multipart()
                asked.append(msgspec.msgpack.decode(question))
                if answer is not None:
                    said = [identity, b"", answer, msgspec.msgpack.encode(1.5)]
                    await listening.send_multipart(said)

        serving = asyncio.create_task(serve())
        yield port, asked
        serving.cancel()
        await asyncio.wait([serving])


async def told(port, *hosts):
    with zmq.asyncio.Context() as context:
        found = await kv_fingerprint.of_vllm(context, FACTS, hosts, port)
    return {name: value for name, _, value in (one.partition("=") for one in found)}


async def test_all_that_decides_is_told_by_the_engine():
    async with side_channel(PAYLOAD) as (port, asked):
        assert await told(port, "127.0.0.1") == {
            "engine": "vllm 0.32.0",
            "model": "llama",
            "block": "16",
            "kv-dtype": "auto",
            "connector": "nixl",
            "transfer-block": "16/1",
            "layout": "HND",
            "context-parallel": "1/1",
            "handshake": "5f0c" * 4,
        }
    # Asked for a rank that it has not, vLLM would hand on nothing any more.
    assert asked == [[b"get_meta_msg", 0, 0]]


@pytest.mark.parametrize("answer", [None, b"", b"what?", msgspec.msgpack.encode({"a": 1})])
async def test_what_cannot_be_read_is_not_known(answer, monkeypatch):
    monkeypatch.setattr(kv_fingerprint, "HANDSHAKE_S", 0.3)
    async with side_channel(answer) as (port, _):
        found = await told(port, "127.0.0.1")
    assert {name for name, value in found.items() if value.startswith("?")} == {
        "handshake",
        "layout",
        "transfer-block",
    }


async def test_the_first_host_that_answers_counts(monkeypatch):
    monkeypatch.setattr(kv_fingerprint, "HANDSHAKE_S", 0.5)
    async with side_channel(PAYLOAD) as (port, _):
        found = await told(port, "host.invalid", "127.0.0.2", "127.0.0.1")
    assert found["handshake"] == "5f0c" * 4


def nixl(url, **more):
    return EngineAgentSettings(engine_url=url, kv_transfer="nixl", **more)


async def test_a_host_is_known_by_its_addresses_too():
    hosts = await kv_hosts(nixl("http://LOCALHOST:8000", kv_host="10.9.8.7"))
    assert "localhost" in hosts
    assert {"127.0.0.1", "::1"} & set(hosts)
    assert "10.9.8.7" in hosts


async def test_a_host_without_an_address_is_known_by_its_name():
    assert await kv_hosts(nixl("http://no-such-host.invalid:8000")) == ("no-such-host.invalid",)
