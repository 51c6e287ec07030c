"""Leases on KV that end while the replica that knows stands still, or an operator says other
numbers than the engine: no replica gives anybody a wrong text."""

import asyncio
import itertools
import os
import signal
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest

from app.door.transfer.kv_lease import KvLeases
from tests.door.conftest import replica, until_serving
from tests.door.transfer.test_kv_lease import FROZEN, LEASE_S, some_prompt, trio
from tests.e2e.engines import Process, agent
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE
from tests.fakes.faults import WELL, Faults
from tests.ops.test_doctor import bad, examined
from workers.agent.agent import Agent
from workers.bridge import follower

pytestmark = pytest.mark.slow

FLAG_S = 60.0
"""What operators say, of engines whose leases last LEASE_S."""


@contextmanager
def stopped(process):
    os.kill(process.popen.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.popen.pid, signal.SIGCONT)


@asynccontextmanager
async def third_replica(url):
    """A process of its own, and a client of it."""
    flags = (f"--redis-url={url}", f"--namespace={NAMESPACE}", "--port=0", "--policy=least_loaded")
    with Process("router", *flags).ending() as process:
        async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
            await until_serving(client, 3)
            yield process, client


async def ask(door, prompt, **more):
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, **more}
    return await door.post("/v1/completions", json=body)


def asked(door, prompt, number):
    """Requests that begin as that prompt does."""
    prompts = [prompt[:100] + some_prompt(50 + n) for n in range(number)]
    return [asyncio.create_task(ask(door, p, stream=n % 2 == 0)) for n, p in enumerate(prompts)]


async def started(three, number):
    """Until d has been sent so many requests."""

    async def count():
        return three.d.started

    await eventually(count, lambda found: found >= number)


async def outstanding(redis):
    return int(await redis.zcard(KEYS["fetches"]))


def wrong(answers):
    return sum("wrong" in answer.text for answer in answers)


async def nothing(*_):
    pass


@pytest.mark.parametrize("guarded", [True, False])
async def test_no_replica_gives_a_wrong_text_while_the_one_that_knows_stands_still(
    one_redis_server, redis, tmp_path, monkeypatch, guarded
):
    if not guarded:
        monkeypatch.setattr(KvLeases, "confirm", nothing)
        monkeypatch.setattr(Agent, "_tell_late", nothing)
    url, prompt = one_redis_server.url, some_prompt(1)
    async with (
        trio(redis, url, tmp_path) as three,
        replica(url, policy="least_loaded") as second,
        third_replica(url) as (process, stopping),
    ):
        await until_serving(second, 3)
        three.d.faults = FROZEN
        first = asyncio.create_task(ask(stopping, prompt))
        await started(three, 1)
        with stopped(process):
            await three.lease_ends()
            others = asked(three.door, prompt, 12) + asked(second, prompt, 12)
            await started(three, 4)
            three.d.faults = WELL
            answers = await asyncio.gather(*others)
            answers += [await ask(second, prompt), await ask(three.door, prompt)]
            assert {answer.status_code for answer in answers} == {200}
            assert (wrong(answers) == 0) is guarded
            if guarded:
                await eventually(three.tainted, lambda names: names == [b"d:0"])
        if guarded:
            assert wrong([await first]) == 0
        first.cancel()


@pytest.mark.parametrize("how", ["measured", "unproven", "believed"])
async def test_what_operators_say_of_a_lease_is_not_believed(
    one_redis_server, redis, tmp_path, monkeypatch, how
):
    """The control: where it is, texts are wrong."""
    if how == "believed":

        async def believed(*_):
            yield FLAG_S

        monkeypatch.setattr(follower, "lease_of", believed)
    url, prompt = one_redis_server.url, some_prompt(2)
    about = {"tells_lease": False, "said_s": FLAG_S}
    async with trio(redis, url, tmp_path, **about) as three:
        if how != "unproven":
            least_s = LEASE_S - 1 if how == "measured" else FLAG_S
            lease_s = await eventually(three.lease_of_p, lambda found: found >= least_s)
            assert (lease_s <= LEASE_S) is (how == "measured")
        three.d.faults = FROZEN
        answers = [asyncio.create_task(three.ask(prompt))]
        await started(three, 1)
        await three.lease_ends()
        answers += asked(three.door, prompt, 9)
        await asyncio.sleep(0.5)
        three.d.faults = WELL
        texts = [*await asyncio.gather(*answers), await three.ask(prompt)]
        assert {answer.status_code for answer in texts} == {200}
        assert (wrong(texts) > 0) is (how == "believed")
        if how == "measured":
            assert await three.tainted() == [b"d:0"]
            three.d.restart()
            await until_serving(three.door, 3)
            found = await asyncio.to_thread(examined, url)
            assert "findings" in bad(found)
            assert "--kv-lease-s is 60, its engine keeps KV for" in found["findings"]["found"]


async def test_counts_that_an_earlier_request_left_taint_no_later_one(
    one_redis_server, redis, tmp_path
):
    async with trio(redis, one_redis_server.url, tmp_path) as three:
        three.p._unheard = 2  # it counts them with its next step, for the next prompt
        three.d.faults = Faults(token_s=2 * LEASE_S / 15)
        answer = await three.ask(some_prompt(3), max_tokens=16)
        assert answer.headers["x-kvroute-worker"] == "d:0"
        assert answer.headers["x-kvroute-source"] == "p:0"
        assert three.p._counters["nixl_num_notifications_after_expiry_total"] == 2
        assert await three.tainted() == []
        assert await outstanding(redis) == 0


async def test_a_killed_replica_leaves_its_record_until_an_answer_shows_that_all_is_well(
    one_redis_server, redis, tmp_path
):
    url = one_redis_server.url
    about = {"reset": True}  # as it may hear too late that nobody waits for it any more
    async with trio(redis, url, tmp_path, **about) as three, third_replica(url) as (process, dying):
        three.d.faults = FROZEN
        lost = asyncio.create_task(ask(dying, some_prompt(4)))
        await started(three, 1)
        process.popen.kill()
        with pytest.raises(httpx.TransportError):
            await lost
        three.d.faults = WELL
        assert await outstanding(redis) == 1
        await asyncio.sleep(LEASE_S)
        prompts = itertools.count(100)

        async def left():
            assert wrong([await three.ask(some_prompt(next(prompts)))]) == 0
            return await outstanding(redis)

        await eventually(left, lambda number: number == 0)


async def test_a_target_is_passed_over_while_the_source_that_can_tell_is_not_heard_of(
    one_redis_server, redis, tmp_path
):
    url, prompt = one_redis_server.url, some_prompt(8)
    flags = ("--kv-transfer=nixl", "--role=prefill", "--kv-compatible=fakes")
    async with trio(redis, url, tmp_path, is_deaf=True) as three:
        await three.running["p"].aclose()
        with agent(three.p.url, url, tmp_path, "p", flags) as beside:
            await until_serving(three.door, 3)
            await eventually(three.lease_of_p, lambda lease_s: lease_s == LEASE_S)
            beside.end(signal.SIGKILL)
        three.d.faults = FROZEN
        lost = asyncio.create_task(three.ask(prompt))
        await started(three, 1)
        lost.cancel()
        await three.lease_ends()
        three.d.faults = WELL
        answer = await three.ask(prompt)
        assert wrong([answer]) == 0
        assert answer.headers["x-kvroute-worker"] == "e:0"

        async def target():
            return (await three.target_of(prompt))[0]

        await eventually(target, lambda name: name == "e")
        await three.begin_agent("p")

        async def tainted():
            assert wrong([await three.ask(prompt)]) == 0
            return await three.tainted()

        assert await eventually(tainted) == [b"d:0"]
