"""A real vLLM that was started without KV events: see `make test-vllm`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest

from app.local.redis_server import EmbeddedRedis
from tests.door.conftest import replica, until_serving
from tests.e2e.engines import agent
from tests.engines.vllm_server import ANSWER_S, BLOCK, MODEL, vllm_servers

PROMPTS = 60
WITHOUT_EVENTS = ("--kv-events-config", json.dumps({"enable_kv_cache_events": False}))

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


async def test_what_was_routed_to_a_vllm_without_events_is_what_it_has_cached(
    one_redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    rng = random.Random(11)
    prefixes = [[rng.randrange(5, 400) for _ in range(40 + 90 * n)] for n in range(8)]
    url = one_redis_server.url
    with (
        vllm_servers(tmp_path, "a", blocks=2000, more=WITHOUT_EVENTS) as [engine],
        agent(engine.url, url, tmp_path / "memory", "a"),
    ):
        async with (
            replica(url) as door,
            httpx.AsyncClient(base_url=engine.url, timeout=ANSWER_S) as direct,
        ):
            await until_serving(door, 1)
            [worker] = (await door.get("/v1/workers")).json()["workers"]
            assert "--kv-events-config" in worker["approximate"]
            stated = cached = 0
            for _ in range(PROMPTS):
                prompt = rng.choice(prefixes) + [rng.randrange(5, 400) for _ in range(50)]
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
                answer = await door.post("/v1/completions", json=body, timeout=ANSWER_S)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-kvroute-trust"] == "approximate"
                stated += BLOCK * int(answer.headers["x-kvroute-overlap"].partition("/")[0])
                cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0
            assert stated == pytest.approx(cached, rel=0.1)
            # The control: of what came past the routers, nothing is known.
            other = [rng.randrange(5, 400) for _ in range(300)]
            for http in (direct, door):
                body = {"model": MODEL, "prompt": other, "max_tokens": 2}
                answer = await http.post("/v1/completions", json=body, timeout=ANSWER_S)
            assert answer.headers["x-kvroute-overlap"].startswith("0/")
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
