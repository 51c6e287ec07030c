"""What clients and proxies may say of a request in headers, whatever that is."""

import asyncio
import logging

import pytest
from aiohttp import web

from app.edge import ask
from tests.door.conftest import completing, replica, until_serving

PATH = "/v1/completions"
ASKED = {"model": "m", "prompt": [1, 2, 3]}


async def complete(_):
    return web.json_response({"choices": [{"text": "x"}]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-id", "x" * 4000),
        ("x-request-id", "mit Ümlaut"),
        ("x-tenant-id", "Team A"),
        ("x-priority", "5"),
        ("x-priority", "HIGH"),
        ("x-session-id", "a session"),
        ("x-request-start", "soon"),
        ("traceparent", "nonsense"),
    ],
)
async def test_a_header_that_does_not_fit_is_told_once_and_refuses_nobody(
    one_redis_server, redis, caplog, monkeypatch, name, value
):
    monkeypatch.setattr(ask, "_seen_unfit", set())
    async with completing(redis, "a", complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        with caplog.at_level(logging.WARNING, ask.__name__):
            for _ in range(3):
                headers = [(name.encode(), value.encode())]
                answer = await door.post(PATH, json=ASKED, headers=headers)
                assert answer.status_code == 200, answer.text
    assert sum(name in record.getMessage() for record in caplog.records) <= 1


async def test_a_session_in_the_body_that_is_no_name_refuses_nobody(one_redis_server, redis):
    async with completing(redis, "a", complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for session in ("one two", "x" * 500, 7, {"a": 1}, ""):
            answer = await door.post(PATH, json=ASKED | {"session_id": session})
            assert answer.status_code == 200, answer.text


async def test_engines_tell_requests_apart_to_which_a_client_gave_one_id(one_redis_server, redis):
    seen = []
    all_there = asyncio.Event()

    async def wait(request):
        seen.append(request.headers["x-request-id"])
        if len(seen) == 4:
            all_there.set()
        await all_there.wait()
        return await complete(request)

    async with completing(redis, "a", wait), replica(one_redis_server.url) as door:
        await until_serving(door, 1)

        async def ask_it():
            return await door.post(PATH, json=ASKED, headers={"x-request-id": "same"})

        answers = await asyncio.gather(*(ask_it() for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len(set(seen)) == 4
    assert all(name.startswith("same-") for name in seen)
