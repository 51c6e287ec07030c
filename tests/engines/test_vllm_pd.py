"""Two real vLLM between which KV travels, through the front door: see `make test-vllm-pd`."""

import asyncio
import json
import random

import pytest

from app.policy import transfer
from app.policy.pairing import KvGroup
from tests.engines.vllm_pair import joined, marks, server, two_servers
from tests.engines.vllm_server import BLOCK, MODEL
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.ops.test_doctor import bad, examined

LEASE_S = 600.0
"""None ends here, however busy the machine is; test_vllm_pd_leases.py has short ones."""
PROMPTS = 100
COMPUTED, FETCHED = "local_compute", "external_kv_transfer"

pytestmark = [pytest.mark.vllm_pd, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with two_servers(tmp_path_factory.mktemp("pd"), LEASE_S) as started:
        yield started


@pytest.fixture
def unlike(servers):
    started = server(servers[0].folder, "u", LEASE_S, block=2 * BLOCK)
    try:
        started.wait()
        yield started
    finally:
        started.kill()


@pytest.fixture
async def pair(servers, one_redis_server, tmp_path):
    async with joined(servers, one_redis_server.url, tmp_path) as pair:
        yield pair


def prompts(seed):
    rng = random.Random(seed)
    made = []
    for _ in range(PROMPTS):
        prefix = rng.choice(made)[: rng.randrange(900)] if made and rng.random() < 0.66 else []
        tail = [rng.randrange(5, 400) for _ in range(rng.randrange(20, 500))]
        made.append(prefix + tail)
    return made


async def test_texts_are_those_of_one_engine_and_the_target_computes_what_was_said(pair, redis):
    rng = random.Random(2)
    texts = set()
    forms = []
    differences = []
    for number, prompt in enumerate(prompts(1)):
        door = rng.choice([pair.split, pair.split, pair.priced])
        before, num = await pair.by_source(), len(prompt)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = await door.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        texts.add(text)
        assert text == await pair.text(pair.p.url, prompt)
        source = answer.headers.get("x-kvroute-source")
        forms.append(source)

        async def counted(before=before):
            now = await pair.by_source()
            return {name: now[name] - before.get(name, 0.0) for name in now}

        grown = await eventually(counted, lambda tokens, n=num: sum(tokens.values()) >= n)
        if source is None:
            stated = int(answer.headers["x-kvroute-overlap"].partition("/")[0])
            said = len(prompt) - BLOCK * min(stated, (len(prompt) - 1) // BLOCK)
        else:
            assert source == "p:0"
            assert grown[FETCHED] > 0 or len(prompt) < BLOCK
            said = 0
        if grown[COMPUTED] != said:
            differences.append(f"{number}: {said} stated, {grown[COMPUTED]} computed")
    assert differences == []
    assert len(texts) > 0.9 * PROMPTS, "else equal texts would prove nothing"
    assert forms.count("p:0") > 20
    assert forms.count(None) > 10
    # A source keeps what it has computed for a try that failed until its lease ends.
    await eventually(pair.num_requests, lambda number: number == 0)
    assert await marks(redis) == []
    await overlaps_are_what_is_cached(pair, rng.sample(prompts(1), 20))


async def overlaps_are_what_is_cached(pair, some):
    for prompt in some:
        asked = {"token_ids": prompt, "explain": True, "policy": "latency"}
        decision = (await pair.priced.post("/v1/route", json=asked)).json()
        await pair.priced.delete(f"/v1/requests/{decision['reservation_id']}")
        stated = {
            one["worker_id"]: one["overlap_blocks"]["device"] for one in decision["candidates"]
        }
        for name, engine in (("p", pair.p), ("d", pair.d)):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            answer = await pair.direct.post(f"{engine.url}/v1/completions", json=body)
            details = answer.json()["usage"]["prompt_tokens_details"]
            most = (len(prompt) - 1) // BLOCK
            assert details["cached_tokens"] // BLOCK == min(stated[name], most), name


async def test_kv_of_another_prompt_changes_the_text(pair):
    """The control: what the test above compares would tell wrong KV."""
    rng = random.Random(8)
    mine, other = ([rng.randrange(5, 400) for _ in range(320)] for _ in range(2))
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": MODEL, "prompt": other, "max_tokens": 1, "kv_transfer_params": asked}
    answer = await pair.direct.post(f"{pair.p.url}/v1/completions", json=body)
    params = answer.json()["kv_transfer_params"]
    wrong = await pair.text(pair.d.url, mine, kv_transfer_params=params)
    assert wrong != await pair.text(pair.p.url, mine)


@pytest.mark.parametrize("guarded", [True, False])
async def test_engines_with_unlike_blocks_are_not_paired(
    servers, unlike, one_redis_server, tmp_path, monkeypatch, guarded
):
    """The control: without the guard, texts are wrong."""
    if not guarded:
        all_alike = KvGroup("nixl", (), name="", revision="")
        monkeypatch.setattr(transfer, "group_of", lambda info: info.kv_transfer and all_alike)
    rng = random.Random(14)
    async with joined([servers[0], unlike], one_redis_server.url, tmp_path) as pair:
        for number in range(3):
            prompt = [rng.randrange(5, 400) for _ in range(300 + 70 * number)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            answer = await pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
            is_split = "x-kvroute-source" in answer.headers
            assert is_split is not guarded
            assert (text == await pair.text(pair.p.url, prompt)) is guarded


async def test_two_engines_alike_tell_so(pair, redis):
    told = [json.loads(text) for text in (await redis.hgetall(KEYS["workers"])).values()]
    fingerprints = {tuple(one["kv_fingerprint"]) for one in told}
    assert len(fingerprints) == 1
    [facts] = fingerprints
    assert not [fact for fact in facts if fact.endswith("=?")]


async def test_the_doctor_finds_a_pair_healthy(pair, one_redis_server):
    rng = random.Random(15)
    for _ in range(12):
        prompt = [rng.randrange(5, 400) for _ in range(rng.randrange(100, 600))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        for _ in range(2):
            answer = await pair.split.post("/v1/completions", json=body)
            assert answer.headers["x-kvroute-source"] == "p:0"
    more = [f"--engine-url={one.url}" for one in (pair.p, pair.d)]
    more.append(f"--router-url={pair.split.base_url}")
    found = await asyncio.to_thread(examined, one_redis_server.url, *more)
    assert bad(found) == set(), found


async def test_a_killed_source_costs_no_request(servers, one_redis_server, redis, tmp_path):
    """The last test: the pair is one no more."""
    rng = random.Random(11)
    async with joined(servers, one_redis_server.url, tmp_path) as pair:
        asked = [[rng.randrange(5, 400) for _ in range(700)] for _ in range(4)]
        texts = [await pair.text(pair.p.url, prompt) for prompt in asked]
        fresh = [[rng.randrange(5, 400) for _ in range(700)] for _ in range(3)]
        running = [
            asyncio.create_task(
                pair.split.post(
                    "/v1/completions",
                    json={"model": MODEL, "prompt": prompt, "max_tokens": 12},
                )
            )
            for prompt in fresh
        ]
        await asyncio.sleep(0.5)
        pair.p.kill()
        for answer in await asyncio.gather(*running):
            assert answer.status_code == 200, answer.text
        for prompt, text in zip(asked, texts, strict=True):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            answer = await pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
        await eventually(pair.num_requests, lambda number: number == 0)
