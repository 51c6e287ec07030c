"""Chats of our own engines."""

from contextlib import asynccontextmanager

import pytest

from app.simulation.engine import SimEngine
from app.simulation.profiles import PROFILES
from tests.workers.server.test_paths import events_of, served_by
from workers.engines.sim.runner import EngineRunner
from workers.engines.sim.text import FOLDER, SimTokenizer
from workers.server.answer import ServedEngine
from workers.server.chat_paths import add_chat
from workers.server.paths import WorkerApp

USER = {"role": "user", "content": "hello"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
CHATS = "/v1/chat/completions"


@asynccontextmanager
async def serving(*args, source=str(FOLDER)):
    """Of a simulated engine that needs no time to speak of. args: of ServedEngine."""
    engine = SimEngine(PROFILES["70b-4xh100"], block_size=16, now=lambda: 0.0)
    runner = EngineRunner(engine, speedup=1e5)
    served = ServedEngine(runner, ["m"], *args)
    app = WorkerApp(served)
    add_chat(app, served, source)
    async with served_by(runner, app) as client:
        yield client


@pytest.fixture
async def client():
    async with serving(SimTokenizer(), True) as client:
        yield client


async def asked(client, path=CHATS, **fields):
    answer = await client.post(path, json={"messages": [USER]} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client, path=CHATS, **fields):
    answer = await client.post(path, json=fields)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    return error["field"], error["message"]


async def test_a_chat_ends_by_itself_unless_its_limit_comes_first(client):
    natural = (await asked(client, max_tokens=4096))["choices"][0]
    cut = (await asked(client, max_tokens=5))["choices"][0]
    on = (await asked(client, max_tokens=300, ignore_eos=True))["choices"][0]
    late = (await asked(client, max_completion_tokens=300, min_tokens=200))["choices"][0]

    assert [len(choice["token_ids"]) for choice in (natural, cut, on, late)] == [128, 5, 300, 200]
    reasons = [choice["finish_reason"] for choice in (natural, cut, on, late)]
    assert reasons == ["stop", "length", "length", "stop"]


async def test_a_stop_string_ends_a_text_before_itself(client):
    whole = (await asked(client, max_tokens=20))["choices"][0]["message"]["content"]
    stop = whole.split()[7]
    before = whole[: whole.index(stop)]
    stopped = await asked(client, max_tokens=20, stop=[stop, "never"])
    events = events_of(
        (
            await client.post(
                CHATS, json={"messages": [USER], "max_tokens": 20, "stop": stop, "stream": True}
            )
        ).text
    )

    assert stopped["choices"][0]["message"]["content"] == before
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 20
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == before
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_there_are_as_many_choices_of_each_prompt_as_are_asked_for(client, stream):
    fields = {"prompt": ["one", "other"], "n": 2, "max_tokens": 3, "stream": stream}
    answer = await client.post("/v1/completions", json=fields)
    texts = ["", "", "", ""]
    pieces = events_of(answer.text) if stream else [answer.json()]
    for choice in [choice for piece in pieces for choice in piece["choices"]]:
        texts[choice["index"]] += choice["text"]

    assert texts[0] == texts[1] != texts[2] == texts[3]
    usage = pieces[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 5, 12)
    chat = await asked(client, n=3, max_tokens=2)
    assert [choice["index"] for choice in chat["choices"]] == [0, 1, 2]


async def test_salts_share_no_cache(client):
    async def cached(**more):
        usage = (await asked(client, max_tokens=1, **more))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached() > 0] == [0, True]
    assert [await cached(cache_salt="red"), await cached(cache_salt="red") > 0] == [0, True]
    assert await cached(cache_salt="blue") == 0


NULLS = dict.fromkeys(
    (
        *("temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens", "seed"),
        *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "stream", "stream_options", "user", "metadata"),
        *("functions", "function_call", "modalities", "audio", "reasoning_effort", "store"),
    )
)


async def test_null_is_as_if_nothing_was_said(client):
    assert (await asked(client, **NULLS))["choices"] == (await asked(client))["choices"]
    neutral = {"n": 1, "presence_penalty": 0, "logprobs": False, "logit_bias": {}, "best_of": 1}
    assert (await asked(client, **neutral))["choices"] == (await asked(client))["choices"]
    said = {"response_format": {"type": "text"}, "tools": [], "parallel_tool_calls": True}
    assert (await asked(client, **said))["choices"] == (await asked(client))["choices"]
    counted = [await asked(client, "/tokenize", **more) for more in ({}, {"tools": []})]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHATS, {"logprobs": True}, "logprobs"),
        (CHATS, {"logit_bias": {"1": 2}}, "logit_bias"),
        (CHATS, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHATS, {"reasoning_effort": "utmost"}, "messages"),
        (CHATS, {"modalities": ["audio"]}, "modalities"),
        (CHATS, {"anything": 1}, "anything"),
        (CHATS, {"n": 1000}, "n"),
        (CHATS, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHATS, {"max_tokens": 10**9, "ignore_eos": True}, "max_tokens"),
        (CHATS, {"stop": [""]}, "stop"),
        (CHATS, {"cache_salt": 7}, "cache_salt"),
        (CHATS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"tools": [WEATHER]}, "tools"),
        (CHATS, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "logprobs": 2}, "logprobs"),
        ("/v1/completions", {"prompt": ["x"] * 129}, "prompt"),
    ],
)
async def test_what_is_not_done_is_refused_by_its_name(client, path, fields, field):
    more = {"messages": [USER]} if path == CHATS else {}
    assert (await refused(client, path, **(more | fields)))[0] == field


def deep(depth):
    """Nested so often."""
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


HOSTILE = [
    (CHATS, {"messages": [{"role": [], "type": []}]}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": {}}]}]}),
    (CHATS, {"messages": [USER], "tools": deep(400)}),
    ("/tokenize", {"messages": [USER], "tools": [{"function": {"parameters": deep(400)}}]}),
    (CHATS, {"messages": [USER], "tool_choice": []}),
    (CHATS, {"messages": [USER], "response_format": "json_schema"}),
    (CHATS, {"kv_transfer_params": {"prompt_token_ids": []}, "messages": [USER]}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image", "x": deep(400)}]}]}),
]


@pytest.mark.parametrize(("path", "fields"), HOSTILE)
async def test_no_input_is_an_error_of_ours(client, path, fields):
    assert (await client.post(path, json=fields)).status_code in (200, 422)


async def test_a_worker_without_a_tokenizer_says_so():
    async with serving(source="") as client:
        for path, fields in (
            ("/tokenize", {"prompt": "hello"}),
            ("/tokenize", {"messages": [USER]}),
            ("/detokenize", {"tokens": [1, 2]}),
            (CHATS, {"messages": [USER]}),
        ):
            assert "this worker has no tokenizer" in (await refused(client, path, **fields))[1]
