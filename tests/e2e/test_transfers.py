"""KV that travels in a cluster of processes: by price, some requests are split, and some prefixes
fetched."""

import asyncio
import random
from collections import Counter

import httpx
from redis import Redis

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.door.conftest import until_healthy, worker_here
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_redis

BLOCK = 16
ROUNDS, AT_ONCE = 4, 12


def cluster(num_workers, **roles):
    require_redis(default_kind())
    return Cluster(
        num_workers=num_workers,
        num_replicas=1,
        haproxy=False,
        router=RouterSettings(log_level="error", show_decision=True),
        worker=WorkerSettings(
            block_size=BLOCK, speedup=5.0, max_requests=6, kv_transfer="kvroute", log_level="error"
        ),
        **roles,
    )


async def ask(http, model, prompt):
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def ids(answer):
    return answer.json()["choices"][0]["token_ids"]


async def overlaps(http, prompt):
    """Leading blocks of the prompt that the index says each worker holds."""
    asked = {"token_ids": prompt, "explain": True, "reserve": False}
    decision = (await http.post("/v1/route", json=asked)).json()
    return {one["worker_id"]: one["overlap_blocks"]["device"] for one in decision["candidates"]}


async def cached_at(url, model, prompt):
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, timeout=60) as worker:
        usage = (await worker.post("/v1/completions", json=body)).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


async def test_texts_are_those_of_one_worker_and_stated_overlaps_are_cached(one_redis_server):
    rng = random.Random(3)
    prefixes = [[rng.randrange(5, 400) for _ in range(3000)] for _ in range(3)]
    forms = Counter()
    answered = []
    with cluster(4, num_prefill=1, num_decode=1) as together:
        async with httpx.AsyncClient(base_url=together.balancer_url, timeout=60) as http:
            for _ in range(ROUNDS):
                prompts = [
                    [*rng.choice(prefixes), *(rng.randrange(5, 400) for _ in range(50))]
                    for _ in range(AT_ONCE)
                ]
                asked = [ask(http, together.model, prompt) for prompt in prompts]
                for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
                    forms[answer.headers.get("x-kvroute-source", "")] += 1
                    answered.append((prompt, ids(answer)))
            workers = {member.name.split()[1]: member.url for member in together.workers}
            for prefix in prefixes:
                prompt = next(prompt for prompt, _ in answered if prompt[:3000] == prefix)
                await agree(http, together.model, prompt, workers)
        with Redis.from_url(together.redis_url) as redis:
            await eventually(lambda: num_reserved(redis, together), lambda number: number == 0)
    assert forms[""] > 0
    assert forms["w0:0"] > 0
    assert len({tuple(tokens) for _, tokens in answered}) == len(answered), (
        "else equal texts would prove nothing"
    )
    async with (
        worker_here(one_redis_server.url, "alone", model_name=together.model) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await until_healthy(http)
        for prompt, tokens in answered:
            assert ids(await ask(http, together.model, prompt)) == tokens


async def agree(http, model, prompt, workers):
    """Once nothing is under way, the index says what each worker has cached."""
    stated = await overlaps(http, prompt)
    for name, url in workers.items():
        most = (len(prompt) - 1) // BLOCK
        assert await cached_at(url, model, prompt) == BLOCK * min(stated[name], most), name


async def num_reserved(redis, among):
    return int(redis.hlen(among.keyspace["reservations"]))
