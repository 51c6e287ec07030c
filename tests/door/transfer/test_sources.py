"""Prompts that one engine computes and another fetches: what each is asked, and what if one fails.

The engines here only say what vLLM's NixlConnector says; tests/engines has the real ones.
"""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from app.core.roles import Role
from app.core.verdicts import parse_marks
from tests.door.conftest import completing, replica, until_serving
from tests.eventually import eventually
from tests.fake_worker import KEYS

PROMPT = list(range(40))
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "tp_size": 1,
    "transfer_mode": "pull",
}
DO = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "do_remote_decode": True,
    "do_remote_prefill": False,
}


class Engine:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, text, params=None, status=200):
        self.asked = []
        self.text, self.params, self.status = text, params, status
        self.holds_up = asyncio.Event()
        self.holds_up.set()

    async def complete(self, request):
        self.asked.append(await request.json())
        await self.holds_up.wait()
        return self.answer(self.text)

    def answer(self, text):
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
        answer = {"choices": [{"text": text}], "usage": usage}
        if self.params:
            answer["kv_transfer_params"] = self.params
        return web.json_response(answer, status=self.status)


@asynccontextmanager
async def pair(redis, url, source, target, *, registered_s=0.0, **settings):
    """A door before a worker that prefills and one that decodes; requests are always split.

    registered_s: the lease that both say they give.
    """
    about = {"kv_transfer": "nixl", "kv_lease_s": registered_s}
    async with AsyncExitStack() as opened:
        for name, engine, role in (("p", source, Role.PREFILL), ("d", target, Role.DECODE)):
            worker = completing(redis, name, engine.complete, "vllm 0.32.0", role=role, **about)
            await opened.enter_async_context(worker)
        # These engines know no streams.
        door = replica(url, policy="least_loaded", comment_every_s=0.0, **settings)
        client = await opened.enter_async_context(door)
        await until_serving(client, 2)
        yield client


async def ask(door, **more):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 9, **more}
    return await door.post("/v1/completions", json=body)


async def blocks_reserved(redis):
    loads = await redis.hgetall(KEYS["load"])
    return [int(load.split()[4]) for _, load in sorted(loads.items())]


async def failures(redis):
    """What speaks against workers."""
    return list(map(parse_marks, await redis.hvals(KEYS["verdicts"])))


async def test_the_source_is_asked_for_one_token_and_the_target_told_where_the_kv_is(
    one_redis_server, redis
):
    source, target = Engine("x", PARAMS), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        answer = await ask(door, min_tokens=3, temperature=0)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "all of it"
        assert answer.headers["x-kvroute-worker"] == "d:0"
        assert answer.headers["x-kvroute-source"] == "p:0"
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
    [asked] = source.asked
    assert asked == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": DO,
    }
    [asked] = target.asked
    assert asked == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0,
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"prompt": [PROMPT, PROMPT]}]
)
async def test_what_cannot_be_split_goes_to_one_worker_alone(one_redis_server, redis, more):
    source, target = Engine("x", PARAMS), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target, strict_roles=True) as door:
        answer = await ask(door, **more)
        assert answer.status_code == 200
        assert "x-kvroute-source" not in answer.headers
    assert not source.asked
    assert "kv_transfer_params" not in target.asked[0]


@pytest.mark.parametrize("status", [500, 503])
async def test_without_its_source_a_request_is_answered_by_its_worker_alone(
    one_redis_server, redis, status
):
    source, target = Engine("x", PARAMS, status), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        answer = await ask(door)
        assert answer.json()["choices"][0]["text"] == "all of it"
        assert "x-kvroute-source" not in answer.headers
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
    assert len(source.asked) == 1
    assert "kv_transfer_params" not in target.asked[0]


async def test_a_source_that_hands_on_nothing_costs_no_request(one_redis_server, redis):
    source, target = Engine("x"), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        assert (await ask(door)).json()["choices"][0]["text"] == "all of it"
    assert "kv_transfer_params" not in target.asked[0]


@pytest.mark.parametrize(
    "params",
    [
        PARAMS | {"remote_host": []},
        PARAMS | {"remote_host": "10.1.1.1"},
        PARAMS | {"remote_port": None},
        {"remote_block_ids": [[1]]},
        ["no object"],
    ],
)
async def test_a_broken_answer_of_a_source_is_the_source_s_failure_and_no_client_s(
    one_redis_server, redis, params
):
    source, target = Engine("x", params), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        for number in (1, 2):
            answer = await ask(door)
            assert answer.json()["choices"][0]["text"] == "all of it"
            assert "x-kvroute-source" not in answer.headers
            [said] = await failures(redis)
            assert (said.failed.count, said.failed.cause) == (number, "handover")
    assert all("kv_transfer_params" not in asked for asked in target.asked)


@pytest.mark.parametrize("refuses_all", [False, True])
async def test_what_a_target_refuses_with_a_source_it_is_asked_alone(
    one_redis_server, redis, refuses_all
):
    """The client is told of what the target refuses alone as well."""

    class Strict(Engine):
        async def complete(self, request):
            refuses = refuses_all or "kv_transfer_params" in await request.json()
            self.status = 400 if refuses else 200
            return await super().complete(request)

    source, target = Engine("x", PARAMS), Strict("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        assert (await ask(door)).status_code == (400 if refuses_all else 200)
        assert await failures(redis) == []
    with_source, alone = target.asked
    assert with_source["kv_transfer_params"] == PARAMS
    assert "kv_transfer_params" not in alone


class Frozen(Engine):
    """Answers requests that name a source once it thaws, and then, as its source's lease has ended,
    with what belongs to other prompts."""

    async def complete(self, request):
        has_source = "kv_transfer_params" in await request.json()
        self.text = "wrong" if has_source else "right"
        if not has_source:
            self.asked.append(await request.json())
            return self.answer("right")
        return await super().complete(request)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("own_s", "registered_s"), [(2.0, 0.0), (2.0, 4.0), (4.0, 2.0)])
async def test_a_target_that_has_not_begun_within_the_lease_is_given_up(
    one_redis_server, redis, own_s, registered_s, streams
):
    """Nobody says here when the lease ends: so it may, a lease after the source was asked."""
    source, target, other = Engine("x", PARAMS), Frozen("wrong"), Engine("of another")
    target.holds_up.clear()
    url = one_redis_server.url
    leases = {"kv_lease_s": own_s, "registered_s": registered_s}
    async with pair(redis, url, source, target, **leases) as door:
        answer = await ask(door, stream=streams)
        assert "right" in answer.text, "no other worker is there"
        assert "x-kvroute-source" not in answer.headers
        async with completing(redis, "e", other.complete, "vllm 0.32.0") as e:
            await until_serving(door, 3)
            answer = await ask(door, stream=streams)
            assert "of another" in answer.text
            await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0, 0])
            await e.retire()
        assert await failures(redis) == []
    assert "kv_transfer_params" not in other.asked[0]
    assert ["kv_transfer_params" in asked for asked in target.asked] == [True, False, True]


async def test_it_is_said_if_nobody_is_left_who_decodes(one_redis_server, redis):
    async with (
        completing(redis, "p", Engine("x").complete, role=Role.PREFILL, kv_transfer="nixl"),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        answer = await ask(door)
    assert answer.status_code == 503
    assert "no worker that decodes is alive: all have the role prefill" in answer.text


async def test_a_lease_counts_from_before_the_source_was_asked(one_redis_server, redis):
    """Its answer may have been held up on the way, and its lease have begun long before that."""
    source, target = Engine("x", PARAMS), Frozen("wrong")
    source.holds_up.clear()
    target.holds_up.clear()
    async with pair(redis, one_redis_server.url, source, target, kv_lease_s=3.0) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(source.asked))
        await asyncio.sleep(1.3)
        source.holds_up.set()
        await eventually(lambda: _len(target.asked))
        await asyncio.sleep(1.9)  # within a lease from the answer on
        target.holds_up.set()
        assert (await asking).json()["choices"][0]["text"] == "right"
    assert ["kv_transfer_params" in asked for asked in target.asked] == [True, False]


async def test_a_source_that_was_held_up_is_not_believed(one_redis_server, redis):
    """Its lease may have begun, and ended, long before it answered."""
    source, target = Engine("x", PARAMS), Engine("all of it")
    source.holds_up.clear()
    async with pair(redis, one_redis_server.url, source, target, kv_lease_s=0.6) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(source.asked))
        await asyncio.sleep(0.4)  # past a third of the lease
        source.holds_up.set()
        assert (await asking).json()["choices"][0]["text"] == "all of it"
    assert "kv_transfer_params" not in target.asked[0]


async def test_a_target_that_fails_takes_nobody_elses_blocks_with_it(one_redis_server, redis):
    source, target, other = Engine("x", PARAMS), Engine("no", status=500), Engine("all of it")
    async with (
        pair(redis, one_redis_server.url, source, target) as door,
        completing(redis, "e", other.complete, "vllm 0.32.0", kv_transfer="nixl"),
    ):
        await until_serving(door, 3)
        answers = [await ask(door) for _ in range(4)]
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"all of it"}
    assert target.asked
    # Where the target failed, its source may have: the prompt is computed anew.
    fetched = [body.get("kv_transfer_params") for body in other.asked]
    assert fetched.count(PARAMS) == 4 - len(target.asked)
    assert fetched.count(None) == len(target.asked)


async def test_a_client_that_hangs_up_between_the_steps_leaves_what_the_source_keeps(
    one_redis_server, redis
):
    source, target = Engine("x", PARAMS), Engine("all of it")
    target.holds_up.clear()
    async with pair(redis, one_redis_server.url, source, target, kv_lease_s=2.0) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(target.asked))
        asking.cancel()
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [10, 0])
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
        target.holds_up.set()


async def _len(asked):
    return len(asked)
