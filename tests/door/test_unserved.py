"""What no worker has had may go to another fleet; what one has had may be what it failed of."""

import asyncio
from contextlib import closing, suppress

import pytest
from aiohttp import web

from app.door.engine import upstream
from app.local.redis_server import free_port
from tests.attack.engine import hostile_worker
from tests.door.conftest import completing, registered, replica, until_serving
from tests.fake_worker import KEYS

COMPLETIONS = "/v1/completions"
ASKS = {"X-Unserved-Status": "425"}


def asked(how="good"):
    return {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "user": how}


async def gone(redis, name):
    """A worker at whose address nothing listens."""
    await registered(redis, name, f"http://127.0.0.1:{free_port()}")


async def test_what_reached_no_worker_is_told_to_who_asks(one_redis_server, redis):
    await gone(redis, "a")
    async with replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for path in (COMPLETIONS, "/tokenize"):
            answer = await door.post(path, json=asked(), headers=ASKS)
            assert (answer.status_code, answer.headers["x-status"]) == (425, "502"), path
        answer = await door.post(COMPLETIONS, json=asked())
        assert answer.status_code == 502
        assert "x-status" not in answer.headers


@pytest.mark.parametrize("status", [200, 429, 500, 503])
async def test_what_a_worker_has_answered_is_the_answer(one_redis_server, redis, status):
    num_answers = 0

    async def complete(_):
        nonlocal num_answers
        num_answers += 1
        return web.Response(status=status)

    for name in "bc":
        await gone(redis, name)
    async with (
        completing(redis, "a", complete),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 3)
        answers = await asyncio.gather(
            *(door.post(COMPLETIONS, json=asked(), headers=ASKS) for _ in range(10))
        )
        answered = sum(answer.status_code != 425 for answer in answers)
        # The only one that is left is asked once more, but not while it says that it is full.
        assert 0 < answered <= num_answers <= (1 if status == 429 else 2) * answered


@pytest.mark.parametrize("how", ["resets", "nothing"])
async def test_what_a_worker_failed_of_is_sent_nowhere_else(one_redis_server, redis, how):
    async with (
        hostile_worker(redis, KEYS, "a", "m"),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        answer = await door.post(COMPLETIONS, json=asked(how), headers=ASKS)
        assert answer.status_code == 502, answer.text


async def test_an_engine_that_dies_of_a_request_on_a_kept_connection_has_had_it(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr(upstream, "STALE_S", 60.0)
    kind = b"content-type: application/json\r\ncontent-length: 14"
    good = b'HTTP/1.1 200 OK\r\n%b\r\n\r\n{"choices":[]}' % kind
    requests = []

    async def talk(reader, writer):
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                requests.append(await reader.readexactly(size))
                if b"kills" in requests[-1]:
                    server.close()
                    writer.transport.abort()
                    return
                writer.write(good)

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await registered(redis, "a", f"http://127.0.0.1:{port}")
    async with replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        await asked_well(door)
        answer = await door.post(COMPLETIONS, json=asked("kills"), headers=ASKS)
        assert answer.status_code == 502, answer.text
    assert sum(b"kills" in each for each in requests) == 1


async def asked_well(door):
    answer = await door.post(COMPLETIONS, json=asked())
    assert answer.status_code == 200, answer.text
