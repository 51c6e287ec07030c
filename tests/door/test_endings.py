"""An answer ends by what its engine says of each choice, and some of that is a failure."""

import asyncio
from functools import partial

import httpx
import orjson
import pytest
from aiohttp import web

from app.door import blame
from app.door.answer.stream import Opening, Stream
from tests.door.conftest import completing, replica, until_serving
from tests.door.test_answers import counted
from tests.eventually import eventually

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = (CHAT, TEXTS, MESSAGES, RESPONSES)
DONE = b"data: [DONE]\n\n"
WELL = {CHAT: "stop", TEXTS: "length", MESSAGES: "end_turn", RESPONSES: "completed"}
ENDINGS = [
    *((CHAT, reason) for reason in ("length", "tool_calls", "what_next")),
    *((MESSAGES, "tool_use"), (RESPONSES, "completed"), (RESPONSES, "incomplete")),
]
FAILURES = [
    *((path, "abort") for path in PATHS),
    *((CHAT, reason) for reason in ("error", "cancelled", "", None)),
    *((TEXTS, ""), (MESSAGES, None)),
]
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXTS: {"prompt": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    RESPONSES: {"input": "hi"},
}


def data(kind="", **fields):
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + orjson.dumps({"type": kind, **fields} if kind else fields) + b"\n\n"


def token(path, text, index=0):
    if path == MESSAGES:
        delta = {"type": "text_delta", "text": text}
        return data("content_block_delta", index=index, delta=delta)
    if path == RESPONSES:
        return data("response.output_text.delta", item_id="i", delta=text)
    said = {"text": text} if path == TEXTS else {"delta": {"content": text}}
    return data(choices=[{"index": index, "finish_reason": None, **said}])


def last(path, reason, index=0):
    """What ends a choice."""
    if path == MESSAGES:
        delta = data("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 1})
        return delta + data("message_stop")
    if path == RESPONSES:
        kind = "incomplete" if reason == "incomplete" else "completed"
        return data(f"response.{kind}", response={"object": "response", "status": reason})
    said = {"text": ""} if path == TEXTS else {"delta": {}}
    return data(choices=[{"index": index, "finish_reason": reason, **said}])


def end(path, reason):
    return last(path, reason) + (DONE if path in (CHAT, TEXTS) else b"")


def speaking(*pieces, holds=False):
    """holds: the answer does not end by itself."""

    async def complete(request):
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
            await asyncio.sleep(0.02)
        if holds:
            await asyncio.sleep(30)
        return answer

    return complete


async def ask(door, path, **more):
    return await door.post(path, json={"model": "m", "stream": True, **BODIES[path], **more})


async def outcomes(door, outcome):
    return await counted(door, f'requests_total{{code="200",model="m",outcome="{outcome}"}}')


@pytest.mark.parametrize(("path", "reason"), FAILURES)
async def test_before_anything_is_said_another_worker_answers(
    path, reason, redis, one_redis_server
):
    bad = speaking(end(path, reason))
    well = speaking(token(path, "well"), end(path, WELL[path]))
    async with (
        completing(redis, "a", bad, path=path),
        completing(redis, "b", well, path=path),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 2)
        answers = [await ask(door, path) for _ in range(4)]
        assert all(answer.status_code == 200 and "well" in answer.text for answer in answers)
        assert not any("error" in answer.text for answer in answers)
        assert await counted(door, 'retries_total{model="m"}') > 0


@pytest.mark.parametrize(("path", "reason"), FAILURES)
async def test_afterwards_the_client_is_told_and_the_worker_counted(
    path, reason, redis, one_redis_server
):
    bad = speaking(token(path, "half"), end(path, reason))
    async with (
        completing(redis, "a", bad, path=path),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        text = (await ask(door, path)).text
        assert "half" in text
        assert "error" in text.rpartition("half")[2]
        # What would look like an end in order is not passed on.
        assert '"abort"' not in text
        assert "message_stop" not in text
        assert await outcomes(door, "cut") == 1
        lines = (await door.get("/metrics")).text.splitlines()
        cause = f'cause="{"aborted" if reason else "cut"}"'
        counts = [line for line in lines if "door_worker_requests_total{" in line]
        assert any(cause in line and 'worker="a:0"' in line for line in counts)


@pytest.mark.parametrize(("path", "reason"), ENDINGS)
async def test_an_ending_is_passed_on(path, reason, redis, one_redis_server):
    said = token(path, "all"), end(path, reason)
    async with (
        completing(redis, "a", speaking(*said), path=path),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        assert (await ask(door, path)).content == b"".join(said)
        assert await outcomes(door, "ok") == 1


@pytest.mark.parametrize("path", PATHS)
async def test_who_hangs_up_behind_the_end_has_it_all(path, redis, one_redis_server):
    begin = token(path, "a")
    for ending, outcome in (
        (last(path, WELL[path]), "ok"),
        (token(path, WELL[path]), "left_after_token"),
    ):
        async with (
            completing(redis, "a", speaking(begin, ending, holds=True), path=path),
            replica(one_redis_server.url) as door,
        ):
            await until_serving(door, 1)
            body = {"model": "m", "stream": True, **BODIES[path]}
            async with door.stream("POST", path, json=body) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if WELL[path] in text:
                        break
            await eventually(partial(outcomes, door, outcome), lambda number: number == 1)


@pytest.mark.parametrize(
    ("rest", "outcome"),
    [
        ((last(CHAT, "stop", 0), token(CHAT, "c", 1)), "cut"),
        ((last(CHAT, "stop", 0), token(CHAT, "c", 1), DONE), "cut"),
        ((last(CHAT, "stop", 0), last(CHAT, "abort", 1), DONE), "cut"),
        ((last(CHAT, "stop", 1), last(CHAT, "length", 0)), "ok"),
        ((last(CHAT, "stop", 1), last(CHAT, "length", 0), DONE), "ok"),
    ],
)
async def test_each_choice_has_its_own_end(rest, outcome, redis, one_redis_server):
    said = speaking(token(CHAT, "a"), token(CHAT, "b", 1), *rest)
    async with (
        completing(redis, "a", said, path=CHAT),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        text = (await ask(door, CHAT, n=2)).text
        assert ('"error"' in text) == (outcome == "cut")
        assert await outcomes(door, outcome) == 1


def call(index, text):
    tool = {"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}
    return data(choices=[{"index": index, "delta": {"tool_calls": [tool]}, "finish_reason": None}])


def incomplete(reason):
    said = {"object": "response", "status": "incomplete", "incomplete_details": {"reason": reason}}
    return data("response.incomplete", response=said)


CALLS = (call(0, "{"), call(1, '{"finish_reason":"stop"'), last(CHAT, "tool_calls", 1))
ARGUMENTS = data("response.function_call_arguments.delta", delta='{"status":"failed"')
OTHERS = {
    "two calls": (CHAT, (*CALLS, call(0, "}"), last(CHAT, "tool_calls"), DONE), "ok"),
    "two calls, one cut": (CHAT, (*CALLS, call(0, '"finish_reason":"stop"'), DONE), "cut"),
    "two calls, one aborted": (CHAT, (*CALLS, last(CHAT, "abort"), DONE), "cut"),
    "call cut": (RESPONSES, (ARGUMENTS, data("response.output_text.done", text="x")), "cut"),
    "call": (RESPONSES, (ARGUMENTS, last(RESPONSES, "completed")), "ok"),
    "filtered": (RESPONSES, (ARGUMENTS, incomplete("content_filter")), "ok"),
    "aborted": (RESPONSES, (ARGUMENTS, incomplete("abort")), "cut"),
    "stop without a reason": (MESSAGES, (token(MESSAGES, "a"), data("message_stop")), "cut"),
    "refusal": (MESSAGES, (token(MESSAGES, "a"), last(MESSAGES, "refusal")), "ok"),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_calls_and_odd_reasons_have_ends_too(name, redis, one_redis_server):
    path, said, outcome = OTHERS[name]
    async with (
        completing(redis, "a", speaking(*said), path=path),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 1)
        text = (await ask(door, path, **({"n": 2} if path == CHAT else {}))).text
        assert ('"error"' in text) == (outcome == "cut")
        assert await outcomes(door, outcome) == 1


async def test_a_whole_answer_that_was_aborted_is_another_workers(redis, one_redis_server):
    async def complete(request):
        reason = "abort" if request.url.port == bad_port else "stop"
        choices = [{"index": n, "text": "x", "finish_reason": "stop"} for n in range(2)]
        choices[1]["finish_reason"] = reason
        return web.json_response({"choices": choices})

    async with (
        completing(redis, "a", complete) as bad,
        completing(redis, "b", complete),
        replica(one_redis_server.url) as door,
    ):
        bad_port = httpx.URL(bad.info.address).port
        await until_serving(door, 2)
        for _ in range(4):
            answer = await door.post(TEXTS, json={"model": "m", "prompt": "hi", "n": 2})
            assert answer.status_code == 200
            assert "abort" not in answer.text


def failure_in(**fields):
    body = orjson.dumps(fields)
    headers = [(b"content-type", b"application/json")]
    return blame.failure_of(200, headers, body, model="m", path="/x", is_all=True)


def test_the_reasons_of_whole_answers():
    aborted = [
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": "error"}]},
        {"choices": [{"finish_reason": {"type": "abort"}}]},
        {"choices": [{"finish_reason": "abort", "text": "x" * 100_000}]},
        {"type": "message", "content": [], "stop_reason": "abort"},
        {"object": "response", "status": "cancelled", "output": []},
        {"object": "response", "status": "incomplete", "incomplete_details": {"reason": "abort"}},
    ]
    for fields in aborted:
        failure = failure_in(**fields)
        assert failure is not None
        assert failure.cause == "aborted"
    well = [
        {"choices": [{"finish_reason": "stop", "text": '"finish_reason":"abort"'}]},
        {"choices": [{"finish_reason": "stop", "message": {"status": "error"}}]},
        {"object": "response", "status": "completed", "output": [{"status": "cancelled"}]},
        {"type": "message", "content": [{"input": {"stop_reason": "abort"}}], "stop_reason": "x"},
    ]
    assert [failure_in(**fields) for fields in well] == [None] * 4


@pytest.mark.parametrize("path", PATHS)
def test_what_only_looks_like_a_reason_ends_nothing(path):
    looks = '{"finish_reason": "stop", "stop_reason": "end_turn", "type":"message_stop"}'
    for text in (looks, "data: [DONE]\n\ndata: [DONE]", '"type":"response.completed"'):
        stream = Stream(drops_usage=False, says_end=True)
        assert stream.passed(token(path, text)) == token(path, text)
        stream.passed(b": " + text.replace("\n", " ").encode() + b"\n\n")
        tool = {"type": "tool_use", "input": {"stop_reason": "end_turn", "finish_reason": "abort"}}
        stream.passed(data("content_block_start", content_block=tool))
        assert not stream.broken
        assert not stream.has_ended


def test_a_reason_ends_a_stream_wherever_that_is_cut():
    text = token(CHAT, "a") + last(CHAT, "stop") + DONE
    for at in range(len(text)):
        stream = Stream(drops_usage=False, says_end=True)
        assert stream.passed(text[:at]) + stream.passed(text[at:]) == text
        assert stream.has_ended
    for cut in (last(CHAT, "stop").rstrip(), token(CHAT, "a") + last(CHAT, "stop").rstrip()):
        stream = Stream(drops_usage=False, says_end=True)
        assert not stream.passed(cut).endswith(cut[-9:])
        assert stream.has_ended
        assert stream.passed(b"") + stream.rest() in cut


def test_a_number_that_is_none_hides_no_reason():
    event = last(CHAT, "stop").replace(b'"delta":{}', b'"logprobs":[NaN,-Infinity],"delta":{}')
    stream = Stream(drops_usage=False, says_end=True)
    stream.passed(event)
    assert stream.is_finished
    opening = Opening()
    opening.take(event.replace(b'"stop"', b'"abort"'))
    assert opening.is_aborted
