"""What clients of the OpenAI API get at the front door, from real workers."""

import asyncio
from pathlib import Path

import orjson
from aiohttp import web

from app.tokens import load
from tests.door.conftest import MODEL, completing, models, replica, until_serving, worker_here
from tests.endings import all_endings
from tests.eventually import eventually
from tests.fake_worker import KEYS

LLAMA = Path(__file__).parents[1] / "data/door/llama"
SYSTEM = {"role": "system", "content": "You are terse. " * 40}


def chat(*turns, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": MODEL, "messages": [SYSTEM, *messages], "max_tokens": 8} | more


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def test_a_chat_goes_where_its_prefix_is_and_is_not_tokenized_again(one_redis_server):
    # As fast as is predicted before it is measured: else the work of the first requests seems more.
    url, speed = one_redis_server.url, {"speedup": 1.0}
    async with (
        worker_here(url, "a", **speed),
        worker_here(url, "b", **speed),
        replica(url) as door,
    ):
        await until_serving(door, 2)

        async def ask(*turns):
            answer = await door.post("/v1/chat/completions", json=chat(*turns))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return answer.headers["x-kvroute-worker"], cached, usage["prompt_tokens"]

        async def tokens_from(source):
            return await counted(door, f'tokens_from_total{{model="{MODEL}",source="{source}"}}')

        await ask("warm up")
        await eventually(lambda: ask("warm up"), lambda found: found[1] > 0)

        async def rendered():
            await ask("hello")
            return await tokens_from("router")

        await eventually(rendered, lambda number: number > 0)
        new = "which of the two has heard this before? " * 8
        first, _, _ = await ask(new)
        await asyncio.sleep(0.3)
        again, cached, prompt = await ask(new, "hi", "how are you?")
        assert again == first
        assert cached > 600
        assert cached < prompt
        assert (
            await counted(door, f'cached_apart_tokens_total{{model="{MODEL}",worker="{first}"}}')
            == 0
        )


async def counted(door, name):
    lines = (await door.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith(f"kvroute_door_{name}")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


async def test_a_stream_has_usage_only_if_it_was_asked_for(door):
    asked = chat("count", stream=True, max_tokens=5)
    plain = events((await door.post("/v1/chat/completions", json=asked)).text)
    assert [len(event["choices"]) for event in plain] == [1] * 5
    assert plain[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("usage" in event for event in plain)
    asked |= {"stream_options": {"include_usage": True}}
    full = events((await door.post("/v1/chat/completions", json=asked)).text)
    assert full[-1]["choices"] == []
    assert full[-1]["usage"]["completion_tokens"] == 5
    tokens = await counted(door, f'tokens_total{{kind="output",model="{MODEL}"}}')
    assert tokens == 10


async def test_no_overlap_is_counted_where_the_engine_passes_its_cache_by(door):
    async def overlap(**more):
        answer = await door.post("/v1/chat/completions", json=chat("hello", **more))
        return answer.headers["x-kvroute-overlap"].partition("/")[0]

    await eventually(overlap, lambda blocks: blocks != "0")
    assert await overlap(prompt_logprobs=1) == "0"


async def test_what_came_of_answers_is_recorded_for_the_planner(door, redis):
    for name, streams in (("whole", False), ("stream", True)):
        asked = chat("count", stream=streams, max_tokens=5)
        headers = {"x-request-id": name}
        await door.post("/v1/chat/completions", json=asked, headers=headers)

    async def recorded():
        return await all_endings(redis, KEYS)

    found = await eventually(recorded, lambda found: len(found) == 2)
    assert found["whole"].output_tokens == 5
    assert found["whole"].ttft_ms is None  # nobody saw its first token
    assert found["stream"].output_tokens == 5
    assert found["stream"].ttft_ms is not None


async def test_equal_prompts_have_equal_answers_however_they_come(door):
    whole = (await door.post("/v1/chat/completions", json=chat("tell"))).json()
    stream = await door.post("/v1/chat/completions", json=chat("tell", stream=True))
    pieces = [e["choices"][0]["delta"].get("content", "") for e in events(stream.text)]
    assert whole["choices"][0]["message"]["content"] == "".join(pieces)
    text = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 6}
    one = (await door.post("/v1/completions", json=text)).json()
    ids = (await door.post("/tokenize", json={"model": MODEL, "prompt": text["prompt"]})).json()
    other = (await door.post("/v1/completions", json=text | {"prompt": ids["tokens"]})).json()
    assert one["choices"][0]["text"] == other["choices"][0]["text"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] == ids["count"]


async def test_a_model_whose_workers_tokenize_in_another_way_is_left_to_its_engines(
    one_redis_server, redis
):
    source = str(LLAMA)
    hash_here = load(source).fingerprint

    async def complete(_):
        return web.json_response({"choices": []})

    apart = []

    async def remarks(tokenizer_hash):
        hashed = {"tokenizer": source, "tokenizer_hash": tokenizer_hash}
        async with (
            completing(redis, "a", complete, **hashed),
            replica(one_redis_server.url) as door,
        ):
            await until_serving(door, 1)

            async def loaded():
                await door.post("/v1/completions", json={"model": "m", "prompt": "x"})
                return (await door.get("/readiness")).json()["missing"]

            found = await eventually(loaded, lambda missing: "not loaded yet" not in str(missing))
            apart.append(await counted(door, 'tokenizer_apart{model="m"}'))
            return found

    assert await remarks(hash_here) == await remarks("") == []
    assert await remarks("0123456789abcdef") == [
        "tokenizer of m: that of worker a:0 is another one"
    ]
    assert apart == [0, 0, 1]


async def test_an_unknown_model_is_404_and_one_without_workers_503(one_redis_server):
    url = one_redis_server.url
    async with replica(url) as door:
        async with worker_here(url, "a"):
            await until_serving(door, 1)
            answer = await door.post("/v1/chat/completions", json=chat("x", model="other"))
            assert answer.status_code == 404
            assert answer.json()["error"] == {
                "message": "The model 'other' does not exist.",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        await eventually(lambda: models(door), lambda found: found == [])
        answer = await door.post("/v1/chat/completions", json=chat("x"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        refused = f'requests_total{{code="503",model="{MODEL}",outcome="no_workers"}}'
        assert await counted(door, refused) == 1
        assert int(answer.headers["retry-after"]) >= 1


async def test_what_a_client_may_not_say_is_named(door):
    transfer = {"prompt_token_ids": [1]}
    part = {"type": "image_url", "image_url": None, "uuid": "of another client"}
    named = [{"role": "user", "content": [part]}]
    for body, param in (
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"model": "sim-model", "model": "x"}', "model"),
        (orjson.dumps(chat("x", kv_transfer_params=transfer)), "kv_transfer_params"),
        (orjson.dumps(chat("x", input_ids=[1])), "input_ids"),
        (orjson.dumps(chat("x", stream="yes")), "stream"),
        (orjson.dumps(chat("x", cache_salt=7)), "cache_salt"),
        (orjson.dumps(chat("x", messages=named)), "messages"),
        (orjson.dumps(chat("x", messages=named)).replace(b"uuid", rb"u\u0075id"), "messages"),
        (orjson.dumps(chat("x", messages=[{"role": "user", "content": named}])), "messages"),
    ):
        answer = await door.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["param"] == param, body
    answer = await door.post("/v1/chat/completions", json=chat('"uuid"', metadata={"uuid": "x"}))
    assert answer.status_code == 200, answer.text


async def test_salts_share_nothing(door):
    async def overlap(**more):
        answer = await door.post("/v1/chat/completions", json=chat("salted", **more))
        return answer.headers["x-kvroute-overlap"]

    await overlap()
    await eventually(overlap, lambda found: not found.startswith("0/"))
    assert (await overlap(cache_salt="red")).startswith("0/")
    await eventually(lambda: overlap(cache_salt="red"), lambda found: not found.startswith("0/"))


async def test_stored_state_is_refused(door):
    asked = {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}
    answer = await door.post("/v1/responses", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_errors_of_messages_have_their_own_form(door):
    answer = await door.post("/v1/messages", json={"model": "x", "messages": []})
    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"


async def test_a_key_guards_all_but_health(one_redis_server):
    url = one_redis_server.url
    async with (
        worker_here(url, "a", worker_key="inner"),
        replica(url, api_key="secret", worker_key="inner") as door,
    ):
        await until_serving(door, 1)
        answer = await door.post("/v1/chat/completions", json=chat("x"))
        assert answer.status_code == 200, answer.text
        for wrong in ({"authorization": "Bearer no"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/v1/workers", "/metrics", "/nowhere"):
                answer = await door.get(path, headers=wrong)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            answer = await door.post("/v1/chat/completions", json=chat("x"), headers=wrong)
            assert answer.status_code == 401
            for path in ("/health", "/readiness"):
                assert (await door.get(path, headers=wrong)).status_code == 200
        answer = await door.get("/v1/models", headers={"authorization": "", "x-api-key": "secret"})
        assert answer.status_code == 401  # an empty bearer token is one
