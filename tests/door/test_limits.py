"""Limits of keys hold over all replicas, whatever becomes of replicas and Redis."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress

import anthropic
import httpx
import openai
import pytest

from app.core.key_rules import parse_rules
from app.router import limiter
from app.state import admission
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.door.conftest import replica, sick_worker, until_serving
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE
from tests.fakes.faults import Faults
from tests.redis_servers import SentinelServers, default_kind, stopped

PATH = "/v1/completions"
LONG_S = float(os.environ.get("LIMITS_S", "600"))
LONG = (pytest.mark.slow, pytest.mark.timeout(LONG_S + 300))
LATE_S = 2.0
OPERATOR = {"authorization": "Bearer o"}


def body(tokens=20, **more):
    return {"model": "m", "prompt": [*range(1, tokens + 1)], "max_tokens": 8} | more


def keys_file(folder, *limits, more=""):
    file = folder / "keys"
    file.write_text(f"ops o operator\nann a {' '.join(limits)}\n{more}")
    return str(file)


@asynccontextmanager
async def replicas(server, count, file, **settings):
    """Clients, with the limited key, of so many replicas in this process."""
    async with AsyncExitStack() as stack:
        doors = [
            await stack.enter_async_context(replica(server.url, api_key_file=file, **settings))
            for _ in range(count)
        ]
        for door in doors:
            door.headers.update(OPERATOR)
            await until_serving(door, 1)
            door.headers.update({"authorization": "Bearer a"})
        yield doors


@contextmanager
def processes(server, count, file):
    flags = (f"--redis-url={server.url}", f"--namespace={NAMESPACE}", f"--api-key-file={file}")
    # A busy machine must not pass for a Redis that is away.
    flags += ("--redis-timeout-ms=5000", "--port=0")
    with ExitStack() as stack:
        started = [Process("router", *flags) for _ in range(count)]
        for one in started:
            stack.callback(lambda one=one: one.popen.poll() is None and one.end())
        yield started


@pytest.mark.parametrize("lasts_s", [4.0, pytest.param(LONG_S, marks=LONG)])
async def test_four_replicas_and_64_clients_get_what_one_bucket_holds(
    one_redis_server, redis, tmp_path, lasts_s
):
    file, let_in = keys_file(tmp_path, "requests=600/m"), []

    async def insist(door, until_s):
        while time.monotonic() < until_s:
            reply = await door.post(PATH, json=body())
            if reply.status_code == 200:
                let_in.append(time.monotonic())
                continue
            assert reply.status_code == 429, reply.text
            await asyncio.sleep(int(reply.headers["retry-after-ms"]) / 1000)

    async with sick_worker(redis, "a"), replicas(one_redis_server, 4, file) as doors:
        began_s = time.monotonic()
        until_s = began_s + lasts_s
        await asyncio.gather(*(insist(doors[n % 4], until_s) for n in range(64)))
        took_s = time.monotonic() - began_s
    # How many a slow machine asks for is another question.
    assert 20 <= len(let_in) <= 100 + 10 * took_s + 1
    # An answer's way to its client takes a moment, by which a window may be longer.
    fullest = max(sum(at <= one < at + 60.0 for one in let_in) for at in let_in)
    assert fullest <= 600 + 100 + 10 * LATE_S


@asynccontextmanager
async def insisting(server, redis, file, chosen=24):
    """So many clients that ask again and again, of three replicas as processes: the replicas, their
    URLs, of which some may be taken away, requests at work whenever one came, and answers."""
    peaks, served = [0], [0]
    async with (
        sick_worker(redis, "a") as a,
        sick_worker(redis, "b") as b,
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client,
    ):

        def seen(_):
            peaks.append(a.running + b.running)
            return Faults(token_s=0.02)

        a.choose = b.choose = seen
        with processes(server, 3, file) as routers:
            urls = [one.url for one in routers]
            for url in urls:
                async with httpx.AsyncClient(base_url=url, headers=OPERATOR) as operator:
                    await until_serving(operator, 2)

            async def insist(number):
                while True:
                    url = urls[number % len(urls)] + PATH
                    with suppress(httpx.TransportError):
                        asked = body(stream=True)
                        reply = await client.post(url, json=asked, headers={"x-api-key": "a"})
                        served[0] += reply.status_code == 200
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as tasks:
                going = [tasks.create_task(insist(number)) for number in range(chosen)]
                yield routers, urls, peaks, served
                for task in going:
                    task.cancel()


async def more_served(served, than=30):
    before = served[0]

    async def now():
        return served[0]

    await eventually(now, lambda number: number >= before + than)


async def test_no_more_than_its_places_are_taken_while_a_replica_is_killed(
    one_redis_server, redis, tmp_path
):
    file = keys_file(tmp_path, "concurrent=8")
    async with insisting(one_redis_server, redis, file) as (routers, urls, peaks, served):
        await more_served(served)
        urls.pop()
        routers[2].end(signal.SIGKILL)
        await more_served(served)
    # Its places come back.
    held = f"{KEYS['limits:']}ann"

    async def lost():
        fields = await redis.hgetall(held)
        now_ms = 1000 * (await redis.time())[0]
        return sum(
            int(value.split()[0])
            for name, value in fields.items()
            if name.startswith(b"held ") and int(value.split()[1]) > now_ms
        )

    await eventually(lost, lambda number: number == 0, within_s=30.0)
    assert 1 <= max(peaks) <= 8


@pytest.mark.slow
async def test_no_more_than_its_places_are_taken_while_redis_fails_over_and_replicas_die(tmp_path):
    file = keys_file(tmp_path, "concurrent=8")
    with SentinelServers(default_kind()) as servers:
        async with (
            connect(servers.url) as redis,
            insisting(servers, redis, file) as (routers, urls, peaks, served),
        ):
            await more_served(served)
            servers.master.kill()
            await more_served(served)
            urls.pop()
            routers[2].end(signal.SIGKILL)
            await more_served(served, 300)
    assert 1 <= max(peaks) <= 8


async def test_tokens_are_settled_by_what_engines_say_and_hang_ups_at_once(
    one_redis_server, redis, tmp_path
):
    words = ("tokens=6M/d", "uncached=6M/d", "concurrent=50")
    file, rules = keys_file(tmp_path, *words), parse_rules("ann", [*words], ())
    name, used, computed = f"{KEYS['limits:']}ann", 0, 0
    async with sick_worker(redis, "a") as a, replicas(one_redis_server, 2, file) as doors:
        began_s = time.monotonic()
        for number in range(40):
            reply = await doors[number % 2].post(PATH, json=body(300, max_tokens=200))
            usage = reply.json()["usage"]
            used += usage["prompt_tokens"] + usage["completion_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed += usage["prompt_tokens"] - cached

        async def taken(of="tokens"):
            seconds, micros = await redis.time()
            call = admission.used(KEYS, rules, 1000 * seconds + micros // 1000)
            return (await ScriptRunner(redis, 5.0).one(call))[of][0]

        settled = await eventually(taken, lambda found: found < 1.02 * used)
        refilled = 6e6 / 86_400 * (time.monotonic() - began_s)
        assert used * 0.98 - refilled <= settled
        uncached = await taken("uncached")
        assert computed < used / 10, "all but the first prompt was cached"
        assert computed * 0.98 - refilled <= uncached <= computed * 1.02
        a.faults = Faults(token_s=1.0)
        before = await taken()
        async with doors[0].stream("POST", PATH, json=body(300, stream=True)) as reply:
            await anext(reply.aiter_bytes())

        async def hung_up():
            held = [v for k, v in (await redis.hgetall(name)).items() if k.startswith(b"held ")]
            return all(value.split()[0] == b"0" for value in held)

        await eventually(hung_up)
        assert await taken() - before < 320


@pytest.mark.parametrize("words", [("requests=60/h",), ("tokens=600/h",), ("concurrent=1",)])
async def test_who_is_refused_is_told_when_to_come_again_in_the_form_of_the_path(
    one_redis_server, redis, tmp_path, words
):
    file = keys_file(tmp_path, *words)
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with sick_worker(redis, "a") as a, replicas(one_redis_server, 1, file) as [door]:
        if words[0] == "concurrent=1":
            a.faults = Faults(token_s=5.0)
            held = asyncio.create_task(door.post(PATH, json=body()))
            await eventually(lambda: _running(a))
        else:
            firsts = [await door.post(PATH, json=body(150)) for _ in range(11)]
            assert firsts[0].status_code == 200
            shown = firsts[0].headers
            if words[0] == "requests=60/h":
                assert shown["x-ratelimit-limit-requests"] == "60"
                assert shown["x-ratelimit-remaining-requests"] == "9"
                assert 50 < float(shown["x-ratelimit-reset-requests"].rstrip("s")) <= 60
        refused = await door.post(PATH, json=body())
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert words[0].partition("=")[0] in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        refused = await door.post("/v1/messages", json=chat)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after-ms"]) > 0
        if words[0] == "requests=60/h":
            assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
            assert refused.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        routed = await door.post("/v1/route", json={"token_ids": [*range(1, 200)]})
        assert (routed.status_code, routed.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        if words[0] != "tokens=600/h":
            reply = await door.post("/tokenize", json={"model": "m", "prompt": "x"})
            assert reply.status_code == 429
        if words[0] == "concurrent=1":
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            a.faults = Faults()
            await eventually(lambda: _status(door), lambda status: status == 200)


async def _running(engine):
    return engine.running


async def _status(door):
    return (await door.post(PATH, json=body())).status_code


@pytest.mark.parametrize("which", ["openai", "anthropic"])
async def test_clients_wait_as_they_are_told_and_go_on(one_redis_server, redis, tmp_path, which):
    file = keys_file(tmp_path, "requests=60/m")  # ten at once, and then one a second
    said = {"model": "m", "max_tokens": 4}
    said["messages"] = [{"role": "user", "content": "hi"}]
    async with sick_worker(redis, "a"), replicas(one_redis_server, 1, file) as [door]:
        url, options = str(door.base_url).rstrip("/"), {"api_key": "a", "max_retries": 9}
        if which == "openai":
            opened = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
            ask = opened.chat.completions.create
        else:
            opened = anthropic.AsyncAnthropic(base_url=url, **options)
            ask = opened.messages.create
        async with opened:
            began_s = time.monotonic()
            answers = await asyncio.gather(*(ask(**said) for _ in range(13)))
            took_s = time.monotonic() - began_s

        async def used():
            [row] = (await door.get("/v1/usage", headers=OPERATOR)).json()["rows"]
            return dict(row)

        row = await eventually(used, lambda row: row["requests"] - row["refused"] == 13)
    assert len(answers) == 13
    assert 3 <= row["refused"] <= 13, "each waited for as long as it was told"
    assert took_s >= 2.0


async def test_without_redis_replicas_keep_to_their_part_and_to_what_they_hold(
    own_redis_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(limiter, "SETTLED_S", 0.2)
    file = keys_file(tmp_path, "requests=600/m", "concurrent=2")
    async with (
        connect(own_redis_server.url) as redis,
        sick_worker(redis, "a") as a,
        replicas(own_redis_server, 2, file, redis_timeout_ms=200) as doors,
    ):
        assert [await _status(door) for door in doors] == [200, 200]
        a.faults = Faults(token_s=0.2)
        held = asyncio.create_task(doors[0].post(PATH, json=body()))
        await eventually(lambda: _running(a))
        with stopped(own_redis_server.pid):
            # One place is free, but who may have it cannot be known.
            assert [await _status(door) for door in doors] == [429, 429]
            assert (await held).status_code == 200
            assert await _status(doors[0]) == 200
            assert await _status(doors[1]) == 429
        await eventually(lambda: _status(doors[1]), lambda status: status == 200)


async def test_a_key_without_limits_asks_nothing_of_redis_for_them(
    one_redis_server, redis, tmp_path
):
    file = keys_file(tmp_path)
    async with sick_worker(redis, "a"), replicas(one_redis_server, 1, file) as [door]:
        reply = await door.post(PATH, json=body())
    assert reply.status_code == 200
    assert not [name for name in reply.headers if "ratelimit" in name]
    assert not await redis.keys(f"{KEYS['limits:']}*")


def test_each_bucket_of_a_replica_alone_is_its_part_of_the_whole():
    rules = parse_rules("ann", ["requests=600/m"], ())
    assert rules.requests is not None
    alone = limiter._Alone(rules.requests, 4, 25.0, 0.0)
    taken = 0
    for step in range(1000):
        if not alone.wait_s(1, step / 100):
            alone.level -= 1
            taken += 1
    assert taken == pytest.approx(25 + 600 / 60 / 4 * 10, abs=1)
