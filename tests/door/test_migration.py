"""Streams whose worker fails, and that another one goes on with."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from app.door import answer_request
from app.door.answer import migration
from app.door.answer import stream as stream_module
from app.door.answer.events import usage_in
from app.door.answer.migration import Migrating, can_migrate
from app.door.answer.stream import Stream
from app.door.answer_request import Api
from app.door.forwarding import Outgoing
from app.door.prompts.prompts import PromptIds
from app.door.record import Usage
from app.http.json_body import JsonBody
from tests.door.conftest import MODEL, completing, replica, until_serving, worker, worker_here
from tests.door.test_answers import chat, counted, events
from tests.door.test_failures import nothing_reserved, running_on
from tests.eventually import eventually
from tests.fake_worker import worker_info

IDS = PromptIds(np.arange(5, dtype=np.uint32), 5, "client")
FRAME = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(delta, ids, finish=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    return b"data: " + orjson.dumps(FRAME | {"choices": [choice]}) + b"\n\n"


def last(prompt, output, cached):
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + orjson.dumps(FRAME | {"choices": [], "usage": usage}) + b"\n\n"


ROLE = FRAME | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
BEGIN = b"data: " + orjson.dumps(ROLE | {"prompt_token_ids": [0, 1, 2, 3, 4]}) + b"\n\n"
DONE = b"data: [DONE]\n\n"
STOP = event({}, [4], "stop")


def migrating(*, drops_usage=False):
    return Migrating(prompt_tokens=5, drops_usage=drops_usage)


def said(passed):
    """The text of a chat."""
    return "".join(
        choice["delta"].get("content") or ""
        for one in events(passed.decode())
        for choice in one["choices"]
    )


def test_wherever_the_first_part_ends_the_rest_follows_as_if_one_worker_had_said_it():
    words = ["one", " two", ' "token_ids":[7]', " four"]
    first = BEGIN + b"".join(event({"content": word}, [n]) for n, word in enumerate(words))
    for end in range(len(first)):
        stream = migrating()
        passed = stream.passed(first[:end])
        told = len(stream.output)
        assert stream.can_go_on
        assert stream.output == list(range(told))
        stream.goes_on()
        assert not stream.has_first_token
        rest = [event({"content": word}, [n]) for n, word in enumerate(words) if n >= told]
        # Another engine has its own ids and times.
        rest = [one.replace(b'"created":1', b'"created":9') for one in (BEGIN, *rest)]
        rest += [event({}, [99], "stop"), last(5 + told, 5 - told, 4 + told), DONE]
        passed += b"".join(stream.passed(one) for one in rest) + stream.rest()
        assert said(passed) == "".join(words)
        assert usage_in(stream.tail) == Usage(5, 5, min(5, 4 + told))
        assert b'token_ids":[7]' not in passed.replace(rb"\"token_ids\":[7]", b"")
        assert passed.count(b"assistant") == 1
        assert (b'"created":9' in passed) == (b"\n\n" not in first[:end])
        assert stream.is_finished


USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
KINDS = (
    *(event({"content": "a"}, [1]), event({"content": "b"}, [2, 3]), event({"content": ""}, [4])),
    *(event({"content": "error: failed"}, [5]), event({"content": "c"}, None)),
    *(event({"reasoning_content": "d"}, [6]), event({"tool_calls": []}, [7]), event({}, [], "")),
    event({"content": ' "token_ids":[8] "finish_reason":"stop"'}, [9]),
    event({"content": "e"}, [2**32]).replace(b'"token_ids"', b'"token_ids" '),
    event({"content": "f"}, [10])[:-3] + b',"usage":%b}\n\n' % orjson.dumps(USAGE),
    event({"content": "g"}, [11])[:-3] + b',"usage":null,"prompt_token_ids":[1,2]}\n\n',
    event({"content": "h"}, [12]).replace(b'"content"', b'"text"').replace(b"\n\n", b"\n\r\n"),
    *(event({}, [13], "stop"), event({}, [14], "abort"), last(5, 1, 0), DONE, b": ping\n\n"),
    *(b'data: {"error":{"message":"x"}}\n\n', b'data: {"choices":[]}\n\n', b"data: {\n\n"),
)


def seen_by(parser, pieces):
    passed = []
    for piece in pieces:
        passed.append(parser.passed(piece))
        if parser.broken:
            break
    else:
        passed.append(parser.rest())
    names = ("has_first_token", "is_finished", "broken", "error", "tail", "num_said", "has_ended")
    output = (parser.output, parser.can_go_on) if isinstance(parser, Migrating) else ()
    return b"".join(passed), *(getattr(parser, name) for name in names), *output


@given(
    st.lists(st.sampled_from(KINDS), max_size=12),
    st.lists(st.integers(0, 2000), max_size=8),
    st.booleans(),
)
def test_events_of_tokens_are_seen_as_if_all_were_looked_at_closely(kinds, cuts, drops_usage):
    text = BEGIN + b"".join(kinds)
    ends = sorted({min(cut, len(text)) for cut in (0, *cuts, len(text))})
    by_cuts = [text[begin:end] for begin, end in pairwise(ends)]
    for pieces in ([BEGIN, *kinds], by_cuts):
        for make in (migrating, partial(Stream, says_end=True)):
            with pytest.MonkeyPatch.context() as patch:
                seen = seen_by(make(drops_usage=drops_usage), pieces)
                for module in (stream_module, migration):
                    patch.setattr(module, "tokens_in", lambda _: None)
                assert seen == seen_by(make(drops_usage=drops_usage), pieces)


def test_half_a_character_is_said_anew():
    stream = migrating()
    halves = event({"content": ""}, [4]) + event({"content": ""}, [5])
    passed = stream.passed(BEGIN + event({"content": "x"}, [3]) + halves)
    assert stream.output == [3]
    stream.goes_on()
    rest = (
        BEGIN,
        event({"content": ""}, [4]),
        event({"content": "é"}, [5]),
        event({}, [6], "stop"),
    )
    passed += b"".join(stream.passed(one) for one in rest) + stream.ending()
    assert said(passed) == "xé"
    assert usage_in(stream.tail) == Usage(5, 4, None)


def test_an_event_too_long_to_be_held_is_passed_on_and_ends_what_could_go_on(monkeypatch):
    monkeypatch.setattr(migration, "_MAX_EVENT_BYTES", 100)
    stream = migrating()
    one = event({"content": "x" * 300}, [3])
    passed = stream.passed(one[:200])
    assert not stream.can_go_on
    assert (
        passed + stream.passed(one[200:] + STOP + DONE) + stream.rest()
        == one.replace(b"[3]", b"null") + STOP.replace(b"[4]", b"null") + DONE
    )


def test_ids_are_kept_from_the_client():
    shown = migrating().passed(BEGIN + event({"content": "x"}, [3]))
    assert b'"token_ids":null' in shown
    assert b'"prompt_token_ids":null' in shown


@pytest.mark.parametrize(
    "spoken",
    [
        event({"reasoning_content": "hm"}, [1]),
        event({"content": "its engine says no ids"}, None),
        event({"content": "all"}, [1], "stop"),
    ],
)
def test_what_no_other_worker_could_go_on_with(spoken):
    stream = migrating()
    stream.passed(BEGIN + event({"content": "x"}, [0]))
    assert stream.can_go_on
    stream.passed(spoken)
    assert not stream.can_go_on


def test_an_error_of_the_worker_is_kept_back_and_one_of_the_client_is_not():
    one = event({"content": "x"}, [0])
    for code, is_broken in ((500, True), (400, False)):
        error = b"data: " + orjson.dumps({"error": {"message": "no", "code": code}}) + b"\n\n"
        stream = migrating()
        passed = stream.passed(one + error + DONE)
        assert bool(stream.broken) == is_broken
        assert bool(stream.error) != is_broken
        assert (error in passed) != is_broken
        assert b'"content":"x"' in passed


@pytest.mark.parametrize("drops_usage", [False, True])
def test_a_worker_that_fails_after_the_last_token_leaves_a_whole_answer(drops_usage):
    stream = migrating(drops_usage=drops_usage)
    passed = stream.passed(event({"content": "x"}, [1, 2]) + event({}, [3], "stop"))
    passed += stream.ending()
    assert said(passed) == "x"
    assert usage_in(stream.tail) == Usage(5, 3, None)
    assert (b'"usage"' in passed) != drops_usage


@pytest.mark.parametrize(
    ("more", "can"),
    [
        ({}, True),
        ({"n": 1, "temperature": 0.5, "logprobs": False, "stop": None}, True),
        ({"tools": [1], "tool_choice": "none"}, True),
        ({"tools": [1]}, False),
        ({"stop": ["x"]}, False),
        ({"n": 2}, False),
        ({"seed": 4}, False),
        ({"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
        ({"return_token_ids": True}, False),
        ({"logprobs": True}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"stream": False}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"continuous_usage_stats": True}}, False),
        ({"max_tokens": "10"}, False),
        ({"unheard_of": 1}, False),
    ],
)
def test_only_what_tokens_alone_tell_can_go_on_elsewhere(more, can):
    fields = {"model": "m", "messages": [], "stream": True} | more
    wanted = answer_request.read(Api.CHAT, fields)
    ours = replace(worker_info("a"), engine="kvroute sim")
    assert can_migrate(wanted, fields, IDS, [ours]) == can
    for engine in ("sglang 0.5", "vllm 0.31.0"):
        assert not can_migrate(wanted, fields, IDS, [ours, replace(ours, engine=engine)])


def test_what_is_left_is_asked_for_by_all_the_tokens_so_far():
    raw = b'{"model":"m","messages":[],"stream":true,"max_completion_tokens":9,"min_tokens":4}'
    body = JsonBody.parse(raw)
    outgoing = Outgoing(
        body, answer_request.read(Api.CHAT, body.fields), IDS, "m", can_migrate=True
    )
    ours = replace(worker_info("a"), engine="kvroute sim")
    assert orjson.loads(outgoing.for_worker(ours))["return_token_ids"] is True
    assert outgoing.goes_on([7, 8])
    sent = orjson.loads(outgoing.for_worker(ours))
    assert sent["kv_transfer_params"] == {"prompt_token_ids": [0, 1, 2, 3, 4, 7, 8]}
    assert (sent["max_completion_tokens"], sent["min_tokens"]) == (7, 2)
    assert not outgoing.goes_on([7] * 9)


def prompt_of(number):
    return [number * 100 + n for n in range(40)]


async def test_streams_whose_worker_is_killed_end_as_if_nothing_had_happened(
    one_redis_server, redis
):
    url = one_redis_server.url
    # The one that is killed is so slow that none of its streams has ended by then.
    with worker(url, "a", speedup=0.1) as first:
        async with (
            worker_here(url, "b", speedup=20),
            replica(url, migrate=True, policy="round_robin") as door,
        ):
            await until_serving(door, 2)

            async def ask(number, seen):
                more = {"stream": True, "stream_options": {"include_usage": True}}
                path, body = "/v1/chat/completions", chat(f"{number}", max_tokens=90, **more)
                if number < 10:
                    path = "/v1/completions"
                    body = {"model": MODEL, "prompt": prompt_of(number), "max_tokens": 90} | more
                text = ""
                async with door.stream("POST", path, json=body) as answer:
                    async for piece in answer.aiter_text():
                        text += piece
                        seen.set()
                return events(text)

            seen = [asyncio.Event() for _ in range(20)]
            answers = asyncio.gather(*(ask(n, seen[n]) for n in range(20)))
            for one in seen:
                await one.wait()
            await eventually(lambda: running_on(first.url), lambda number: number > 0)
            first.popen.send_signal(signal.SIGKILL)
            for number, found in enumerate(await answers):
                usage = found[-1]["usage"]
                assert usage["completion_tokens"] == 90
                assert usage["prompt_tokens"] == (usage["total_tokens"] - 90)
                assert {one["id"] for one in found} == {found[0]["id"]}
                choices = [choice for one in found for choice in one["choices"]]
                assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
                said = [c["text"] if number < 10 else c["delta"]["content"] for c in choices]
                assert len([piece for piece in said if piece]) == 90
                assert all(choice["token_ids"] is None for choice in choices)
            assert await counted(door, f'migrations_total{{model="{MODEL}"}}') > 0
            assert (
                await counted(door, f'requests_total{{code="200",model="{MODEL}",outcome="ok"}}')
                == 20
            )
            await nothing_reserved(redis)


async def test_an_answer_goes_on_at_one_other_worker_and_no_third_one_is_given_it(
    one_redis_server, redis
):
    asked_for = []

    async def dies(request):
        body = await request.json()
        asked_for.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        number = len(asked_for)
        choice = {"index": 0, "text": f"{number} ", "token_ids": [number], "finish_reason": None}
        frame = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": "m"}
        await answer.write(b"data: " + orjson.dumps(frame | {"choices": [choice]}) + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with AsyncExitStack() as stack:
        for name in "abcde":
            await stack.enter_async_context(completing(redis, name, dies, "vllm 0.32.0"))
        door = await stack.enter_async_context(replica(one_redis_server.url, migrate=True))
        await until_serving(door, 5)
        body = {"model": "m", "prompt": prompt_of(1), "max_tokens": 50, "stream": True}
        text = (await door.post("/v1/completions", json=body)).text
        assert '"code":"repeated_failure"' in text.split("data: ")[-2]
        assert text.count("[DONE]") == 1
        assert [one["prompt"][40:] for one in asked_for] == [[], [1]]
        assert [one["max_tokens"] for one in asked_for] == [50, 49]
        assert [text.count(f'"text":"{n} "') for n in range(1, 3)] == [1, 1]
        assert text.count('"cmpl-1"') == 2
        await nothing_reserved(redis)
