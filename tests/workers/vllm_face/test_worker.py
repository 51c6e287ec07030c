"""`kvroute worker --publish-events vllm` as a process of its own, without Redis."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from app.core.hashing import compute_hashes
from app.core.types import Tier
from tests.eventually import eventually
from tests.workers.vllm_face.mirror import Mirror
from workers.bridge.events.stream import EventStream
from workers.bridge.http.discovery import discover
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.load import LoadReader

ROOT = Path(__file__).parents[3]
PROMPT = list(range(100, 140))


@contextmanager
def serving(engine: str, *more: str) -> Iterator[str]:
    """The URL of a worker that ends well when it is told to."""
    options = [
        *("--publish-events", "vllm", "--port", "0", "--dp-rank", "1", "--engine", engine, *more),
        *("--kv-pool-tokens", "1024", "--speedup", "100", "--model", "tiny", "--device", "cpu"),
        *("--threads", "1", "--prefill-chunk", "32"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "worker", *options],
        cwd=ROOT,
        env={"REDIS_URL": "redis://127.0.0.1:1/0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        try:
            yield next(
                found[1]
                for line in process.stderr
                if (found := re.search(r"worker listening on (\S+)", line))
            )
        finally:
            process.send_signal(signal.SIGTERM)
            log = process.stderr.read()
        assert process.wait(30) == 0, log


@pytest.fixture(params=["sim", pytest.param("torch", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    """vLLM's metrics without labels, and when the process started."""
    text = (await http.get("/metrics")).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("vllm:", "process_start")) and "le" not in sample.labels
    }


async def complete(http: httpx.AsyncClient, max_tokens: int) -> dict[str, int]:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "model": "any"}
    usage: dict[str, int] = (await http.post("/v1/completions", json=body)).json()["usage"]
    return usage


async def test_an_agent_finds_out_what_it_is_and_what_it_caches(
    url: str, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/health")).status_code == 200
    async with aiohttp.ClientSession() as session:
        facts = await discover(session, url)
    [source] = facts.sources
    assert facts.version.startswith("0.33.0+")
    assert (facts.kind, facts.max_model_len, facts.capacity_tokens) == ("vllm", 1024, 1024)
    assert (facts.block_size, facts.reuse_tokens) == (16, 32 if "tiny" in facts.models else 16)
    assert (source.rank, source.topic) == (1, "")
    assert facts.started_s is not None

    await complete(http, 5)
    details = (await complete(http, 5))["prompt_tokens_details"]
    assert details["cached_tokens"] == 32  # type: ignore[index]

    mirror = Mirror(16, announces_copies=True)
    context = zmq.asyncio.Context()
    _, chain = compute_hashes(PROMPT, 16)
    with EventStream(context, source) as stream:
        following = asyncio.create_task(mirror.follow(stream))

        async def held() -> set[int]:
            return {*mirror.held()[Tier.DEVICE]}

        await eventually(held, lambda blocks: blocks == {*chain})
        assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
        await eventually(held, lambda blocks: blocks == set())
        following.cancel()
        await asyncio.wait([following])
    context.destroy(linger=0)


async def test_its_keys_open_what_they_open_at_other_workers() -> None:
    bearer = {name: {"Authorization": f"Bearer {name}"} for name in ("k", "m")}
    with serving("sim", "--worker-key", "k", "--metrics-key", "m") as url:
        async with httpx.AsyncClient(base_url=url) as nobody:
            assert (await nobody.get("/health")).status_code == 200
            for path in ("/metrics", "/version", "/kv_event_sources", "/v1/models"):
                assert (await nobody.get(path)).status_code == 401
                opens = path == "/metrics"
                with_m = (await nobody.get(path, headers=bearer["m"])).status_code
                assert with_m == (200 if opens else 401)
            assert (await nobody.post("/reset_prefix_cache")).status_code == 401
        async with aiohttp.ClientSession(headers=bearer["k"]) as session:
            assert (await discover(session, url)).kind == "vllm"
            assert 1 in (await LoadReader(EngineHttp(session, url), "vllm").read()).loads


async def test_its_metrics_have_vllms_names_and_count_requests(http: httpx.AsyncClient) -> None:
    await complete(http, 5)
    await complete(http, 3)
    text = (await http.get("/metrics")).text
    [config] = [
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    ]
    assert {name: config[name] for name in ("block_size", "num_gpu_blocks", "engine")} == {
        "block_size": "16",
        "num_gpu_blocks": "64",
        "engine": "1",
    }
    assert config["kv_cache_size_tokens"] == "1024"
    assert config["enable_prefix_caching"] == "True"
    now = await samples(http)
    expected = {
        "prompt_tokens_total": 80,
        "prompt_tokens_cached_total": 32,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 32,
        "generation_tokens_total": 8,
        "request_success_total": 2,
        "request_prefill_time_seconds_count": 2,
        "request_prefill_kv_computed_tokens_sum": 48,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 6,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: now[f"vllm:{name}"] for name in expected} == expected
    spent_s = (
        now["vllm:request_prefill_time_seconds_sum"] + now["vllm:request_decode_time_seconds_sum"]
    )
    assert 0 < spent_s <= now["vllm:e2e_request_latency_seconds_sum"]
    assert now["process_start_time_seconds"] > 0


async def test_an_agent_reads_its_load(url: str, http: httpx.AsyncClient) -> None:
    await complete(http, 5)
    await complete(http, 3)
    async with aiohttp.ClientSession() as session:
        reading = await LoadReader(EngineHttp(session, url), "vllm").read()
    load = reading.loads[1]
    assert (load.running, load.waiting, load.kv_usage, load.sleeps) == (0, 0, 0.0, False)
    assert (load.prompt_tokens, load.cached_tokens, load.hit_rate) == (80, 32, 0.4)
    assert (load.prefill_prompt_tokens, load.prefill_computed_tokens) == (80, 48)
    assert (load.prefills, load.finished_requests) == (2, 2)
    assert (load.generated_tokens, load.inter_tokens) == (8, 6)
    assert load.steps is not None
    assert load.steps >= 8
    assert load.prefill_s is not None
    assert load.prefill_s > 0
    assert reading.started_s is not None
