"""A real vLLM that was started without KV events: see `make test-vllm`."""

import json
import random

import pytest

from tests.engines.vllm_server import ANSWER_S, BLOCK, MODEL, behind_a_door

PROMPTS = 60
WITHOUT_EVENTS = ("--kv-events-config", json.dumps({"enable_kv_cache_events": False}))

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


async def test_what_was_routed_to_a_vllm_without_events_is_what_it_has_cached(
    one_redis_server, tmp_path
):
    rng = random.Random(11)
    prefixes = [[rng.randrange(5, 400) for _ in range(40 + 90 * n)] for n in range(8)]
    async with behind_a_door(one_redis_server.url, tmp_path, more=WITHOUT_EVENTS) as (door, direct):
        [worker] = (await door.get("/v1/workers")).json()["workers"]
        assert "--kv-events-config" in worker["trust_cause"]
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
