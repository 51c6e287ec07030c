"""What the door predicts to be cached is what an engine then has cached."""

import itertools

import pytest
from aiohttp import web

from app.core.hashing import compute_local_hashes, compute_sequence_hashes, token_bytes
from app.core.types import Tier
from app.simulation.engine import SimEngine
from app.simulation.profiles import USUAL
from app.simulation.steps import SimRequest
from app.state import index
from tests.door.conftest import completing, replica, until_serving
from tests.edge.test_metrics import scrape
from tests.fake_worker import BLOCK_SIZE

PROMPT = list(range(1, 21))
"""Five blocks."""


@pytest.mark.parametrize(
    ("reuse_blocks", "recomputed_blocks"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (1, 2)]
)
async def test_an_engine_has_cached_what_was_predicted(
    one_redis_server, redis, reuse_blocks, recomputed_blocks
):
    engine = SimEngine(USUAL, block_size=BLOCK_SIZE, now=lambda: 0.0)
    numbers = itertools.count()

    def cached(prompt):
        """Of the simulated engine, as one that reuses less than it finds."""
        request = SimRequest.from_tokens(
            f"r{next(numbers)}", token_bytes(prompt), 1, block_size=BLOCK_SIZE
        )
        engine.submit(request)
        step = engine.step()
        assert step is not None
        [(_, found)] = step.begun
        kept = max(0, found // BLOCK_SIZE - recomputed_blocks)
        return kept // reuse_blocks * reuse_blocks * BLOCK_SIZE

    async def complete(request):
        prompt = (await request.json())["prompt"]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached(prompt)},
        }
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})

    about = {"reuse_blocks": reuse_blocks, "recomputed_blocks": recomputed_blocks}
    async with (
        completing(redis, "a", complete, **about) as worker,
        replica(one_redis_server.url) as door,
    ):
        cached(PROMPT)
        chain = compute_sequence_hashes(compute_local_hashes(PROMPT, BLOCK_SIZE))
        await worker.publish(index.chain_changes(chain, Tier.DEVICE))
        await until_serving(door, 1)
        asked = [PROMPT[:length] for length in range(1, 21)]
        asked += [[*PROMPT, *[100 + more] * more] for more in range(1, 10)]
        for prompt in asked:
            answer = await door.post("/v1/completions", json={"model": "m", "prompt": prompt})
            assert answer.status_code == 200, answer.text
        found = await scrape(door)
    of_worker = {"model": "m", "worker": "a:0"}
    assert found("door_cached_compared_tokens_total", **of_worker) == sum(map(len, asked))
    assert found("door_tokens_total", model="m", kind="cached") > 0
    assert found("door_cached_apart_tokens_total", **of_worker) == 0
