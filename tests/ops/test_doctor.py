"""`kvroute doctor` on real servers and an engine that shows itself as vLLM."""

import asyncio
import json
import re

import httpx
import orjson
import pytest
from aiohttp import web

from app.core.hashing import compute_local_hashes, compute_sequence_hashes
from app.core.keys import METRICS_MAXLEN
from app.core.types import Tier
from app.door.told.alarm import MIN_ANSWERS
from app.local.redis_server import free_port
from app.ops import checks
from app.state import index
from tests.door.conftest import completing, replica, until_serving
from tests.e2e.engines import SharedPrompts, agent, complete, engine
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE
from tests.ops.conftest import PROMPT, kvroute

ENTRY = {
    "worker": "w1:0",
    "gpu_cache_usage_perc": "0.5",
    "gpu_prefix_cache_hit_rate": "0.5",
}


def examined(url, *arguments, namespace=NAMESPACE):
    """The checks by what they are about."""
    result = kvroute(url, "doctor", "--json", *arguments, namespace=namespace)
    found = json.loads(result.stdout)
    assert result.exit_code == int(any(check["ok"] is False for check in found))
    return {check["about"]: check for check in found}


def bad(found):
    """But for slowness: the machine that tests run on may be busy."""
    return {about for about, check in found.items() if check["ok"] is False} - {"redis latency"}


def unknown(found):
    return {about for about, check in found.items() if check["ok"] is None}


def inc_of(raw, name):
    found = raw.hget(KEYS["current"], name)
    assert isinstance(found, bytes)
    return found


def measured(raw, **entry):
    """Let both workers have published."""
    for name in (b"w1:0", b"w2:1"):
        said = ENTRY | {"worker": name.decode(), "incarnation": inc_of(raw, name).decode()} | entry
        raw.xadd(KEYS["metrics"], said, maxlen=METRICS_MAXLEN)


def test_nothing_is_wrong_with_workers_that_are_alike(url, raw):
    measured(raw)
    found = examined(url)
    assert bad(found) == set()
    assert list(found) == [
        "redis version",
        "redis latency",
        "redis eviction",
        "redis memory",
        "clocks",
        "workers",
        "agents",
        "engines",
        "versions",
        "block size",
        "models",
        "tokenizer",
        "context length",
        "adapters",
        "model names",
        "metrics",
        "cache hits",
        "routers",
    ]
    assert unknown(found) == {"models", "context length", "tokenizer", "cache hits", "routers"}
    measured(raw)
    lines = [line for line in kvroute(url, "doctor").output.splitlines() if line[2:7] != "redis"]
    for line in lines:
        if line[0] != " ":
            assert line[:2] == ("? " if "not known" in line else "✓ ")


def test_workers_that_may_hold_kv_of_other_prompts_are_named(url, raw):
    measured(raw)
    raw.hset(KEYS["verdicts"], "w1:0", '{"tainted":{"since_ms":1,"life":"1000.5"}}')
    found = examined(url)
    assert bad(found) == {"tainted workers"}
    assert found["tainted workers"]["found"].startswith("w1:0: ")
    assert found["workers"]["found"] == "1 serving, 1 tainted"


def test_a_slow_redis_is_told(url, monkeypatch):
    monkeypatch.setattr(checks, "SLOW_S", 0.0)
    assert examined(url)["redis latency"]["ok"] is False


def test_an_unknown_namespace_is_named_with_the_known_ones(url):
    found = examined(url, namespace="other")
    assert bad(found) == {"namespace other"}
    assert found["namespace other"]["remedy"] == f"--namespace {NAMESPACE}"


def test_a_redis_that_is_away_is_the_only_thing_said():
    result = kvroute("redis://127.0.0.1:1", "doctor")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.output
    assert result.output.count("✗") == 1


def test_a_redis_that_drops_keys_is_told(url, raw):
    measured(raw)
    raw.config_set("maxmemory-policy", "allkeys-lru")
    raw.config_set("maxmemory", "100mb")
    try:
        result = kvroute(url, "doctor")
    finally:
        raw.config_set("maxmemory-policy", "noeviction")
        raw.config_set("maxmemory", "0")
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("✗")]
    assert any(line.startswith("✗ redis eviction: ") for line in lines)
    assert "    CONFIG SET maxmemory-policy noeviction" in result.output


@pytest.mark.parametrize(("fill", "is_fine"), [(0.86, True), (0.94, False)])
def test_a_redis_that_is_nearly_full_is_told(url, raw, fill, is_fine):
    raw.config_set("maxmemory", round(raw.info("memory")["used_memory"] / fill))
    try:
        assert examined(url)["redis memory"]["ok"] is is_fine
    finally:
        raw.config_set("maxmemory", "0")


@pytest.mark.parametrize(
    ("about", "fields"),
    [
        ("models", {"models": ["llama"]}),
        ("tokenizer", {"tokenizer_hash": "0123"}),
        ("adapters", {"adapters": ["sql"]}),
    ],
)
def test_workers_that_differ_are_named(url, raw, about, fields):
    measured(raw)
    alike = {"models": ["qwen"], "tokenizer_hash": "4567", "max_model_len": 4096}
    for name, said in ((b"w1:0", alike), (b"w2:1", alike | fields)):
        inc = inc_of(raw, name)
        text = raw.hget(KEYS["workers"], inc.decode())
        raw.hset(KEYS["workers"], inc.decode(), json.dumps(json.loads(text) | said))
    found = examined(url)
    assert bad(found) == {about}
    if about == "adapters":
        assert found[about]["found"] == "sql on 1 of 2"
    else:
        assert "(w1:0)" in found[about]["found"]
        assert "(w2:1)" in found[about]["found"]


def test_context_lengths_may_differ(url, raw):
    measured(raw)
    for name, length in ((b"w1:0", 8000), (b"w2:1", 300)):
        inc = inc_of(raw, name).decode()
        text = raw.hget(KEYS["workers"], inc)
        raw.hset(KEYS["workers"], inc, json.dumps(json.loads(text) | {"max_model_len": length}))
    found = examined(url)["context length"]
    assert (found["ok"], found["found"]) == (True, "300 to 8,000: each request goes where it fits")


def test_another_version_is_told(url, raw):
    measured(raw)
    raw.hset(KEYS["meta"], "version", 99)
    assert "version 99" in examined(url)[f"namespace {NAMESPACE}"]["found"]


def test_old_metrics_are_told(url, raw):
    found = examined(url)
    assert bad(found) == {"metrics"}
    assert "w1:0: never" in found["metrics"]["found"]
    measured(raw)
    assert not bad(examined(url))


def test_workers_whose_agents_are_away_are_told_and_take_requests(url, raw):
    measured(raw)
    seconds, _ = raw.time()
    away = {"since_ms": int(seconds) * 1000 - 7000, "until_ms": int(seconds) * 1000 + 60_000}
    raw.hset(KEYS["verdicts"], "w1:0", orjson.dumps({"away": away}))
    found = examined(url)
    assert bad(found) == {"agents"}
    assert found["workers"]["found"] == "1 away, 1 serving"
    assert re.match(r"1 of 2 are away: w1:0 for [78] s$", found["agents"]["found"])


def test_workers_that_drain_leave_none_that_is_live(url):
    for name in ("w1", "w2"):
        kvroute(url, "drain", name, "--deadline-s", "0")
    found = examined(url)
    assert bad(found) == {"workers"}
    assert found["workers"]["found"] == "2 draining"


async def hits_of(url, raw, prompts, hit_rate):
    """What is said of hits once w1 was sent these prompts, and reports that share as cached."""
    measured(raw)
    async with started_replica(url) as client:
        for prompt in prompts:
            asked = {"token_ids": prompt, "exclude": ["w2"]}
            answer = await client.post("/v1/route", json=asked)
            await client.delete(f"/v1/requests/{answer.json()['request_id']}")

        async def recorded():
            return int(raw.xlen(KEYS["decisions"]))

        await eventually(recorded, lambda number: number >= len(prompts))
        measured(raw, gpu_prefix_cache_hit_rate=hit_rate)
        found = await asyncio.to_thread(examined, url)
    return dict(found["cache hits"])


async def test_hits_that_workers_do_not_report_are_told(url, raw):
    told = await hits_of(url, raw, [PROMPT] * 60, "0.1")
    assert told["found"] == "w1:0: 100% predicted, 10% reported"


async def test_hits_are_compared_by_tokens_not_by_prompts(url, raw):
    """Of 110 prompts 50 are cached, but of 8,300 tokens 8,000."""
    told = await hits_of(url, raw, [PROMPT] * 50 + [[9, 9, 9, 9, 9]] * 60, "0.95")
    assert told["found"] == "as predicted: 1 worker with 50 or more recorded predictions"


async def until_healthy(beside):
    async def healthy():
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{beside.url}/health")).status_code

    await eventually(healthy, lambda status: status == 200, within_s=60.0)


async def test_an_engine_and_its_agent_are_looked_at(one_redis_server, tmp_path):
    url = one_redis_server.url
    with engine() as one, engine() as other, agent(one.url, url, tmp_path) as beside:
        await until_healthy(beside)
        urls = [f"--engine-url={engine.url}" for engine in (one, other)]
        found = await eventually(
            lambda: asyncio.to_thread(examined, url, *urls, "--probe"),
            lambda found: bad(found) == {f"engine {other.url} agent"},  # its metrics come soon
        )
        nowhere = "http://127.0.0.1:1"
        missing = await asyncio.to_thread(examined, url, f"--engine-url={nowhere}")
    assert unknown(found) >= {f"engine {one.url} idle times"}
    assert "--kv-cache-metrics" in found[f"engine {one.url} idle times"]["found"]
    assert found[f"engine {one.url} agent"]["found"] == "registered as e:0"
    assert found[f"engine {one.url} events"]["ok"]
    assert bad(missing) == {f"engine {nowhere}"}


@pytest.mark.slow
async def test_an_engine_that_publishes_nothing_is_named_with_the_flag_that_it_lacks(
    one_redis_server, tmp_path
):
    url = one_redis_server.url
    with (
        engine(publishes=False) as silent,
        agent(silent.url, url, tmp_path) as beside,
    ):
        await until_healthy(beside)
        found = await eventually(
            lambda: asyncio.to_thread(examined, url, f"--engine-url={silent.url}"),
            lambda found: not bad(found),  # its metrics come soon
        )
    for about in ("approximate workers", f"engine {silent.url}"):
        assert about in unknown(found)
        assert "--kv-events-config" in found[about]["found"]


async def test_an_engine_is_looked_at_before_any_namespace_exists(one_redis_server):
    with engine() as one:
        found = await asyncio.to_thread(
            examined, one_redis_server.url, f"--engine-url={one.url}", "--probe"
        )
        again = await asyncio.to_thread(
            examined, one_redis_server.url, f"--engine-url={one.url}", "--probe"
        )
    assert bad(found) == {f"namespace {NAMESPACE}", f"engine {one.url} agent"}
    assert found[f"engine {one.url} events"]["ok"]
    assert again[f"engine {one.url} events"]["ok"]


@pytest.mark.slow
async def test_a_replay_endpoint_at_which_nobody_answers_is_named(
    one_redis_server, tmp_path, monkeypatch
):
    monkeypatch.setattr("workers.bridge.checks.EVENTS_S", 4.0)
    url, nowhere = one_redis_server.url, f"tcp://127.0.0.1:{free_port()}"
    deaf = [f"--replay-endpoint={nowhere}"]
    with engine() as one, agent(one.url, url, tmp_path, more=deaf) as beside:
        await until_healthy(beside)
        found = await eventually(
            lambda: asyncio.to_thread(examined, url, f"--engine-url={one.url}"),
            lambda found: bad(found) == {"events", f"engine {one.url} events"},
        )
    said = found[f"engine {one.url} events"]["found"]
    assert f"nothing came from {nowhere} in 4 s, where its agent asks for missed events" in said


@pytest.mark.parametrize("probe", [[], ["--probe"]])
async def test_the_events_are_looked_for_where_the_agent_listens(
    one_redis_server, tmp_path, monkeypatch, probe
):
    monkeypatch.setattr("workers.bridge.checks.EVENTS_S", 1.0)
    url, nowhere = one_redis_server.url, f"tcp://127.0.0.1:{free_port()}"
    deaf = [f"--events-endpoint={nowhere}"]
    with engine() as one, agent(one.url, url, tmp_path, more=deaf) as beside:
        await until_healthy(beside)
        found = await eventually(
            lambda: asyncio.to_thread(examined, url, f"--engine-url={one.url}", *probe),
            lambda found: bad(found) == {"events", f"engine {one.url} events"},
        )
    said = found[f"engine {one.url} events"]["found"]
    assert f"nothing came from {nowhere} in 1 s, where its agent listens" in said


async def test_an_agent_that_hears_nothing_while_its_engine_computes_says_so(
    one_redis_server, tmp_path
):
    url, nowhere = one_redis_server.url, f"tcp://127.0.0.1:{free_port()}"
    deaf = [f"--events-endpoint={nowhere}"]
    with engine() as one, agent(one.url, url, tmp_path, more=deaf) as beside:
        await until_healthy(beside)
        prompts = SharedPrompts(1)

        async def silent():
            async with httpx.AsyncClient(base_url=one.url) as http:
                await complete(http, "sim", [*prompts.next(), *range(100)])
                metrics = (await http.get(f"{beside.url}/metrics")).text
            return 'kvroute_agent_events_silent{rank="0",worker="e"} 1.0' in metrics

        await eventually(silent, within_s=30.0)
        await eventually(
            lambda: asyncio.to_thread(examined, url),
            lambda found: bad(found) == {"events"},
            within_s=30.0,
        )
    assert f"e:0: approximate: nothing is heard from {nowhere}" in beside.said


async def test_a_router_whose_worker_finds_less_cached_than_predicted_says_so(
    one_redis_server, redis
):
    prompt = list(range(4000))
    usage = {"prompt_tokens": 4000, "completion_tokens": 1}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}

    async def complete(request):
        await request.read()
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})

    async with (
        completing(redis, "forgets", complete) as worker,
        replica(one_redis_server.url) as client,
    ):
        local = compute_local_hashes(prompt, worker.info.block_size)
        chain = compute_sequence_hashes(local)
        await worker.publish(index.chain_changes(chain, Tier.DEVICE))
        await until_serving(client, 1)
        router = str(client.base_url).rstrip("/")

        async def of_router():
            option = f"--router-url={router}"
            found = await asyncio.to_thread(examined, one_redis_server.url, option)
            return dict(found[f"router {router}"])

        assert (await of_router())["ok"]
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        for _ in range(MIN_ANSWERS):
            answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == 200
        answer = await client.get("/readiness")
        assert answer.status_code == 200
        [remark] = [what for what in answer.json()["missing"] if what.startswith("cached")]
        assert remark == (
            "cached tokens: of its prompts of model m, 99.9% was predicted to be cached by worker "
            "forgets:0, and 0.0% was; 99.9% was predicted and missing"
        )
        told = await of_router()
        assert not told["ok"]
        assert remark in told["found"]
    away = await asyncio.to_thread(examined, one_redis_server.url, f"--router-url={router}")
    assert f"router {router}" in bad(away)
