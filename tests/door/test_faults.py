"""Engines that hang, are full or half alive, replicas that are killed, clients that leave: through
the front door, with real engines. The long form of some is in `make test-slow`."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from app.core.keys import Keyspace
from app.ops.verify import verify
from app.state.connect import connect
from tests.door.conftest import (
    MODEL,
    completing,
    models,
    replica,
    until_serving,
    worker,
    worker_here,
)
from tests.door.test_answers import chat, counted, events
from tests.door.test_failures import nothing_reserved, running_on
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

SHORT_AND_LONG = [20, pytest.param(500, marks=pytest.mark.slow)]
AT_ONCE = 20


async def nothing_contradicts(url):
    """`kvroute inspect verify` finds nothing."""
    async with connect(url) as redis:

        async def findings():
            found, _ = await verify(redis, Keyspace(NAMESPACE), 1000)
            return list(found)

        await eventually(findings, lambda found: found == [])


@asynccontextmanager
async def replica_process(url, **options):
    """A replica as a process of its own, and a client of it."""
    chosen = {"redis_url": url, "namespace": NAMESPACE, "port": 0, "redis_timeout_ms": 5000}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (chosen | options).items()]
    process = Process("router", *flags)
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
            yield process, client
    finally:
        process.end()


async def ask(door, number, **more):
    return await door.post("/v1/chat/completions", json=chat(f"{number}", **more))


@pytest.mark.parametrize("number", SHORT_AND_LONG)
async def test_workers_killed_under_load_cost_no_request_that_had_not_begun(
    one_redis_server, redis, number
):
    url = one_redis_server.url
    async with AsyncExitStack() as stack:
        workers = [stack.enter_context(worker(url, name, speedup=4)) for name in "ab"]
        await stack.enter_async_context(worker_here(url, "c", speedup=4))
        door = await stack.enter_async_context(replica(url))
        await until_serving(door, 3)
        statuses = []

        async def some(turns, killed):
            for turn in turns:
                statuses.append((await ask(door, turn, max_tokens=20)).status_code)
                if turn >= number and killed.is_set():
                    break

        # One after the other, as a request that loses two workers is refused.
        for victim in workers:
            turns, killed = count(), asyncio.Event()
            asking = asyncio.gather(*(some(turns, killed) for _ in range(AT_ONCE)))
            await eventually(lambda at=victim: running_on(at.url), lambda running: running > 0)
            victim.popen.send_signal(signal.SIGKILL)
            killed.set()
            await asking
        assert set(statuses) == {200}
        assert await counted(door, f'retries_total{{model="{MODEL}"}}') > 0
        await nothing_reserved(redis)
        await nothing_contradicts(url)


async def test_a_killed_replica_breaks_only_its_own_streams_and_leaves_nothing(
    one_redis_server, redis
):
    url = one_redis_server.url
    async with (
        worker_here(url, "a", speedup=2) as first,
        worker_here(url, "b", speedup=2) as second,
        replica_process(url, log_level="info") as (one, door),
        replica(url) as other,
    ):
        for each in (door, other):
            await until_serving(each, 2)

        async def running():
            return await running_on(first) + await running_on(second)

        broken = [
            asyncio.create_task(ask(door, n, max_tokens=2000, ignore_eos=True)) for n in range(8)
        ]
        await eventually(running, lambda found: found == 8)
        whole = [asyncio.create_task(ask(other, n, max_tokens=60, stream=True)) for n in range(8)]
        # Not all at once: on a busy machine the first may end before the last begins.
        await eventually(running, lambda found: found > 8)
        one.popen.send_signal(signal.SIGKILL)
        ended = await asyncio.gather(*broken, return_exceptions=True)
        assert {type(error) for error in ended} <= {
            httpx.ReadError,
            httpx.RemoteProtocolError,
        }
        for answer in await asyncio.gather(*whole):
            assert len(events(answer.text)) == 60
        await eventually(running, lambda found: found == 0)  # long before 2,000 tokens
        await nothing_reserved(redis)
        await nothing_contradicts(url)


async def test_a_worker_that_hangs_is_given_up_and_another_one_answers(one_redis_server, redis):
    url = one_redis_server.url
    with worker(url, "a", lease_ttl_s=2.0) as hangs:
        async with worker_here(url, "b"), replica(url) as door:
            await until_serving(door, 2)
            body = {"model": MODEL, "max_tokens": 8}
            # They share nothing, so that both workers get some. Every other one streams.
            bodies = [
                body | {"prompt": [1000 * n + i for i in range(500)], "stream": n % 4 < 2}
                for n in range(16)
            ]
            hangs.popen.send_signal(signal.SIGSTOP)
            try:
                answers = await asyncio.gather(
                    *(door.post("/v1/completions", json=one) for one in bodies)
                )
            finally:
                hangs.popen.send_signal(signal.SIGCONT)
            assert {answer.status_code for answer in answers} == {200}
            assert await counted(door, f'retries_total{{model="{MODEL}"}}') > 0
            await nothing_reserved(redis)
            await nothing_contradicts(url)


async def test_a_worker_whose_agent_is_gone_goes_on_with_its_answers(one_redis_server, redis):
    came, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(_):
        came.set()
        await goes_on.wait()
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        return web.json_response({"choices": [], "usage": usage})

    async with completing(redis, "a", slow) as agent, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
        asking = asyncio.create_task(door.post("/v1/completions", json=body))
        await came.wait()
        await agent.retire()

        async def left():
            return await models(door)

        await eventually(left, lambda found: found == [])
        assert not asking.done()
        goes_on.set()
        assert (await asking).status_code == 200


async def test_full_engines_are_back_pressure_and_not_failures(one_redis_server, redis):
    async def full(_):
        return web.json_response(
            {"error": {"message": "queue full", "type": "overloaded", "code": 503}},
            status=503,
            headers={"retry-after": "7"},
        )

    async with (
        completing(redis, "a", full),
        completing(redis, "b", full),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 2)
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
        answers = await asyncio.gather(
            *(door.post("/v1/completions", json=body) for _ in range(50))
        )
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"7"}
        shown = (await door.get("/v1/workers")).json()
        # Their caller leaves them alone for as long as they ask; nobody else does.
        assert [one["state"] for one in shown["workers"]] == ["serving"] * 2
        assert all(one["witnesses"] for one in shown["workers"])
        assert [one["failures"] for one in shown["workers"]] == [0, 0]
        await nothing_reserved(redis)


@pytest.mark.parametrize(
    ("phase", "streams"),
    [
        ("in the line", False),
        ("in the line", True),
        ("before the first token", False),
        ("before the first token", True),
        ("in the stream", True),
    ],
)
async def test_clients_that_hang_up_leave_nothing_in_whatever_phase(
    one_redis_server, redis, streams, phase
):
    url = one_redis_server.url
    prompt = list(range(2000))
    async with (
        worker_here(url, "a", speedup=0.5, max_requests=2) as only,
        replica(url, wait_queue=100) as door,
    ):
        await until_serving(door, 1)
        body = {"model": MODEL, "max_tokens": 2000, "stream": streams}

        async def stay(number, seen):
            asked = body | {"prompt": [number, *prompt]}
            async with door.stream("POST", "/v1/completions", json=asked) as answer:
                async for _ in answer.aiter_text():
                    seen.set()

        async def waiting():
            lines = (await door.get("/metrics")).text.splitlines()
            found = [one for one in lines if one.startswith("kvroute_waiting_requests")]
            return sum(float(line.rpartition(" ")[2]) for line in found)

        seen = [asyncio.Event() for _ in range(50)]
        count = 50 if phase == "in the line" else 2
        asking = [asyncio.create_task(stay(n, seen[n])) for n in range(count)]
        await eventually(lambda: running_on(only), bool)
        if phase == "in the line":
            await eventually(waiting, lambda number: number > 0)
        elif phase == "in the stream":
            for one in seen[:2]:
                await one.wait()
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await eventually(lambda: running_on(only), lambda n: n == 0)
        await nothing_reserved(redis)
        await nothing_contradicts(url)


async def test_a_client_that_reads_nothing_costs_the_replica_no_memory(one_redis_server):
    url = one_redis_server.url
    with worker(url, "a", speedup=1000, kv_pool_tokens=2_000_000):
        async with replica_process(url, stalled_s=60, log_level="info") as (process, door):
            await until_serving(door, 1)

            def rss():
                statm = Path(f"/proc/{process.popen.pid}/statm").read_text()
                return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

            await ask(door, 0, stream=True, max_tokens=2000, ignore_eos=True)
            before = rss()
            async with AsyncExitStack() as stack:
                for number in range(8):
                    asked = chat(f"{number}", stream=True, max_tokens=30_000, ignore_eos=True)
                    # 30,000 tokens are 6 MB of events each, and none is read.
                    await stack.enter_async_context(
                        door.stream("POST", "/v1/chat/completions", json=asked)
                    )
                await asyncio.sleep(2.0)
                assert rss() - before < 8 * 2**20
