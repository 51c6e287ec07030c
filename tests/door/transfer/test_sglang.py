"""Requests that two engines work on at once, as SGLang divides prefill and decode.

The engines here only meet in a room, as SGLang's do; no real pair was tried, as it needs a GPU.
"""

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from aiohttp import web

from app.core.roles import Role
from tests.door.conftest import completing, replica, until_serving
from tests.door.transfer.test_sources import blocks_reserved
from tests.eventually import eventually
from tests.fake_worker import KEYS

PROMPT = list(range(40))
PORT = 8998


class Room:
    """Where the halves of a request meet."""

    def __init__(self):
        self.entered = {"p": asyncio.Event(), "d": asyncio.Event()}


class Half:
    """An engine that answers once the other one has the same request too."""

    def __init__(self, side, rooms):
        self.side, self.rooms = side, rooms
        self.other = "p" if side == "d" else "d"
        self.asked = []
        self.aborted = []
        self.status = 200
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.hangs = False
        self.worker = None

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        if self.hangs:
            await asyncio.Event().wait()
        entered = self.rooms[body["bootstrap_room"]].entered
        entered["d" if self.side == "d" else "p"].set()
        await entered[self.other].wait()
        await self.may_answer.wait()
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
        return web.json_response({"choices": [{"text": self.side}], "usage": usage})

    async def abort(self, request):
        self.aborted.append((await request.json())["rid"])
        return web.json_response({})

    async def health(self, _):
        if self.hangs:
            await asyncio.Event().wait()
        return web.json_response({})


@asynccontextmanager
async def divided(redis, url, *, sides="pd"):
    """A door before engines that prefill and engines that decode."""
    rooms = defaultdict(Room)
    halves = {side: Half(side, rooms) for side in sides}
    async with AsyncExitStack() as opened:
        for side, half in halves.items():
            worker = completing(
                redis,
                side,
                half.complete,
                "sglang 0.5",
                more=[web.post("/abort_request", half.abort), web.get("/health", half.health)],
                role=Role.DECODE if side == "d" else Role.PREFILL,
                kv_transfer="sglang",
                bootstrap_port=PORT,
            )
            half.worker = await opened.enter_async_context(worker)
        client = await opened.enter_async_context(replica(url))
        await until_serving(client, len(halves))
        yield client, halves


def rooms_of(body):
    """In which the sequences of a request meet, as SGLang numbers them: from one number on."""
    prompts = len(body["prompt"]) if isinstance(body["prompt"][0], str | list) else 1
    num = 1 if isinstance(body["prompt"], str) else prompts
    first = body["bootstrap_room"]
    return range(first, first + num * body.get("n", 1))


async def ask(door, **more):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 9, **more}
    return await door.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"n": 2, "prompt": ["one", "two"]},
        {"prompt": "text that only engines can read"},
    ],
)
async def test_both_get_the_same_request_at_once_and_the_one_that_decodes_is_heard(
    one_redis_server, redis, more
):
    async with divided(redis, one_redis_server.url) as (door, halves):
        answers = await asyncio.gather(*(ask(door, **more) for _ in range(5)))
        assert [each.json()["choices"][0]["text"] for each in answers] == ["d"] * 5
        asked = {side: sorted(half.asked, key=str) for side, half in halves.items()}
        assert asked["p"] == asked["d"]
        rooms = [room for one in asked["p"] for room in rooms_of(one)]
        assert len({*rooms}) == len(rooms) >= 5
        assert 0 <= min(rooms) <= max(rooms) < 1 << 63
        for one in asked["p"]:
            assert (one["bootstrap_host"], one["bootstrap_port"]) == ("127.0.0.1", PORT)
            assert one["max_tokens"] == 9
        assert halves["p"].aborted == halves["d"].aborted == []
        await eventually(lambda: blocks_reserved(redis), lambda found: found == [0, 0])


async def test_a_source_owes_no_prefill_once_its_answer_has_ended(one_redis_server, redis):
    may_answer = asyncio.Event()
    async with divided(redis, one_redis_server.url) as (door, halves):
        halves["d"].may_answer = may_answer
        asking = asyncio.create_task(ask(door))

        async def prefills():
            return [key async for key in redis.scan_iter(match=KEYS["prefills:"] + "*")]

        await eventually(prefills, lambda found: len(found) == 1)
        assert not asking.done()
        may_answer.set()
        assert (await asking).status_code == 200


async def test_a_source_gone_without_a_word_is_replaced_once_its_lease_has_run_out(
    one_redis_server, redis
):
    async with divided(redis, one_redis_server.url, sides="pdq") as (door, halves):
        halves["p"].hangs = halves["q"].hangs = True
        asking = asyncio.create_task(ask(door))

        async def asked():
            return [side for side in "pq" if halves[side].asked]

        [first] = await eventually(asked)
        [other] = {"p", "q"} - {first}
        halves[other].hangs = False
        assert halves[first].worker is not None
        await halves[first].worker.retire()
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvroute-source"] == f"{other}:0"
        assert halves["d"].aborted == [halves[first].asked[0]["rid"]]
        await eventually(lambda: blocks_reserved(redis), lambda found: found == [0, 0])


@pytest.mark.parametrize(("fails", "other"), [("p", "d"), ("d", "p")])
async def test_if_one_fails_the_other_is_told_to_abort(one_redis_server, redis, fails, other):
    async with divided(redis, one_redis_server.url) as (door, halves):
        halves[fails].status = 500
        answer = await ask(door)
        assert answer.status_code >= 500

        async def aborted():
            return {one["rid"] for one in halves[other].asked} - set(halves[other].aborted)

        await eventually(aborted, lambda left: not left)
        assert halves[other].asked
        await eventually(lambda: blocks_reserved(redis), lambda found: found == [0, 0])


async def test_if_the_client_goes_both_are_told_to_abort(one_redis_server, redis):
    async with divided(redis, one_redis_server.url) as (door, halves):
        halves["p"].other = halves["d"].other = "nobody"
        for half in halves.values():
            half.rooms.default_factory = _never
        with pytest.raises(httpx.ReadTimeout):
            await door.post("/v1/completions", json={"model": "m", "prompt": PROMPT}, timeout=3.0)

        async def aborted():
            return [half.aborted for half in halves.values()]

        [one], [other] = await eventually(aborted, all)
        assert one == other == halves["p"].asked[0]["rid"]
        await eventually(lambda: blocks_reserved(redis), lambda found: found == [0, 0])


def _never():
    room = Room()
    room.entered["nobody"] = asyncio.Event()
    return room


@pytest.mark.parametrize("side", ["p", "d"])
async def test_one_half_alone_gets_nothing(one_redis_server, redis, side):
    async with divided(redis, one_redis_server.url, sides=side) as (door, halves):
        assert (await ask(door)).status_code == 503
        assert halves[side].asked == []
