"""A real Envoy with deploy/envoy.yaml, which asks pickers, and simulated engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import httpx
import orjson
import pytest
from aiohttp import web
from grpc_health.v1.health_pb2 import HealthCheckResponse

from app.gateway import picker
from app.gateway.processor import READINESS, SERVICE
from app.local.redis_server import free_port
from tests.clients.cluster import cluster
from tests.door.conftest import MODEL, completing, until_serving, worker, worker_here
from tests.eventually import eventually
from tests.gateway.conftest import DONE, EVENTS, Gateway, picking
from tests.gateway.envoy import ENVOY, envoy, http_2_alone, pickers, place_of
from tests.redis_servers import stopped

pytestmark = [pytest.mark.gateway, pytest.mark.timeout(180)]

CHAT = "/v1/chat/completions"
ASKS = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
SERVING = HealthCheckResponse.SERVING
SLOW = 0.2
"""Times as fast as a real engine: a stream then takes seconds, and tests cut in."""


@dataclass(slots=True)
class Setup:
    """engines: base URLs, of a and b."""

    client: httpx.AsyncClient
    gateway: Gateway
    engines: list[str]


@asynccontextmanager
async def setup(url, *, num=2, speedup=100, max_requests=256, envoys=None, **settings):
    """Engines, a picker in this process, and an Envoy that asks it. settings: of the picker."""
    async with AsyncExitStack() as stack:
        of_engines = {"speedup": speedup, "max_requests": max_requests}
        engines = [
            await stack.enter_async_context(worker_here(url, name, **of_engines))
            for name in "ab"[:num]
        ]
        gateway = await stack.enter_async_context(picking(url, show_decision=True, **settings))
        await gateway.until_serving(num)
        ports = [gateway.processor.port]
        client = await stack.enter_async_context(envoy(ports, engines, **(envoys or {})))
        yield Setup(client, gateway, engines)


@asynccontextmanager
async def streaming(client, **more):
    """A stream, of which something has come."""
    asks = ASKS | {"stream": True, "max_tokens": 100} | more
    async with client.stream("POST", CHAT, json=asks) as answer:
        assert answer.status_code == 200, await answer.aread()
        pieces = answer.aiter_bytes()
        await anext(pieces)
        answer.extensions["rest"] = pieces
        yield answer


async def rest_of(answer):
    return b"".join([piece async for piece in answer.extensions["rest"]])


async def test_an_answer_is_the_engines_own(one_redis_server):
    async with setup(one_redis_server.url) as up:
        asks = ASKS | {"model": MODEL}
        answer = await up.client.post(CHAT, json=asks)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert answer.headers["x-kvroute-worker"] in ("a:0", "b:0")
        await up.gateway.until_reserved()


async def test_a_stream_passes_event_by_event(one_redis_server):
    async with setup(one_redis_server.url) as up:
        async with httpx.AsyncClient(base_url=up.engines[0]) as engine:
            direct = await engine.post(CHAT, json=ASKS | {"model": MODEL, "stream": True})
        answer = await up.client.post(CHAT, json=ASKS | {"stream": True})

        def said(text):
            events = [each.removeprefix("data: ") for each in text.split("\n\n")]
            return [orjson.loads(each)["choices"] for each in events if each.startswith("{")]

        assert said(answer.text) == said(direct.text)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "usage" not in answer.text


async def test_the_first_event_comes_long_before_the_last(one_redis_server):
    async with setup(one_redis_server.url, num=1, speedup=SLOW) as up:
        async with streaming(up.client) as answer:
            await up.gateway.until_reserved(a=1)
            assert (await rest_of(answer)).endswith(b"data: [DONE]\n\n")
        await up.gateway.until_reserved()


async def test_of_a_pickers_own_paths_clients_get_its_health(one_redis_server):
    async with setup(one_redis_server.url) as up:
        assert (await up.client.get("/health")).json() == {"status": "ok"}
        assert (await up.client.get("/metrics")).status_code == 404


async def test_a_large_body_passes(one_redis_server):
    async with setup(one_redis_server.url) as up:
        long = "word " * 60_000
        answer = await up.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": long, "max_tokens": 2}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 60_000


async def test_clients_may_speak_http_2(one_redis_server):
    async with setup(one_redis_server.url) as up:
        url = str(up.client.base_url.join(CHAT))
        command = ["curl", "-sS", "--http2-prior-knowledge", "-o", "/dev/null"]
        command += ["-w", "%{http_version} %{http_code}", "-d", orjson.dumps(ASKS).decode(), url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.stdout == "2 200", done.stderr


@pytest.mark.parametrize("http_2", [True, False])
async def test_engines_may_speak_http_2_where_the_gateway_is_told(http_2, one_redis_server):
    url, port = one_redis_server.url, free_port()
    async with (
        http_2_alone(port) as address,
        worker_here(url, "a", port=port, address=address),
        picking(url) as gateway,
        envoy([gateway.processor.port], [address], http_2=http_2) as client,
    ):
        answer = await client.post(CHAT, json=ASKS)
        if not http_2:
            assert answer.status_code >= 500
            return
        assert answer.json()["usage"]["completion_tokens"] == 8
        streamed = await client.post(CHAT, json=ASKS | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        long = {"model": MODEL, "prompt": "word " * 60_000, "max_tokens": 2}
        assert (await client.post("/v1/completions", json=long)).status_code == 200
        refused = await client.post(CHAT, json=ASKS | {"logprobs": True})
        assert refused.json()["error"]["param"] == "logprobs"
        await gateway.until_reserved()


async def test_a_request_is_confined_to_a_subset(one_redis_server):
    async with setup(one_redis_server.url) as up:
        host, port = place_of(up.engines[1])
        for _ in range(4):
            answer = await up.client.post(CHAT, json=ASKS, headers={"x-subset": f"{host}:{port}"})
            assert answer.headers["x-kvroute-worker"] == "b:0"
        answer = await up.client.post(CHAT, json=ASKS, headers={"x-subset": "127.0.0.1:1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        assert answer.headers["retry-after"] == "1"


async def test_a_request_too_many_is_429(one_redis_server):
    async with (
        setup(one_redis_server.url, num=1, speedup=SLOW, max_requests=1) as up,
        streaming(up.client),
    ):
        answer = await up.client.post(CHAT, json=ASKS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "all_workers_busy")
        assert answer.headers["retry-after"].isdigit()


async def test_what_an_engine_refuses_is_told_as_the_api_has_it(one_redis_server):
    async with setup(one_redis_server.url, num=1) as up:
        async with httpx.AsyncClient(base_url=up.engines[0]) as engine:
            direct = await engine.post(CHAT, json=ASKS | {"model": MODEL, "logprobs": True})
        assert direct.status_code == 422
        answer = await up.client.post(CHAT, json=ASKS | {"logprobs": True})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "logprobs")
        assert answer.headers["content-type"] == "application/json"
        await up.gateway.until_reserved()


async def test_a_refusal_without_an_end_is_told(one_redis_server, redis, monkeypatch):
    monkeypatch.setattr(picker, "REFUSED_WITHIN_S", 0.2)
    is_over = asyncio.Event()

    async def refuse(asked):
        answer = web.StreamResponse(status=400, headers={"content-type": "application/json"})
        await answer.prepare(asked)
        await answer.write(b'{"error": {"message": "no such thing", "type": "invalid"}}')
        await is_over.wait()
        return answer

    url = one_redis_server.url
    async with completing(redis, "a", refuse) as engine, picking(url) as gateway:
        await gateway.until_serving(1)
        ports = [gateway.processor.port]
        async with envoy(ports, [engine.info.address]) as client:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": [1, 2]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "no such thing"
            await gateway.until_reserved()
        is_over.set()


async def test_a_client_that_hangs_up_releases(one_redis_server):
    async with setup(one_redis_server.url, num=1, speedup=SLOW) as up:
        async with streaming(up.client):
            await up.gateway.until_reserved(a=1)
        await up.gateway.until_reserved()


async def test_what_waits_is_given_up_when_its_client_leaves(one_redis_server):
    options = {"max_requests": 1, "wait_queue": 8, "wait_timeout_s": 600.0}
    async with setup(one_redis_server.url, num=1, speedup=SLOW, **options) as up:
        waiting = up.gateway.waiting
        async with streaming(up.client):
            asked = asyncio.create_task(up.client.post(CHAT, json=ASKS))
            await eventually(waiting, lambda num: num == 1)
            asked.cancel()
            await eventually(waiting, lambda num: num == 0)


async def test_another_worker_answers_for_one_that_was_killed(one_redis_server):
    """Its lease goes on for a while."""
    url = one_redis_server.url
    with worker(url, "gone", lease_ttl_s=60.0) as gone:
        async with worker_here(url, "a") as here, picking(url, show_decision=True) as gateway:
            await gateway.until_serving(2)
            async with envoy([gateway.processor.port], [gone.url, here]) as client:
                gone.end(signal.SIGKILL)
                answers = [await client.post(CHAT, json=ASKS) for _ in range(12)]
                assert {each.status_code for each in answers} == {200}
                assert {each.headers["x-kvroute-worker"] for each in answers} == {"a:0"}
                await gateway.until_reserved()
                text = (await gateway.http.get("/metrics")).text
                assert 'cause="unreachable"' in text


@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_a_picker_any_engine_is_asked_or_none(fail_open, one_redis_server):
    url = one_redis_server.url
    async with (
        worker_here(url, "a") as engine,
        pickers(url, 1) as (ports, [one]),
        envoy(ports, [engine], fail_open=fail_open) as client,
    ):
        assert (await client.post(CHAT, json=ASKS)).status_code == 200
        one.end(signal.SIGKILL)

        async def status():
            return (await client.post(CHAT, json=ASKS)).status_code

        expected = 200 if fail_open else 503
        # The body of a request that finds it gone is gone with it.
        await eventually(status, lambda seen: seen == expected)
        assert [await status() for _ in range(6)] == [expected] * 6
        if not fail_open:
            refused = await client.post(CHAT, json=ASKS)
            assert refused.json()["error"]["code"] == "no_picker"
            assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize("is_killed", [True, False])
async def test_requests_go_on_while_redis_is_away_and_when_it_is_back(is_killed, own_redis_server):
    """Killed, it comes back empty; else it answers nothing for a while."""
    server, asks = own_redis_server, ASKS | {"stream": True}
    async with setup(server.url, redis_timeout_ms=300) as up:
        gateway = up.gateway

        async def degraded():
            """Decisions so far."""
            lines = (await gateway.http.get("/metrics")).text.splitlines()
            found = [each for each in lines if each.startswith("kvroute_degraded_decisions_total")]
            return sum(float(each.rpartition(" ")[2]) for each in found)

        async def answers():
            """How many of six decisions are degraded; each request is answered."""
            before = await degraded()
            said = [await up.client.post(CHAT, json=asks) for _ in range(6)]
            assert all(each.text.endswith("data: [DONE]\n\n") for each in said)
            return await degraded() - before

        assert await answers() == 0
        if is_killed:
            server.kill()
        with nullcontext() if is_killed else stopped(server.pid):
            assert await answers() == 6
            for service in (READINESS, SERVICE):
                health = partial(gateway.health, service)
                assert await eventually(health, lambda found: found == SERVING)
            ready = await eventually(
                lambda: gateway.http.get("/readiness"), lambda said: '"redis: ' in said.text
            )
            assert ready.json()["ready"]
        if is_killed:
            server.start()
        await eventually(answers, lambda num: num == 0)
        await gateway.until_serving(2)
        await gateway.until_reserved()


async def test_two_pickers_promise_one_slot_once(one_redis_server):
    url = one_redis_server.url
    async with (
        worker_here(url, "a", speedup=SLOW, max_requests=1) as engine,
        picking(url) as one,
        picking(url) as other,
    ):
        for each in (one, other):
            await each.until_serving(1)
        async with envoy([one.processor.port, other.processor.port], [engine]) as client:
            asks = (client.post(CHAT, json=ASKS | {"max_tokens": 40}) for _ in range(12))
            answers = await asyncio.gather(*asks)
            assert Counter(each.status_code for each in answers) == {200: 1, 429: 11}
            await one.until_reserved()


@dataclass(slots=True)
class Engines:
    """Of this test alone. came_by: the key of the picker that has sent a request. running, most: as
    many as an engine has at a time now, and had at most."""

    came_by: dict[str, str] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    async def answer(self, asked, name):
        self.came_by[(await asked.json())["user"]] = asked.headers["authorization"]
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        self.running[name] += 1
        self.most[name] = max(self.most[name], self.running[name])
        try:
            await answer.prepare(asked)
            for _ in range(10):
                await answer.write(EVENTS[0])
                await asyncio.sleep(0.02)
        finally:
            self.running[name] -= 1
        await answer.write(EVENTS[1] + DONE)
        return answer


async def test_two_of_three_pickers_die_and_only_what_they_had_is_lost(one_redis_server, redis):
    url, slots, engines = one_redis_server.url, 4, Engines()
    async with AsyncExitStack() as stack:
        addresses = []
        for name in "ab":
            answers = partial(engines.answer, name=name)
            one = completing(redis, name, answers, max_requests=slots)
            addresses.append((await stack.enter_async_context(one)).info.address)
        waits = {"wait_queue": 100, "wait_timeout_s": 60}
        ports, processes = await stack.enter_async_context(pickers(url, 3, **waits))
        for process in processes:
            async with httpx.AsyncClient(base_url=process.url) as http:
                await until_serving(http, len(addresses))
        client = await stack.enter_async_context(envoy(ports, addresses))
        names, is_over = (f"r{n}" for n in count()), asyncio.Event()
        dead, done, failed, lost = list[str](), list[str](), list[str](), list[str]()

        async def asks():
            while not is_over.is_set():
                name, before = next(names), len(dead)
                body = {"model": "m", "prompt": [1, 2], "stream": True, "user": name}
                text = ""
                with suppress(httpx.TransportError):
                    text = (await client.post("/v1/completions", json=body)).text
                if text.endswith("data: [DONE]\n\n"):
                    done.append(name)
                    continue
                failed.append(name)
                # What no engine has had may have been in a picker that died meanwhile.
                by = engines.came_by.get(name, "" if before == len(dead) else dead[-1])
                if by not in dead:
                    lost.append(f"{name} by {by!r}: {text}")

        async def forty_more():
            least = len(done) + 40
            await eventually(_length(done), lambda num: num >= least)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3 * slots):
                tasks.create_task(asks())
            for port, process in zip(ports[:2], processes, strict=False):
                await forty_more()
                dead.append(f"Bearer {port}")
                process.end(signal.SIGKILL)
            await forty_more()
            is_over.set()
        assert lost == []
        assert failed, "none was in a picker that died: nothing was tried"
        assert engines.most == {"a": slots, "b": slots}
        async with httpx.AsyncClient(base_url=processes[2].url) as http:

            async def reserved():
                workers = (await http.get("/v1/workers")).json()["workers"]
                return sum(each["active_requests"] for each in workers)

            # Those of the dead lapse within seconds, as at a door that died.
            await eventually(reserved, lambda num: num == 0)


def _length(of):
    async def length():
        return len(of)

    return length


def test_a_cluster_on_this_machine_has_it_as_its_balancer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{ENVOY.parent}{os.pathsep}{os.environ['PATH']}")
    options = ("--gateway", "envoy", "--replicas", "2")
    with cluster(tmp_path / "log", *options) as url:
        answer = httpx.post(f"{url}{CHAT}", json=ASKS, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
    assert "envoy, which asks the pickers" in (tmp_path / "log").read_text()
