"""Two real vLLM between which KV travels, through the front door: see `make test-vllm-pd`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from app.door.kv_leases import KvLeases
from app.local.redis_server import EmbeddedRedis, free_port
from app.policy import sources
from app.policy.pairing import KvGroup
from tests.door.conftest import replica, until_serving
from tests.door.test_failures import nothing_reserved
from tests.e2e.engines import agent
from tests.engines.vllm_server import BLOCK, MAX_SEQS, MODEL, VENV, VllmServer, make_models
from tests.eventually import eventually
from tests.fake_worker import KEYS

LEASE_S = 10.0
PROMPTS = 100
COMPUTED, FETCHED = "local_compute", "external_kv_transfer"

pytestmark = [pytest.mark.vllm_pd, pytest.mark.timeout(1800)]


class PdServer(VllmServer):
    """With NixlConnector, over shared memory."""

    side_channel_port: int


def server(folder: Path, name: str, *, block: int = BLOCK) -> PdServer:
    port = free_port()
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
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
    made.side_channel_port = port
    return made


class Pair:
    """p computes prompts, d decodes. split: a door that splits each request; priced: one that does
    where it is quicker."""

    def __init__(
        self,
        p: PdServer,
        d: PdServer,
        split: httpx.AsyncClient,
        priced: httpx.AsyncClient,
        direct: httpx.AsyncClient,
    ) -> None:
        self.p, self.d, self.split, self.priced, self.direct = p, d, split, priced, direct

    async def text(self, url: str, prompt: list[int], **more: Any) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
        answer = await self.direct.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    async def by_source(self) -> dict[str, float]:
        """Prompt tokens of d so far, by where their KV came from."""
        text = (await self.direct.get(f"{self.d.url}/metrics")).text
        lines = re.findall(r'prompt_tokens_by_source_total\{.*source="([^"]+)".*\} (\S+)', text)
        return {source: float(value) for source, value in lines}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pd")
    make_models(folder)
    started = [server(folder, name) for name in ("p", "d")]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


@pytest.fixture
def unlike(servers: list[PdServer]) -> Iterator[PdServer]:
    """With blocks twice as long as theirs."""
    started = server(servers[0].folder, "u", block=2 * BLOCK)
    try:
        started.wait()
        yield started
    finally:
        started.kill()


@pytest.fixture
async def pair(
    servers: list[PdServer], one_redis_server: EmbeddedRedis, tmp_path: Path
) -> AsyncIterator[Pair]:
    async with joined(servers, one_redis_server.url, tmp_path) as pair:
        yield pair


@asynccontextmanager
async def joined(servers: list[PdServer], url: str, folder: Path) -> AsyncIterator[Pair]:
    p, d = servers
    way = "--kv-transfer=nixl"
    ports = [f"--side-channel-port={one.side_channel_port}" for one in servers]
    lease = {"kv_lease_s": LEASE_S, "answer_timeout_s": 600.0}
    with (
        agent(p.url, url, folder / "p", "p", ("--role=prefill", way, ports[0])),
        agent(d.url, url, folder / "d", "d", ("--role=decode", way, ports[1])),
    ):
        async with (
            replica(url, policy="least_loaded", **lease) as split,
            replica(url, **lease) as priced,
            httpx.AsyncClient(timeout=600) as direct,
        ):
            for door in (split, priced):
                door.timeout = httpx.Timeout(600)
                await until_serving(door, 2)
            yield Pair(p, d, split, priced, direct)


def prompts(seed: int) -> list[list[int]]:
    """Of one to thirty blocks; two in three begin as an earlier one."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(PROMPTS):
        prefix = rng.choice(made)[: rng.randrange(900)] if made and rng.random() < 0.66 else []
        tail = [rng.randrange(5, 400) for _ in range(rng.randrange(20, 500))]
        made.append(prefix + tail)
    return made


async def test_texts_are_those_of_one_engine_and_the_target_computes_what_was_said(
    pair: Pair, redis: Redis
) -> None:
    rng = random.Random(2)
    texts: set[str] = set()
    forms: list[str | None] = []
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

        async def counted(before: dict[str, float] = before) -> dict[str, float]:
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
    await nothing_reserved(redis)
    await overlaps_are_what_is_cached(pair, rng.sample(prompts(1), 20))


async def overlaps_are_what_is_cached(pair: Pair, some: list[list[int]]) -> None:
    """At rest, for both engines."""
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


async def test_kv_of_another_prompt_changes_the_text(pair: Pair) -> None:
    """The control: what the test above compares would tell wrong KV."""
    rng = random.Random(8)
    mine, other = ([rng.randrange(5, 400) for _ in range(320)] for _ in range(2))
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": MODEL, "prompt": other, "max_tokens": 1, "kv_transfer_params": asked}
    answer = await pair.direct.post(f"{pair.p.url}/v1/completions", json=body)
    params = answer.json()["kv_transfer_params"]
    wrong = await pair.text(pair.d.url, mine, kv_transfer_params=params)
    assert wrong != await pair.text(pair.p.url, mine)


async def test_a_client_gone_between_the_steps_leaves_nothing_after_the_lease(
    pair: Pair, redis: Redis
) -> None:
    rng = random.Random(9)
    for delay_s in (0.1, 0.3, 0.6, 1.0):
        prompt = [rng.randrange(5, 400) for _ in range(1500)]
        # Long enough that no machine answers within the longest delay.
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await pair.split.post("/v1/completions", json=body, timeout=delay_s)
    await nothing_reserved(redis, within_s=LEASE_S + 20)


def engine_core(server: PdServer) -> list[int]:
    """The processes that compute, beside the one that answers."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,pgid,args", "--no-headers"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    found = [
        int(pid)
        for pid, group, name in rows
        if int(group) == server.process_group and name.startswith("VLLM::")
    ]
    assert found
    return found


@contextmanager
def frozen(server: PdServer) -> Iterator[None]:
    """Its API answers meanwhile, but for what is computed."""
    processes = engine_core(server)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


async def overwrite(pair: Pair, rng: random.Random) -> None:
    """What p has let go of is used for others."""
    for _ in range(30):
        other = [rng.randrange(5, 400) for _ in range(1200)]
        await pair.text(pair.p.url, other, max_tokens=1)


async def marks(redis: Redis) -> list[bytes]:
    return [name for name in await redis.hkeys(KEYS["failures"]) if b"tainted" in name]


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_target_that_fetched_after_the_lease_answers_nobody(
    pair: Pair, redis: Redis, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """Until it has dropped what it holds. The control: without the guard, its text is wrong."""
    if not guarded:
        monkeypatch.setattr(KvLeases, "confirm", passes)
        for look in ("_look_at", "_look_after"):
            monkeypatch.setattr(KvLeases, look, lambda *_: None)
    rng = random.Random(10 + guarded)
    prompt = [rng.randrange(5, 400) for _ in range(800)]
    right = await pair.text(pair.p.url, prompt)
    await pair.text(pair.d.url, prompt[:64])
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    with frozen(pair.d):
        asking = asyncio.create_task(
            pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
        )
        await asyncio.sleep(LEASE_S + 8)
        await overwrite(pair, rng)
    texts = []
    for answer in (
        await asking,
        await pair.split.post("/v1/completions", json=body | {"ignore_eos": True}),
        await pair.priced.post("/v1/completions", json=body | {"ignore_eos": True}),
    ):
        # Nobody else decodes; then it is said that nobody is there.
        assert answer.status_code in (200, 502, 503), answer.text
        texts += [answer.json()["choices"][0]["text"]] if answer.status_code == 200 else []
    if not guarded:
        assert set(texts) != {right}
        await pair.direct.post(f"{pair.d.url}/reset_prefix_cache")
        return
    assert set(texts) <= {right}
    # Its engine is asked to drop what it holds, which it does; then it is back.
    await until_serving(pair.split, 2)
    assert await eventually(lambda: marks(redis), lambda names: not names) == []
    answer = await pair.split.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.json()["choices"][0]["text"] == right
    await nothing_reserved(redis, within_s=LEASE_S + 20)


async def passes(*_: object) -> None:
    pass


async def test_a_whole_answer_may_take_longer_than_the_lease(pair: Pair, redis: Redis) -> None:
    rng = random.Random(12)
    prompt = [rng.randrange(5, 400) for _ in range(300)]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    began_s = time.monotonic()
    answer = await pair.split.post("/v1/completions", json=body | {"max_tokens": 3000})
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began_s > LEASE_S, "else it proves nothing"
    assert answer.headers["x-kvroute-source"] == "p:0"
    assert answer.headers["x-kvroute-worker"] == "d:0"
    assert answer.json()["choices"][0]["text"] == await pair.text(
        pair.p.url, prompt, max_tokens=3000
    )
    assert await marks(redis) == []


async def test_a_target_may_queue_longer_than_the_lease(pair: Pair, redis: Redis) -> None:
    """It prolongs it meanwhile."""
    rng = random.Random(13)
    prompt = [rng.randrange(5, 400) for _ in range(300)]
    right = await pair.text(pair.p.url, prompt)
    body = {"model": MODEL, "max_tokens": 1000, "ignore_eos": True}
    others = [
        asyncio.create_task(
            pair.direct.post(f"{pair.d.url}/v1/completions", json=body | {"prompt": [5 + number]})
        )
        for number in range(MAX_SEQS)
    ]

    async def all_run() -> bool:
        text = (await pair.direct.get(f"{pair.d.url}/metrics")).text
        return re.search(rf"num_requests_running\{{.*\}} {MAX_SEQS}", text) is not None

    await eventually(all_run)
    began_s = time.monotonic()
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = await pair.split.post("/v1/completions", json=asked | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began_s > LEASE_S, "else it proves nothing"
    assert answer.headers["x-kvroute-source"] == "p:0"
    assert answer.json()["choices"][0]["text"] == right
    assert await marks(redis) == []
    for one in await asyncio.gather(*others):
        assert one.status_code == 200


@pytest.mark.parametrize("guarded", [True, False])
async def test_engines_with_unlike_blocks_are_not_paired(
    servers: list[PdServer],
    unlike: PdServer,
    one_redis_server: EmbeddedRedis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    guarded: bool,
) -> None:
    """The control: without the guard, texts are wrong."""
    if not guarded:
        all_alike = KvGroup("nixl", (), "")
        monkeypatch.setattr(sources, "group_of", lambda info: info.kv_transfer and all_alike)
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


async def test_two_engines_alike_tell_so(pair: Pair, redis: Redis) -> None:
    told = [json.loads(text) for text in (await redis.hgetall(KEYS["workers"])).values()]
    fingerprints = {tuple(one["kv_fingerprint"]) for one in told}
    assert len(fingerprints) == 1
    [facts] = fingerprints
    assert not [fact for fact in facts if fact.endswith("=?")]


async def test_a_killed_source_costs_no_request(
    servers: list[PdServer], one_redis_server: EmbeddedRedis, redis: Redis, tmp_path: Path
) -> None:
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
        await nothing_reserved(redis, within_s=LEASE_S + 20)
