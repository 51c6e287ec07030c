import asyncio
import json
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from app.core.errors import InvalidRequest
from app.core.events import Stored
from app.core.worker_report import DEFAULT_SPEED
from app.http import body, client
from app.http.client import EVENTS
from app.http.json_body import MAX_VALUES
from app.http.keys import OPEN
from app.http.protocol import CUT
from app.http.server import serve
from app.simulation.engine import SimEngine
from app.simulation.profiles import Profile
from app.simulation.speed import sped_up
from app.simulation.steps import SimRequest
from tests.eventually import eventually
from workers.engines.base import CompletionRequest, EngineStoppedError
from workers.engines.sim.runner import EngineRunner
from workers.server.answer import ServedEngine
from workers.server.paths import WorkerApp

# A prefill step of n tokens takes 1 + n engine seconds, a decode step of n requests 1 + n.
EASY = Profile(
    over_s=1.0,
    a0_s=0.0,
    b0_s=0.0,
    a1_s=0.0,
    b1_s=1.0,
    q_s=0.0,
    c_s=0.0,
    kv_pool_tokens=64,
    max_batch_tokens=8,
    host_s_per_token=0.0,
    max_num_seqs=1,
)
ABC = list(range(100, 110))  # the ten tokens A to J


def request_of(request_id, prompt, max_tokens):
    return CompletionRequest(request_id, struct.pack(f"<{len(prompt)}I", *prompt), max_tokens)


def simulated(prompt, max_tokens):
    return SimRequest.from_tokens("r", prompt, max_tokens, block_size=4)


OUTPUT = simulated(ABC, 7).output_tokens(0, 7)


FETCHED = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_request_id": "kept",
    "remote_num_tokens": 4,
}


def travelling(params):
    return {"prompt": [1], "kv_transfer_params": params}


def raw(content, **params):
    headers = {"content-type": "application/octet-stream"}
    return {"content": content, "params": params, "headers": headers}


class FakeTime:
    """A clock that moves while the runner sleeps, by `late_s` more than it asked for."""

    def __init__(self, late_s=0.0):
        self.now = 0.0
        self.late_s = late_s

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds + self.late_s
        await asyncio.sleep(0)


class Gate:
    """Holds the runner in its step; `open` lets it finish this many steps."""

    def __init__(self):
        self._permits = asyncio.Semaphore(0)

    async def sleep(self, seconds):
        await self._permits.acquire()

    def open(self, steps):
        for _ in range(steps):
            self._permits.release()


def runner_of(**options):
    return EngineRunner(SimEngine(EASY, block_size=4, now=time.monotonic), **options)


@asynccontextmanager
async def running(runner):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run())
        yield runner
        runner.stop()


@asynccontextmanager
async def serving(runner, tokenizer=None):
    """Run `runner` and serve it on a free port; yields a client."""
    async with served_by(
        runner, WorkerApp(ServedEngine(runner, ["simulated"], tokenizer))
    ) as client:
        yield client


@asynccontextmanager
async def served_by(runner, app):
    """Run `runner` and serve `app` on a free port; yields a client."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections made before the server is up wait here
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=url) as client:
            tasks.create_task(runner.run())
            serving = tasks.create_task(serve(app, listener))
            yield client
            runner.stop()
            serving.cancel()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing in the server signals it
            await asyncio.sleep(0.001)


async def outputs_of(generation):
    return [output async for output in generation]


def fast():
    return runner_of(speedup=1e4)


async def answered(**sent):
    """What a worker of its own answers to a completion."""
    async with serving(fast()) as client:
        return await client.post("/v1/completions", **sent)


def events_of(body):
    """The JSON payloads of a server-sent event stream, which ends with [DONE]."""
    *chunks, end = body.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


# The runner


async def test_a_step_takes_its_engine_seconds_over_the_speed_up():
    time = FakeTime()
    ended = []
    async with running(runner_of(speedup=10, clock=time.clock, sleep=time.sleep)) as runner:
        runner.on_step = lambda: ended.append(time.now)
        await outputs_of(runner.complete(request_of("r", ABC, 3)))

    # 8 tokens, 2 tokens, 2 decodes
    assert ended == pytest.approx([0.9, 0.9 + 0.3, 0.9 + 0.3 + 0.2, 0.9 + 0.3 + 0.4])


async def test_late_wake_ups_do_not_add_up():
    time = FakeTime(late_s=0.01)
    async with running(runner_of(speedup=10, clock=time.clock, sleep=time.sleep)) as runner:
        await outputs_of(runner.complete(request_of("r", [1], 50)))

    # One step of 1 + 1 engine seconds for the first token, and 49 for the others.
    assert time.now == pytest.approx(50 * 0.2 + 0.01)


async def test_the_runner_does_not_catch_up_on_idle_time():
    time = FakeTime()
    async with running(runner_of(clock=time.clock, sleep=time.sleep)) as runner:
        await outputs_of(runner.complete(request_of("first", [1], 1)))
        await asyncio.sleep(0)
        time.now = 100.0
        await outputs_of(runner.complete(request_of("second", [2, 3], 1)))

    assert time.now == 100 + 1 + 2


async def test_a_slow_reader_gets_fewer_and_larger_outputs():
    time = FakeTime()
    async with running(runner_of(clock=time.clock, sleep=time.sleep)) as runner:
        generation = runner.complete(request_of("r", ABC, 7))
        await until(lambda: runner.metrics().request_active_slots == 0)
        await outputs_of(runner.complete(request_of("later", [1], 1)))

        outputs = await outputs_of(generation)

    assert [output.token_ids for output in outputs] == [OUTPUT]
    assert outputs[0].finished is not None


async def test_events_are_available_once_their_step_ends():
    gate = Gate()
    async with running(runner_of(sleep=gate.sleep)) as runner:
        runner.complete(request_of("r", ABC, 1))
        await until(lambda: runner.metrics().request_active_slots == 1)
        assert runner.take_events() == []

        stepped = asyncio.Event()
        runner.on_step = stepped.set
        gate.open(1)
        await stepped.wait()

        assert runner.take_events() == [Stored(simulated(ABC, 1).blocks, None)]
        assert runner.take_events() == []
        gate.open(2)


async def test_tokens_of_a_cancelled_request_never_reach_another_of_the_same_id():
    gate = Gate()
    async with running(runner_of(sleep=gate.sleep)) as runner:
        old = runner.complete(request_of("r", [1], 1))
        await until(lambda: runner.metrics().num_requests_waiting == 0)  # the step has begun
        old.cancel()
        new = runner.complete(request_of("r", [2], 2))
        old.cancel()

        gate.open(3)  # the step of the old one, two of the new one
        outputs = await outputs_of(new)

    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == simulated([2], 2).output_tokens(0, 2)


async def test_an_id_in_use_is_refused():
    runner = runner_of()
    runner.complete(request_of("r", ABC, 1))

    with pytest.raises(InvalidRequest, match="'r' is already in use"):
        runner.complete(request_of("r", ABC, 1))


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_stopping_ends_requests_under_way_and_refuses_new_ones(is_cancelled):
    gate = Gate()
    runner = runner_of(sleep=gate.sleep)
    run = asyncio.ensure_future(runner.run())
    generation = runner.complete(request_of("r", ABC, 9))
    await until(lambda: runner.metrics().request_active_slots == 1)
    if is_cancelled:
        run.cancel()
    else:
        runner.stop()
        gate.open(1)
    await asyncio.wait([run])

    with pytest.raises(EngineStoppedError, match="the engine stopped request r after 0 tokens"):
        await outputs_of(generation)
    with pytest.raises(EngineStoppedError, match="stopping"):
        runner.complete(request_of("new", ABC, 9))


async def test_speed_is_learned_on_the_wall_clock():
    learned = []
    for speedup in (1, 100):
        time = FakeTime()
        runner = runner_of(speedup=speedup, clock=time.clock, sleep=time.sleep)
        assert runner.speed() == sped_up(DEFAULT_SPEED, speedup)
        async with running(runner):
            for i in range(20):
                await outputs_of(runner.complete(request_of("r", [i] * 7, 2)))
        learned.append(runner.speed())

    slow, fast = learned
    # 7 tokens take 1 + 7 engine seconds, in a profile whose full steps have 8 tokens.
    assert slow.prefill_s_per_token == pytest.approx(1.0, rel=0.01)
    assert fast.prefill_s_per_token == pytest.approx(0.01, rel=0.01)
    assert slow.mean_output_tokens == pytest.approx((300 * 10 + 2 * 20) / 30)


# HTTP


async def test_a_completion_is_answered_as_a_whole_unless_streaming_is_asked_for():
    async with serving(fast()) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": ABC, "max_tokens": 7, "request_id": "r"}
        )

    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("created") > 0
    assert answer == {
        "id": "r",
        "object": "text_completion",
        "model": "simulated",
        "choices": [
            {
                "index": 0,
                "text": "",
                "token_ids": OUTPUT,
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 7,
            "total_tokens": 17,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "cached_tokens_by_tier": {"device": 0, "host": 0, "disk": 0},
            },
        },
    }


async def test_a_stream_sends_the_first_token_at_once_and_usage_at_the_end():
    gate = Gate()
    async with serving(runner_of(sleep=gate.sleep)) as client:
        fields = {"prompt": ABC, "max_tokens": 7, "stream": True, "stream_interval": 4}
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            texts = response.aiter_text()
            body = ""
            for steps in (2, 4, 2):  # the prompt takes two steps and yields a token
                gate.open(steps)
                body += await anext(texts)
            body += "".join([text async for text in texts])

    chunks = events_of(body)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [
        OUTPUT[:1],
        OUTPUT[1:5],
        OUTPUT[5:],
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert ["usage" in chunk for chunk in chunks] == [False, False, True]
    assert chunks[2]["usage"]["completion_tokens"] == 7
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_tokens_are_streamed_one_by_one_by_default():
    gate = Gate()
    async with serving(runner_of(sleep=gate.sleep)) as client:
        fields = {"prompt": ABC, "max_tokens": 3, "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            texts = response.aiter_text()
            body = ""
            for steps in (2, 1, 1):
                gate.open(steps)
                body += await anext(texts)
            body += "".join([text async for text in texts])

    assert [chunk["choices"][0]["token_ids"] for chunk in events_of(body)] == [
        [token] for token in OUTPUT[:3]
    ]


async def test_usage_reports_how_much_of_the_prompt_was_cached():
    async with serving(fast()) as client:
        await client.post("/v1/completions", json={"prompt": ABC})
        response = await client.post("/v1/completions", json={"prompt": ABC})

    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 8,
        "cached_tokens_by_tier": {"device": 8, "host": 0, "disk": 0},
    }
    assert usage["completion_tokens"] == 16


async def test_metrics_show_the_engines_requests_and_blocks():
    gate = Gate()
    async with serving(runner_of(sleep=gate.sleep)) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": ABC}))

        async def text():
            return (await client.get("/metrics")).text

        assert await eventually(text, lambda t: 'kvroute_engine_requests{state="running"} 1.0' in t)
        assert 'kvroute_engine_kv_blocks{what="used"} 2.0' in await text()
        assert "kvroute_engine_kv_idle_before_evict_seconds 0.0" in await text()
        gate.open(99)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("key", ["inner", ""])
async def test_a_key_of_metrics_opens_nothing_else(key):
    runner = runner_of()
    app = WorkerApp(ServedEngine(runner, ["simulated"], None), key=key, metrics_key="scraper")
    async with served_by(runner, app) as client:

        async def asked(path, given):
            headers = {"authorization": f"Bearer {given}"}
            return (await client.get(path, headers=headers)).status_code

        assert [await asked("/metrics", given) for given in ("scraper", "no")] == [200, 401]
        others = [await asked("/v1/completions", given) for given in ("inner", "scraper")]
        assert others == ([405, 401] if key else [405, 405])


async def test_nothing_but_health_is_open_where_a_key_is_asked_for():
    runner = runner_of()
    app = WorkerApp(ServedEngine(runner, ["simulated"], None), key="inner")
    async with served_by(runner, app) as client:
        assert (await client.get("/health")).status_code == 200
        for path in OPEN:
            if path != "/health":
                assert (await client.get(path)).status_code == 401, path
        assert (await client.get("/console/page")).status_code == 401


async def test_routers_with_the_same_key_have_a_share_each_of_what_bodies_may_take():
    async def holder(client):
        await client.answer(client.holder)

    runner = runner_of()
    app = WorkerApp(ServedEngine(runner, ["simulated"], None), key="inner")
    app.add("GET", "/holder", holder)
    async with served_by(runner, app) as client:
        answer = await client.get("/holder", headers={"authorization": "Bearer inner"})

    assert answer.json() == "127.0.0.1"


async def test_a_raw_prompt_takes_its_other_fields_from_the_query():
    async with serving(fast()) as client:
        response = await client.post(
            "/v1/completions",
            params={"max_tokens": 7, "stream": "true", "stream_interval": 10, "request_id": "7"},
            content=struct.pack("<10I", *ABC),
            headers={"content-type": "application/octet-stream"},
        )

    chunks = events_of(response.text)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [OUTPUT[:1], OUTPUT[1:]]
    assert chunks[0]["id"] == "7"


class SlowTokenizer:
    """Finishes encoding a text, or decoding a token in a thread, once `may_end` is set."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def encode(self, text):
        self.work()
        return ABC

    def work(self):
        self.begun.set()
        assert self.may_end.wait(5)

    def stream(self, context=()):
        return TokenNumbers(self)


class TokenNumbers:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def push(self, token):
        if threading.current_thread() is not threading.main_thread():
            self.tokenizer.work()
        return f"{token} "

    def end(self):
        return "."


async def test_other_requests_are_served_while_a_long_text_is_tokenized():
    tokenizer = SlowTokenizer()
    async with serving(fast(), tokenizer) as client:
        text = {"prompt": "long", "max_tokens": 2}
        asking = asyncio.create_task(client.post("/v1/completions", json=text))
        assert await asyncio.to_thread(tokenizer.begun.wait, 10)
        tokens = {"prompt": ABC, "max_tokens": 2}
        answer = await client.post("/v1/completions", json=tokens)
        tokenizer.may_end.set()
        same = (await asking).json()

    assert answer.json()["choices"] == same["choices"]


async def test_prompts_are_counted_before_any_is_tokenized():
    tokenizer = SlowTokenizer()
    async with serving(fast(), tokenizer) as client:
        for prompts in (["text"] * 500, [[1, 2]] * 500, [["no"]] * 500):
            answer = await client.post("/v1/completions", json={"prompt": prompts})
            assert answer.status_code == 422
            assert "500 choices, over 128" in answer.json()["error"]["message"]
    assert not tokenizer.begun.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_other_requests_are_served_while_the_text_of_a_long_output_is_put_together(
    stream, monkeypatch
):
    monkeypatch.setattr("workers.server.answer.LONG_OUTPUT_TOKENS", 7)
    tokenizer = SlowTokenizer()
    async with serving(fast(), tokenizer) as client:
        fields = {"prompt": ABC, "max_tokens": 8, "stream": stream, "stream_interval": 7}
        asking = asyncio.create_task(client.post("/v1/completions", json=fields))
        assert await asyncio.to_thread(tokenizer.begun.wait, 10)
        tokens = {"prompt": ABC, "max_tokens": 2}
        answer = await client.post("/v1/completions", json=tokens)
        tokenizer.may_end.set()
        long = (await asking).text

    chunks = events_of(long) if stream else [json.loads(long)]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(text.split()) == 9
    assert text.endswith(" .")
    assert text.startswith(answer.json()["choices"][0]["text"].removesuffix("."))


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({}, "prompt", "got NoneType"),
        ({"prompt": "hello"}, "prompt", "this worker has no tokenizer"),
        ({"prompt": 7}, "prompt", "got int"),
        ({"prompt": [1], "temperature": -1}, "temperature", "got -1"),
        ({"prompt": [1], "top_p": 0}, "top_p", "got 0"),
        ({"prompt": [1], "seed": "x"}, "seed", "got 'x'"),
        ({"prompt": [1], "ignore_eos": 1}, "ignore_eos", "got 1"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [1, "2"]}, "prompt", "'2' is not a token id"),
        ({"prompt": [1, True]}, "prompt", "True is not a token id"),
        ({"prompt": [1, 2.5]}, "prompt", "2.5 is not a token id"),
        ({"prompt": [-1]}, "prompt", "-1 is not a token id"),
        ({"prompt": [1 << 32]}, "prompt", "4294967296 is not a token id"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens", "got 0"),
        ({"prompt": [1], "max_tokens": "5"}, "max_tokens", "got '5'"),
        ({"prompt": [1], "stream": "yes"}, "stream", "got 'yes'"),
        ({"prompt": [1], "stream": 0}, "stream", "got 0"),
        ({"prompt": [1], "ignore_eos": ""}, "ignore_eos", "got ''"),
        ({"prompt": [1], "stream_interval": True}, "stream_interval", "got True"),
        ({"prompt": [1], "request_id": 5}, "request_id", "got 5"),
        ({"prompt": [1], "request_id": ""}, "request_id", "got ''"),
        ({"prompt": [1], "request_id": "a b"}, "request_id", "got 'a b'"),
        ({"prompt": [1], "request_id": "x" * 129}, "request_id", "got 'xxx"),
        ({"prompt": [1], **dict.fromkeys("zyxwvutsrqp", 5)}, "z", "got 5"),  # the first of them
        ([1], "body", "got `array`"),
        (travelling(7), "kv_transfer_params", "got 7"),
        (travelling({"do_remote_decode": 1}), "kv_transfer_params.do_remote_decode", "got 1"),
        (
            travelling({"do_remote_decode": True, "do_remote_prefill": True}),
            "kv_transfer_params",
            "either for a source or for a target",
        ),
        (travelling(FETCHED | {"remote_host": ""}), "kv_transfer_params.remote_host", "got ''"),
        (travelling(FETCHED | {"remote_port": 0}), "kv_transfer_params.remote_port", "got 0"),
        (
            travelling(FETCHED | {"remote_num_tokens": "4"}),
            "kv_transfer_params.remote_num_tokens",
            "got '4'",
        ),
        (travelling(FETCHED), "kv_transfer_params", "this worker has no --kv-transfer"),
        (
            travelling({"do_remote_decode": True, "cached_only": True}),
            "kv_transfer_params",
            "this worker has no --kv-transfer",
        ),
        (raw(b"\0" * 7), "prompt", "7 bytes"),
        (raw(b""), "prompt", "empty"),
        (raw(b"\0" * 8, max_tokens="-1"), "max_tokens", "got -1"),
        (raw(b"\0" * 8, stream="maybe"), "stream", "got 'maybe'"),
        ({"content": b"{"}, "body", ""),
        ({"prompt": [1, "x" * 5000]}, "prompt", "xxx..."),
        *(
            ({"prompt": [1], name: "x" * 5000}, name, "xxx...")
            for name in ("request_id", "stream", "max_tokens", "temperature", "seed")
        ),
    ],
)
async def test_bad_input_is_refused_with_the_field_and_its_value(fields, field, message):
    response = await answered(**(fields if "content" in fields else {"json": fields}))

    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert message in error["message"]
    assert len(error["message"]) < 200


# The pool's 64 tokens take 4 bytes each when raw and up to 12 in JSON; 64 KiB are for all else.
LARGEST = {"application/octet-stream": 65_792, "application/json": 66_304}


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("kind", "size"), LARGEST.items())
async def test_a_body_larger_than_any_prompt_that_fits_is_refused(kind, size, announced):
    async def trickle():
        yield b" " * size
        yield b" "

    headers = {"content-type": kind} | ({"content-length": str(size + 1)} if announced else {})
    response = await answered(content=trickle(), headers=headers)

    assert response.status_code == 413
    assert response.json()["error"] == {
        "code": "body_too_large",
        "message": f"body: over {size} bytes",
        "field": None,
    }


async def test_a_body_that_stalls_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    async with serving(fast()) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: w\r\nContent-Length: 2\r\n\r\n{")
        answer = await reader.read()  # which ends, as the worker closes the connection
        writer.close()

    headers, _, text = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 408 ")
    assert json.loads(text) == {
        "error": {
            "code": "body_timeout",
            "message": "body: nothing of it for 0.05 s, or under 8192 bytes a second",
            "field": None,
        }
    }


async def test_a_body_as_large_as_allowed_is_read():
    content = json.dumps({"prompt": ABC}).encode().ljust(LARGEST["application/json"])
    response = await answered(content=content)

    assert response.status_code == 200


async def test_a_client_that_disconnects_while_it_sends_is_not_logged(caplog):
    async with serving(fast()) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: worker\r\n"
            b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n"
        )
        assert b"100 Continue" in await reader.readline()  # so the body is being read
        writer.write(b"{")
        writer.close()
        await writer.wait_closed()

    assert caplog.messages == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completion", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_a_wrong_path_or_method_is_answered_with_the_common_error_format(
    method, path, status, code
):
    async with serving(fast()) as client:
        response = await client.request(method, path)

    assert response.status_code == status
    assert set(response.json()["error"]) == {"code", "message", "field"}
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    "member",
    [
        b'"prompt":[%b[]]' % (b"[]," * MAX_VALUES),
        b'"nobody_knows":[%b{}]' % (b"{}," * MAX_VALUES),
        b'"kv_transfer_params":{"a":[%b{}]}' % (b"{}," * MAX_VALUES),
    ],
)
async def test_a_body_of_more_values_than_can_be_read_in_time_is_refused(member):
    vast = replace(EASY, kv_pool_tokens=1 << 20)
    runner = EngineRunner(SimEngine(vast, block_size=4, now=time.monotonic))
    async with serving(runner) as client:
        response = await client.post("/v1/completions", content=b'{"max_tokens":1,%b}' % member)

    assert response.status_code == 422
    assert "over" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "field"), [(10, 55, "max_tokens"), (64, 1, "prompt")]
)
async def test_a_request_larger_than_the_pool_is_refused_by_the_field_that_is_too_large(
    prompt_tokens, max_tokens, field
):
    async with serving(fast()) as client:
        body = {"prompt": list(range(prompt_tokens)), "max_tokens": max_tokens}
        response = await client.post("/v1/completions", json=body)

    assert response.status_code == 422
    assert response.json()["error"] == {
        "code": "prompt_too_large",
        "message": f"needs {prompt_tokens} prompt + {max_tokens} output tokens, "
        "but the KV pool holds 64",
        "field": field,
    }


async def test_a_full_queue_asks_the_client_to_retry_later():
    gate = Gate()
    runner = runner_of(sleep=gate.sleep, max_waiting=1)
    async with serving(runner) as client, asyncio.TaskGroup() as tasks:
        for waiting in (0, 1):
            tasks.create_task(client.post("/v1/completions", json={"prompt": ABC, "max_tokens": 1}))
            await until(lambda n=waiting: is_busy(runner, n))

        response = await client.post("/v1/completions", json={"prompt": ABC})
        gate.open(10)

    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    assert "1 requests are already waiting" in response.json()["error"]["message"]


def is_busy(runner, waiting):
    metrics = runner.metrics()
    return (metrics.request_active_slots, metrics.num_requests_waiting) == (1, waiting)


def is_idle(runner):
    metrics = runner.metrics()
    assert metrics.kv_active_blocks == 0 or metrics.request_active_slots > 0
    return metrics.request_active_slots + metrics.num_requests_waiting == 0


async def test_a_client_that_disconnects_in_mid_stream_frees_its_blocks():
    gate = Gate()
    runner = runner_of(sleep=gate.sleep)
    async with serving(runner) as client:
        fields = {"prompt": ABC, "max_tokens": 40, "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            gate.open(3)
            await anext(response.aiter_text())
            assert runner.metrics().kv_active_blocks == 3

        await until(lambda: is_idle(runner))
        runner.engine.check()
        gate.open(1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_before_the_first_token_cancels_its_request(stream, caplog):
    gate = Gate()
    runner = runner_of(sleep=gate.sleep)
    fields = {"prompt": ABC, "max_tokens": 40, "stream": stream}
    async with serving(runner) as client, asyncio.TaskGroup() as tasks:
        posts = []
        for waiting in (0, 1):  # one in the engine, one in its queue
            posts.append(tasks.create_task(client.post("/v1/completions", json=fields)))
            await until(lambda n=waiting: is_busy(runner, n))

        posts[1].cancel()
        await until(lambda: is_busy(runner, 0))
        posts[0].cancel()
        await until(lambda: is_idle(runner))
        gate.open(1)

    assert caplog.messages == []


async def test_an_engine_that_stops_during_a_request_is_reported_by_the_status(caplog):
    gate = Gate()
    runner = runner_of(sleep=gate.sleep)
    async with serving(runner) as client:
        fields = {"prompt": ABC, "max_tokens": 40, "request_id": "r"}
        asking = asyncio.create_task(client.post("/v1/completions", json=fields))
        await until(lambda: is_busy(runner, 0))
        runner.stop()
        gate.open(1)
        response = await asking

    assert response.status_code == 503
    assert response.json()["error"] == {
        "code": "stopping",
        "message": "the engine stopped request r after 0 tokens",
        "field": None,
    }
    # A router would take it for a moment's overload, and come again.
    assert "retry-after" not in response.headers
    assert caplog.messages == []


async def test_an_engine_that_stops_in_mid_stream_is_reported_in_the_last_chunk(caplog):
    gate = Gate()
    runner = runner_of(sleep=gate.sleep)
    async with serving(runner) as client:
        fields = {"prompt": ABC, "max_tokens": 40, "request_id": "r", "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            texts = response.aiter_text()
            gate.open(2)  # the prompt takes two steps and yields a token
            await anext(texts)
            runner.stop()
            gate.open(1)
            body = "".join([text async for text in texts])

    *_, last = body.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {
            "code": "stopping",
            "message": "the engine stopped request r after 1 tokens",
            "type": "api_error",
            "param": None,
        }
    }
    assert caplog.messages == []


async def test_an_answer_that_an_unforeseen_error_ends_is_cut(caplog):
    async def breaks(client):
        await client.start(200, [EVENTS])
        await client.send(b"data: one\n\n")
        raise LookupError("unforeseen")

    async def breaks_at_once(_):
        raise LookupError("unforeseen")

    runner = runner_of()
    app = WorkerApp(ServedEngine(runner, ["simulated"], None))
    app.add("GET", "/breaks", breaks)
    app.add("GET", "/breaks_at_once", breaks_at_once)
    async with served_by(runner, app) as client:
        # In order, its end would say that this was all.
        with pytest.raises(httpx.TransportError):
            await client.get("/breaks")
        answer = await client.get("/breaks_at_once")

    assert answer.status_code == 500
    error = {"code": "internal", "message": "LookupError; see the worker's log", "field": None}
    assert answer.json() == {"error": error}
    assert caplog.messages == ["/breaks failed", "/breaks_at_once failed"]


async def test_a_client_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(client.Exchange, "stalled_s", 0.01)
    cuts = []

    async def never(_):
        await asyncio.Event().wait()

    async def nothing():
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    app = WorkerApp(ServedEngine(fast(), ["simulated"], None))
    async with asyncio.timeout(10):
        await app(scope | {CUT: lambda: cuts.append("cut")}, nothing, never)

    assert cuts == ["cut"]


async def test_health_reports_whether_the_engine_runs():
    runner = fast()
    async with serving(runner) as client:
        await until(lambda: runner.running)
        alive = await client.get("/health")
        runner.stop()
        await until(lambda: not runner.running)
        dead = await client.get("/health")
        refused = await client.post("/v1/completions", json={"prompt": ABC})

    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert dead.status_code == 503
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "stopping"


@pytest.mark.parametrize("field", ["prompt", "temperature", "request_id"])
async def test_a_deeply_nested_value_is_refused_like_any_other(field):
    nested = b"[" * 500 + b"]" * 500
    before = b"" if field == "prompt" else b'"prompt": [1], '
    async with serving(fast()) as client:
        response = await client.post(
            "/v1/completions", content=b'{%b"%b": %b}' % (before, field.encode(), nested)
        )

    assert response.status_code == 422
    error = response.json()["error"]
    assert error["field"] == field
    assert "[[[" in error["message"] or "a deeply nested list" in error["message"]
