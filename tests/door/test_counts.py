"""How many tasks, futures, timers and time-outs the door makes for a request: each costs CPU."""

import asyncio
import http.client
import sys
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import orjson
import pytest
import uvicorn
from aiohttp import web

import app
from tests.door.conftest import MODEL, completing, replica, until_serving, worker

NUM = 20
OWNERS = (str(Path(app.__file__).parent) + "/", str(Path(uvicorn.__file__).parent) + "/")
"""Whose objects count: those of the client and of the engine, in the same loop, do not."""
ELSEWHERE = (OWNERS[0] + "router/", OWNERS[0] + "state/")
"""Requests that are decided together share what these make."""
PROMPT = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 16}


@pytest.fixture
async def door(one_redis_server):
    """As the usual one, with a worker as a process: what it makes here would count, too."""
    url = one_redis_server.url
    with worker(url, "a"):
        async with replica(url) as client:
            await until_serving(client, 1)
            yield client


def is_of_a_request():
    """Whether the innermost file of ours, or uvicorn's, is at work for a request, or for bytes of a
    connection: not at what is done from time to time."""
    frame = sys._getframe(2)
    files, names = [], set()
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWNERS):
            files.append(frame.f_code.co_filename)
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    is_at_work = not names.isdisjoint(("run_asgi", "data_received"))
    return is_at_work and not files[0].startswith(ELSEWHERE)


@contextmanager
def counted(patch):
    """What is made within it, by kind."""
    loop, made = asyncio.get_running_loop(), Counter[str]()

    def counting(kind, make):
        def made_by_us(*args, **options):
            if is_of_a_request():
                made[kind] += 1
            return make(*args, **options)

        return made_by_us

    with patch.context() as patched:
        patched.setattr(loop, "create_future", counting("futures", loop.create_future))
        patched.setattr(loop, "create_task", counting("tasks", loop.create_task))
        patched.setattr(loop, "call_at", counting("timers", loop.call_at))
        timeout = asyncio.Timeout
        patched.setattr(timeout, "__init__", counting("time-outs", timeout.__init__))
        yield made


async def per_request(door, patch, **more):
    def ask(number):
        """In a thread, over one connection, so that the client makes nothing in the loop."""
        url = door.base_url
        connection = http.client.HTTPConnection(url.host, url.port or 0, timeout=30)
        for _ in range(number):
            connection.request("POST", "/v1/completions", orjson.dumps(PROMPT | more))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        connection.close()

    await asyncio.to_thread(ask, 3)
    with counted(patch) as made:
        await asyncio.to_thread(ask, NUM)
    return {kind: number / NUM for kind, number in made.items()}


async def test_a_whole_answer(door, monkeypatch):
    found = await per_request(door, monkeypatch)
    assert found.pop("tasks") == 1
    # It may come after its head.
    assert found.pop("futures") <= 2
    # Of uvicorn, for the time until the next request; and a few that many requests share.
    assert found.pop("timers") <= 1.5
    # Now and then a connection is new.
    assert found.pop("time-outs", 0) <= 0.5
    assert found == {}


async def test_a_stream(door, monkeypatch):
    found = await per_request(door, monkeypatch, stream=True)
    assert found.pop("tasks") == 1
    # Each piece may be waited for.
    assert found.pop("futures") <= 3 + PROMPT["max_tokens"]
    assert found.pop("timers") <= 1.5
    # Now and then a connection is new.
    assert found.pop("time-outs", 0) <= 0.5
    assert found == {}


async def test_a_retry(one_redis_server, redis, monkeypatch):
    refused = set()

    async def complete(request):
        name = request.headers["x-request-id"]
        if name in refused:
            return web.json_response({"choices": []})
        refused.add(name)
        return web.json_response({}, status=500)

    async with AsyncExitStack() as stack:
        # Half of them may be suspended.
        for name in "abcdef":
            await stack.enter_async_context(completing(redis, name, complete))
        door = await stack.enter_async_context(replica(one_redis_server.url))
        await until_serving(door, 6)
        found = await per_request(door, monkeypatch, model="m")
    assert found.pop("tasks") == 1
    assert found.pop("futures") <= 5
    # A retry connects anew, and that has a deadline of its own.
    assert found.pop("time-outs") <= 1.5
    assert found.pop("timers") <= 2.5
    assert found == {}
