"""What clients are told when they or engines say what cannot be."""

import asyncio

import pytest
from aiohttp import web

from tests.door.conftest import (
    MODEL,
    completing,
    replica,
    sick_worker,
    until_serving,
    worker_here,
)
from tests.door.test_answers import chat
from tests.eventually import eventually

USER = {"role": "user", "content": "hello"}


async def refused(door, path, fields):
    answer = await door.post(path, json={"model": MODEL} | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_errors_of_engines_have_the_form_of_the_path(door):
    error = await refused(door, "/v1/chat/completions", {"messages": [USER], "logprobs": True})
    assert error == {
        "message": "logprobs: is not supported by this engine, got True",
        "type": "invalid_request_error",
        "param": "logprobs",
        "code": None,
    }
    error = await refused(door, "/tokenize", {"prompt": 7})
    assert (error["param"], error["type"]) == ("prompt", "invalid_request_error")


async def test_an_error_of_a_message_has_the_form_of_messages(one_redis_server, redis):
    async with sick_worker(redis, "a"), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        assert (await refused(door, "/v1/messages", {"model": "m", "messages": [USER]})) == {
            "type": "invalid_request_error",
            "message": "max_tokens: Field required",
        }


async def test_errors_about_prompts_name_where_they_are(door):
    fields = {"prompt": [1] * 500_000}
    error = await refused(door, "/v1/completions", fields)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert (await refused(door, "/v1/completions", {"prompt": 7}))["param"] == "prompt"


async def test_an_engine_need_not_end_a_long_refusal_that_another_has_bettered(
    one_redis_server, redis
):
    has_ended = asyncio.Event()
    num_asked = 0

    async def first_refuses(request):
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return web.json_response({"choices": [], "usage": {"prompt_tokens": 3}})
        answer = web.StreamResponse(status=500)
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b" " * 65_536)
        finally:
            has_ended.set()

    async with (
        completing(redis, "a", first_refuses),
        completing(redis, "b", first_refuses),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 2)
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
        assert (await door.post("/v1/completions", json=body)).status_code == 200
        async with asyncio.timeout(60):
            await has_ended.wait()


async def test_a_path_that_the_engine_lacks_is_named_with_the_engine(door):
    for path in ("/v1/rerank", "/rerank", "/v1/score"):
        error = await refused(door, path, {"query": "x", "documents": ["y"]})
        assert error["code"] == "path_not_supported"
        assert f"has no {path}." in error["message"]
        assert "kvroute-sim" in error["message"]


async def test_without_a_model_the_only_one_is_meant(door, one_redis_server):
    body = chat("x")
    del body["model"]
    assert (await door.post("/v1/chat/completions", json=body)).json()["model"] == MODEL
    null = body | {"model": None}
    assert (await door.post("/v1/chat/completions", json=null)).status_code == 200
    async with worker_here(one_redis_server.url, "c", model_name="other"):
        await until_serving(door, 3)

        async def answer():
            return await door.post("/v1/chat/completions", json=body)

        answered = await eventually(answer, lambda answer: answer.status_code != 200)
    assert answered.status_code == 400
    error = answered.json()["error"]
    assert (error["param"], error["message"]) == (
        "model",
        f"model: is missing; there is other, {MODEL}",
    )


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/rerank"]
)
async def test_where_posts_are_meant_a_get_is_told_so(door, path):
    answer = await door.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")


async def test_a_response_is_nowhere_stored(door):
    answer = await door.get("/v1/responses/resp_1")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"])
async def test_documents_are_ranked_by_an_engine_that_can(one_redis_server, redis, path):
    bodies = []

    async def rank(request):
        bodies.append(await request.json())
        usage = {"prompt_tokens": 5, "total_tokens": 5}
        return web.json_response({"results": [{"index": 0, "relevance_score": 1}], "usage": usage})

    async with (
        completing(redis, "a", rank, "vllm 0.33", path=path),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        asked = {"model": "m", "query": "x", "documents": ["y", "z"]}
        answer = await door.post(path, json=asked)
        assert (answer.status_code, answer.json()["results"][0]["index"]) == (200, 0)
        assert bodies == [asked]
