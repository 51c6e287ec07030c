"""Chats of our own engines, in the forms of three APIs."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.simulation.engine import SimEngine
from app.simulation.profiles import PROFILES
from tests.workers.server.test_paths import events_of, served_by
from workers.engines.sim.runner import EngineRunner
from workers.engines.sim.text import FOLDER, SimTokenizer
from workers.server.chat_paths import add_chat
from workers.server.paths import WorkerApp
from workers.server.writers import ServedEngine

USER = {"role": "user", "content": "hello"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@asynccontextmanager
async def serving(*args: Any, source: str = str(FOLDER)) -> AsyncIterator[httpx.AsyncClient]:
    """Of a simulated engine that needs no time to speak of. args: of ServedEngine."""
    engine = SimEngine(PROFILES["70b-4xh100"], block_size=16, now=lambda: 0.0)
    runner = EngineRunner(engine, speedup=1e5)
    served = ServedEngine(runner, ["m"], *args)
    app = WorkerApp(served)
    add_chat(app, served, source)
    async with served_by(runner, app) as client:
        yield client


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving(SimTokenizer(), True) as client:
        yield client


@pytest.fixture
async def plain() -> AsyncIterator[httpx.AsyncClient]:
    """Of an engine whose words are its own."""
    async with serving(SimTokenizer()) as client:
        yield client


async def asked(client: httpx.AsyncClient, path: str = CHATS, **fields: Any) -> Any:
    if path != RESPONSES and "prompt" not in fields:
        fields = {"messages": [USER]} | fields
    answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def typed_events(client: httpx.AsyncClient, path: str, **fields: Any) -> list[Any]:
    """Of an API whose events have names."""
    answer = await client.post(path, json=fields | {"stream": True})
    blocks = [block.split("\n") for block in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [event["type"] for event in events] == [n.removeprefix("event: ") for n, _ in blocks]
    return events


async def refused(client: httpx.AsyncClient, path: str = CHATS, **fields: Any) -> tuple[str, str]:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    return error["field"], error["message"]


async def test_texts_to_embed_are_counted_before_any_is_tokenized(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("workers.server.paths.encoded", never)
    field, message = await refused(client, "/v1/embeddings", input=["text"] * 500)
    assert (field, message.count("over 128")) == ("input", 1)


# Ends


async def test_a_chat_ends_by_itself_unless_its_limit_comes_first(
    client: httpx.AsyncClient,
) -> None:
    natural = (await asked(client, max_tokens=4096))["choices"][0]
    cut = (await asked(client, max_tokens=5))["choices"][0]
    on = (await asked(client, max_tokens=300, ignore_eos=True))["choices"][0]
    late = (await asked(client, max_completion_tokens=300, min_tokens=200))["choices"][0]

    assert [len(choice["token_ids"]) for choice in (natural, cut, on, late)] == [128, 5, 300, 200]
    reasons = [choice["finish_reason"] for choice in (natural, cut, on, late)]
    assert reasons == ["stop", "length", "length", "stop"]


async def test_a_stop_string_ends_a_text_before_itself(client: httpx.AsyncClient) -> None:
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
    message = await asked(client, MESSAGES, max_tokens=20, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("stream", [False, True])
async def test_there_are_as_many_choices_of_each_prompt_as_are_asked_for(
    client: httpx.AsyncClient, stream: bool
) -> None:
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


# Tools and objects


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("none", None),
        ("auto", "weather"),
        (None, "weather"),
        ("required", "weather"),
        ({"type": "function", "function": {"name": "clock"}}, "clock"),
    ],
)
async def test_tools_are_called_as_the_choice_says(
    client: httpx.AsyncClient, choice: object, called: str | None
) -> None:
    answer = await asked(client, tools=[WEATHER, CLOCK], tool_choice=choice)
    (said,) = answer["choices"]
    calls = said["message"].get("tool_calls", [])

    assert [call["function"]["name"] for call in calls] == ([called] if called else [])
    assert said["finish_reason"] == ("tool_calls" if called else "stop")
    if called == "weather":
        assert json.loads(calls[0]["function"]["arguments"]) == {"place": "the quick"}


async def test_an_empty_list_of_tools_is_none(client: httpx.AsyncClient) -> None:
    for path in (CHATS, MESSAGES, "/tokenize"):
        without = await asked(client, path, max_tokens=3)
        with_none = await asked(client, path, max_tokens=3, tools=[])
        assert timeless(with_none) == timeless(without)


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what no two answers have in common."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", "usage")}


async def test_after_a_tools_result_comes_an_answer(client: httpx.AsyncClient) -> None:
    called = (await asked(client, tools=[WEATHER]))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "sunny"}
    turns = [USER, called, result]

    said = (await asked(client, messages=turns, tools=[WEATHER]))["choices"][0]["message"]
    assert said["content"].split()
    other = await asked(client, messages=turns, tools=[WEATHER, CLOCK], tool_choice="required")
    assert other["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"


async def test_a_streamed_call_is_named_once_and_its_arguments_come_in_pieces(
    client: httpx.AsyncClient,
) -> None:
    fields = {"messages": [USER], "tools": [WEATHER], "stream": True}
    events = events_of((await client.post(CHATS, json=fields)).text)
    calls = [event["choices"][0]["delta"]["tool_calls"][0] for event in events]

    assert [call["function"].get("name") for call in calls] == ["weather"] + [None] * (
        len(calls) - 1
    )
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"place": "the quick"}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_answer_has_the_format_asked_for(client: httpx.AsyncClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    answer = await asked(client, response_format=schema)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"place": "the quick"}
    answer = await asked(client, response_format={"type": "json_object"})
    assert json.loads(answer["choices"][0]["message"]["content"])
    message = await asked(
        client,
        MESSAGES,
        max_tokens=99,
        output_config={"format": {"type": "json_schema", "schema": PLACE}},
    )
    assert json.loads(message["content"][0]["text"]) == {"place": "the quick"}
    response = await asked(
        client,
        RESPONSES,
        input="hello",
        text={"format": {"type": "json_schema", "name": "p", "schema": PLACE}},
    )
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"place": "the quick"}


# Messages and responses


async def test_a_message_calls_tools(client: httpx.AsyncClient) -> None:
    tool = {"name": "weather", "input_schema": PLACE}
    fields = {"max_tokens": 99, "tools": [tool], "tool_choice": {"type": "any"}}
    whole = await asked(client, MESSAGES, **fields)
    events = await typed_events(client, MESSAGES, messages=[USER], **fields)

    assert whole["stop_reason"] == "tool_use"
    assert whole["content"][0]["input"] == {"place": "the quick"}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(d["partial_json"] for d in deltas)) == {"place": "the quick"}


async def test_a_response_is_the_same_whole_and_in_events(client: httpx.AsyncClient) -> None:
    for more in ({}, {"tools": [{"type": "function", "name": "weather", "parameters": PLACE}]}):
        fields: dict[str, Any] = {"input": [USER], "instructions": "Be terse.", **more}
        whole = await asked(client, RESPONSES, **fields)
        events = await typed_events(client, RESPONSES, **fields)
        last = events[-1]["response"]

        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.completed"
        (item,) = last["output"]
        assert item["type"] == ("function_call" if more else "message")
        assert _without_ids(last) == _without_ids(whole)
        deltas = "".join(event["delta"] for event in events if "delta" in event)
        assert deltas == (item["arguments"] if more else item["content"][0]["text"])


def _without_ids(response: dict[str, Any]) -> object:
    item = {n: v for n, v in response["output"][0].items() if n not in ("id", "call_id")}
    return response["status"], item, response["usage"]["output_tokens"]


async def test_a_response_cut_by_its_limit_is_incomplete(client: httpx.AsyncClient) -> None:
    events = await typed_events(client, RESPONSES, input="hello", max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_response_takes_back_what_earlier_ones_had(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": PLACE}]
    called = await asked(client, RESPONSES, input="hello", tools=tools)
    call = called["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    turns = [USER, call, result]
    said = (await asked(client, RESPONSES, input=turns, tools=tools))["output"][0]
    labelled = said | {"phase": "final_answer"}
    again = await asked(client, RESPONSES, input=[*turns, labelled, USER])

    assert said["type"] == again["output"][0]["type"] == "message"


async def test_salts_share_no_cache(client: httpx.AsyncClient) -> None:
    async def cached(**more: Any) -> int:
        usage = (await asked(client, max_tokens=1, **more))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached() > 0] == [0, True]
    assert [await cached(cache_salt="red"), await cached(cache_salt="red") > 0] == [0, True]
    assert await cached(cache_salt="blue") == 0


# Images, tokens, embeddings


async def test_images_are_opaque_and_differ(client: httpx.AsyncClient) -> None:
    def chat(data: str) -> list[Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return [{"role": "user", "content": [{"type": "text", "text": "See:"}, image]}]

    texts = [
        (await asked(client, messages=chat(data)))["choices"][0]["message"]["content"]
        for data in ("AAAA", "AAAA", "BBBB")
    ]
    assert texts[0] == texts[1] != texts[2]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    assert (await asked(client, MESSAGES, messages=blocks, max_tokens=9))["content"]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]
    assert (await asked(client, RESPONSES, input=items))["output"]


async def test_tokens_are_counted_as_they_will_be(client: httpx.AsyncClient) -> None:
    fields = {
        "messages": [USER],
        "system": "Be terse.",
        "tools": [{"name": "t", "input_schema": {}}],
    }
    counted = (await client.post("/v1/messages/count_tokens", json=fields)).json()
    usage = (await asked(client, MESSAGES, **fields, max_tokens=1))["usage"]

    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["context_management"]["original_input_tokens"] == counted["input_tokens"]


async def test_equal_texts_have_equal_embeddings(client: httpx.AsyncClient) -> None:
    fields = {"input": ["one", "one", "other"]}
    answer = await asked(client, "/v1/embeddings", prompt=None, **fields)
    vectors = [each["embedding"] for each in answer["data"]]
    packed = await asked(client, "/v1/embeddings", prompt=None, encoding_format="base64", **fields)

    assert vectors[0] == vectors[1] != vectors[2]
    assert sum(x * x for x in vectors[0]) == pytest.approx(1.0)
    unpacked = struct.unpack("<256f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(unpacked) == pytest.approx(vectors[0])
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11}


# What is refused

NULLS = dict.fromkeys(
    (
        *("temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens", "seed"),
        *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "stream", "stream_options", "user", "metadata"),
        *("functions", "function_call", "modalities", "audio", "reasoning_effort", "store"),
    )
)


async def test_null_is_as_if_nothing_was_said(client: httpx.AsyncClient) -> None:
    assert (await asked(client, **NULLS))["choices"] == (await asked(client))["choices"]
    neutral = {"n": 1, "presence_penalty": 0, "logprobs": False, "logit_bias": {}, "best_of": 1}
    assert (await asked(client, **neutral))["choices"] == (await asked(client))["choices"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}],
                "messages": [USER, {"role": "system", "content": "Be kind."}, USER],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "tools": [{"name": "t", "input_schema": {}, "defer_loading": True}],
                "context_management": {"edits": []},
                "metadata": {"user_id": "u"},
                "output_config": {"effort": "high"},
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": [], "content": None},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "a", "output": "x"},
                ],
                "tools": [
                    {"type": "web_search"},
                    {"type": "custom", "name": "patch", "description": "Change files"},
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [{"type": "function", "name": "f"}],
                    },
                ],
                "reasoning": {"effort": "medium", "summary": "auto"},
                "client_metadata": {"a": "b"},
                "include": ["reasoning.encrypted_content"],
            },
        ),
    ],
)
async def test_what_coding_agents_ask_is_answered(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
    answer = await client.post(path, json={"model": "m", limit: 9, **fields})
    assert answer.status_code == 200, answer.text


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
        (
            RESPONSES,
            {"input": "x", "max_output_tokens": 10**9, "ignore_eos": True},
            "max_output_tokens",
        ),
        (CHATS, {"stop": [""]}, "stop"),
        (CHATS, {"cache_salt": 7}, "cache_salt"),
        (CHATS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice"),
        (CHATS, {"tools": [{"type": "function"}]}, "tools"),
        (CHATS, {"response_format": {"type": "xml"}}, "response_format"),
        (CHATS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages"),
        (MESSAGES, {}, "max_tokens"),
        (MESSAGES, {"max_tokens": 9, "thinking": {"type": "forced"}}, "messages"),
        (MESSAGES, {"max_tokens": 9, "stop_sequences": "x" * 1001}, "stop_sequences"),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": "x", "tools": [{"type": "custom", "format": 7}]}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "logprobs": 2}, "logprobs"),
        ("/v1/completions", {"prompt": ["x"] * 129}, "prompt"),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_what_is_not_done_is_refused_by_its_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], field: str
) -> None:
    more = {"messages": [USER]} if path in (CHATS, MESSAGES) else {}
    assert (await refused(client, path, **(more | fields)))[0] == field


def deep(depth: int) -> Any:
    """Nested so often."""
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def taking(parameters: object) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", "parameters": parameters}}]}


HOSTILE = [
    (CHATS, {"messages": [{"role": [], "type": []}]}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": {}}]}]}),
    (CHATS, {"messages": [USER], **taking([1])}),
    (CHATS, {"messages": [USER], **taking(deep(400))}),
    (
        CHATS,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"schema": deep(400)}},
        },
    ),
    (CHATS, {"messages": [USER], **taking({"required": [[]]})}),
    (CHATS, {"messages": [USER], **taking({"const": deep(400)})}),
    (CHATS, {"messages": [USER], "tool_choice": []}),
    (CHATS, {"messages": [USER], "response_format": "json_schema"}),
    (CHATS, {"kv_transfer_params": {"prompt_token_ids": []}, "messages": [USER]}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image", "x": deep(400)}]}]}),
    (RESPONSES, {"input": [{"type": []}]}),
    (RESPONSES, {"input": [USER], "tools": [7]}),
    (RESPONSES, {"input": "x", "metadata": deep(400)}),
    (RESPONSES, {"input": "x", "text": 7}),
    (RESPONSES, {"input": [{"role": "assistant", "content": [[]]}]}),
    (MESSAGES, {"max_tokens": 5, "messages": [USER], "tools": {}}),
    (MESSAGES, {"max_tokens": 5, "messages": [USER], "tool_choice": {"type": []}}),
]


@pytest.mark.parametrize(("path", "fields"), HOSTILE)
async def test_no_input_is_an_error_of_ours(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    assert (await client.post(path, json=fields)).status_code in (200, 422)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [WEATHER]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
async def test_an_engine_with_words_of_its_own_refuses_to_be_told_their_form(
    plain: httpx.AsyncClient, fields: dict[str, Any], field: str
) -> None:
    assert (await refused(plain, messages=[USER], **fields))[0] == field
    assert (await asked(plain, tools=[WEATHER], tool_choice="none", max_tokens=3))["choices"]
    assert (await plain.post("/v1/embeddings", json={"input": "x"})).status_code == 404


async def test_a_part_whose_type_is_no_text_is_refused(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": ["image"]}]}]
    body = {"messages": messages, "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        assert (await client.post(path, json=body)).status_code == 422


async def test_a_worker_without_a_tokenizer_says_so() -> None:
    async with serving(source="") as client:
        for path, fields in (
            ("/tokenize", {"prompt": "hello"}),
            ("/tokenize", {"messages": [USER]}),
            ("/detokenize", {"tokens": [1, 2]}),
            (CHATS, {"messages": [USER]}),
        ):
            assert "this worker has no tokenizer" in (await refused(client, path, **fields))[1]
