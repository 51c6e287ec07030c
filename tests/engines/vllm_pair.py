"""Two real vLLM between which KV travels, each with an agent, behind two front doors."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager, contextmanager

import httpx

from app.local.redis_server import free_port
from tests.door.conftest import replica, until_serving
from tests.e2e.engines import agent
from tests.engines.vllm_server import BLOCK, MODEL, VENV, VllmServer, make_models
from tests.fake_worker import KEYS


class PdServer(VllmServer):
    side_channel_port: int
    lease_s: float


def server(folder, name, lease_s, *, block=BLOCK):
    port = free_port()
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    environment = {
        "PYTHONPATH": str(VENV / "nixl"),
        "PYTHONHASHSEED": "0",
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    more = ("--kv-transfer-config", json.dumps(connector), "--block-size", str(block))
    made = PdServer(folder, name, 1000 * BLOCK // block, more, environment)
    made.side_channel_port, made.lease_s = port, lease_s
    return made


class Pair:
    """p computes prompts, d decodes. split: a door that splits each request; priced: one that does
    where it is quicker."""

    def __init__(self, p, d, split, priced, direct):
        self.p, self.d, self.split, self.priced, self.direct = p, d, split, priced, direct

    async def text(self, url, prompt, **more):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
        answer = await self.direct.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def num_requests(self):
        listed = (await self.split.get("/v1/workers")).json()["workers"]
        return sum(worker["active_requests"] for worker in listed)

    async def by_source(self):
        """Prompt tokens of d so far, by where their KV came from."""
        text = (await self.direct.get(f"{self.d.url}/metrics")).text
        lines = re.findall(r'prompt_tokens_by_source_total\{.*source="([^"]+)".*\} (\S+)', text)
        return {source: float(value) for source, value in lines}


@contextmanager
def two_servers(folder, lease_s):
    make_models(folder)
    started = [server(folder, name, lease_s) for name in ("p", "d")]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


@asynccontextmanager
async def joined(servers, url, folder, *flags):
    """flags: more of their agents."""
    p, d = servers
    way = "--kv-transfer=nixl"
    ports = [f"--side-channel-port={one.side_channel_port}" for one in servers]
    patient = {"answer_timeout_s": 600.0}
    with (
        agent(p.url, url, folder / "p", "p", ("--role=prefill", way, ports[0], *flags)),
        agent(d.url, url, folder / "d", "d", ("--role=decode", way, ports[1], *flags)),
    ):
        async with (
            replica(url, policy="least_loaded", **patient) as split,
            replica(url, **patient) as priced,
            httpx.AsyncClient(timeout=600) as direct,
        ):
            for door in (split, priced):
                door.timeout = httpx.Timeout(600)
                await until_serving(door, 2)
            yield Pair(p, d, split, priced, direct)


async def marks(redis):
    records = await redis.hgetall(KEYS["verdicts"])
    return [name for name, text in records.items() if b"tainted" in text]
