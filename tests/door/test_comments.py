"""A stream that waits is not silent, and what it ends in is what its dialect ends in."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from app.door.engine.upstream import MAX_WHOLE_BYTES
from app.edge.client import COMMENT
from app.state.scripts import ScriptRunner
from tests.door.conftest import completing, replica, until_serving
from tests.fake_worker import KEYS, FakeWorker, worker_info
from tests.fakes.dialects import BODIES, DIALECTS
from tests.fakes.engine import fake_engine
from tests.fakes.faults import Faults
from tests.fakes.said import Said

SOON = 0.05
ENDS = [
    ("/v1/chat/completions", b"}}\n\ndata: [DONE]\n\n"),
    ("/v1/completions", b"}}\n\ndata: [DONE]\n\n"),
    ("/v1/messages", b"}}\n\n"),
    ("/v1/responses", b"}\n\n"),
]
"""How the stream of each path ends in an error."""


@asynccontextmanager
async def routed(redis, url, faults, **settings):
    async with fake_engine() as engine:
        info = replace(worker_info("a", kv_total_blocks=10_000), address=engine.url, models=("m",))
        worker = FakeWorker(ScriptRunner(redis, 5.0), KEYS, info)
        await worker.register()
        await worker.activate()
        async with replica(url, comment_every_s=SOON, **settings) as door:
            await until_serving(door, 1)
            engine.faults = faults
            yield door, engine


async def ask(door, path, *, stream=True):
    return await door.post(path, json={"model": "m", "stream": stream, **BODIES[path]})


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_has_not_begun_gets_comments_and_then_its_answer(
    one_redis_server, redis, path
):
    async with routed(redis, one_redis_server.url, Faults(prefill_s=0.5)) as (door, _):
        answer = await ask(door, path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content.startswith(2 * COMMENT)
        rest = answer.content.replace(COMMENT, b"")
        assert rest == (await ask(door, path)).content.replace(COMMENT, b"") or b"tok" in rest
        assert (await ask(door, path, stream=False)).headers["content-type"] == "application/json"


@pytest.mark.parametrize(("path", "ends"), ENDS)
@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_that_comes_after_comments_is_an_event(
    one_redis_server, redis, path, ends, status
):
    async def refuse(_):
        await asyncio.sleep(6 * SOON)
        return web.json_response({"error": {"message": "no", "code": status}}, status=status)

    async with (
        completing(redis, "a", refuse, path=path),
        replica(one_redis_server.url, comment_every_s=SOON) as door,
    ):
        await until_serving(door, 1)
        answer = await ask(door, path)
        assert answer.status_code == 200
        assert answer.content.startswith(COMMENT)
        event = answer.content.replace(COMMENT, b"")
        assert b"error" in event
        assert event.endswith(ends)


@pytest.mark.parametrize(("path", "ends"), ENDS)
@pytest.mark.parametrize("size", [1, 2 * MAX_WHOLE_BYTES])
async def test_an_answer_that_is_no_stream_after_comments_is_an_error_of_one(
    one_redis_server, redis, path, ends, size
):
    async def whole(request):
        dialect = DIALECTS[path](await request.json(), Said(["x" * size]), [1])
        await asyncio.sleep(6 * SOON)
        return web.json_response(dialect.whole())

    async with (
        completing(redis, "a", whole, path=path),
        replica(one_redis_server.url, comment_every_s=SOON) as door,
    ):
        await until_serving(door, 1)
        answer = await ask(door, path)
        assert answer.content.startswith(COMMENT)
        event = answer.content.replace(COMMENT, b"")
        assert b"what is no stream" in event
        assert event.endswith(ends)
        assert len(event) < 1000


async def test_clients_of_both_makes_read_past_comments(one_redis_server, redis):
    import anthropic  # here, as they take half a second each
    import openai

    said = [{"role": "user", "content": "hello"}]
    async with routed(redis, one_redis_server.url, Faults(prefill_s=0.3)) as (door, _):
        url = str(door.base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            chat = await client.chat.completions.create(model="m", messages=said, stream=True)
            texts = [one.choices[0].delta.content or "" async for one in chat if one.choices]
            assert "tok" in "".join(texts)
            async with client.responses.stream(model="m", input="hello") as stream:
                assert [event.type async for event in stream][-1] == "response.completed"
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="any") as other,
            other.messages.stream(model="m", messages=said, max_tokens=3) as messages,
        ):
            assert "tok" in "".join([text async for text in messages.text_stream])


async def test_comments_can_be_off(one_redis_server, redis):
    async def late(_):
        await asyncio.sleep(6 * SOON)
        return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")

    async with (
        completing(redis, "a", late),
        replica(one_redis_server.url, comment_every_s=0.0) as door,
    ):
        await until_serving(door, 1)
        assert COMMENT not in (await ask(door, "/v1/completions")).content
