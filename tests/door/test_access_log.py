"""What operators are told of requests to the front door, those that are refused included."""

import asyncio
import re
import socket
from datetime import UTC, datetime
from types import SimpleNamespace
from urllib.parse import quote

import orjson
import pytest
from aiohttp import web

from app.door.record import RequestRecord
from app.door.told import access_log
from app.door.told.access_log import FIELDS, LINE_FIELDS, AccessLog
from app.edge.errors import ERRORS, reason_of
from app.output import OUT
from tests.door.conftest import completing, models, registered, replica, until_serving
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from workers.engines.sim.text import FOLDER

SECRET = "swordfish"
ASKED = {"model": "m", "prompt": [1, 2, 3, 4, 5]}
PATH = "/v1/completions"


async def complete(request):
    body = await request.json()
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": SECRET}], "usage": usage})
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    said = {"text": SECRET, "finish_reason": "stop"}
    for event in ({"choices": [said]}, {"choices": [], "usage": usage}):
        await answer.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer


def lines(capsys):
    """Those of the log since the last call."""
    OUT.flush()
    return [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_a_line_has_all_that_a_request_can_be_billed_and_searched_by(
    one_redis_server, redis, capsys
):
    settings = {"access_log": True, "api_key": "k", "port": 4711}
    settings["model_alias"] = "old=m"
    async with (
        completing(redis, "a", complete),
        replica(one_redis_server.url, **settings) as door,
    ):
        await until_serving(door, 1)
        lines(capsys)
        headers = {"x-tenant-id": "acme", "x-request-id": "r1", "x-forwarded-for": "10.1.2.3"}
        asked = ASKED | {"stream": True, "session_id": "s1", "user": "ann", "model": "old"}
        began = datetime.now(UTC)
        assert (await door.post(PATH, json=asked, headers=headers)).status_code == 200
        [line] = lines(capsys)
    assert line.keys() == FIELDS.keys() | {"replica"}
    assert (
        line
        | {
            "path": PATH,
            "replica": f"{socket.gethostname()}:4711",
            "stream": True,
            "client": "127.0.0.1",
            "forwarded_for": "10.1.2.3",
            "request_id": "r1",
            "key": "api-key",
            "tenant": "acme",
            "session": "s1",
            "user": "ann",
            "model": "m",
            "alias": "old",
            "worker": "a:0",
            "tries": 1,
            "failed": [],
            "causes": [],
            "tokens_from": "client",
            "prompt_tokens": 5,
            "predicted_cached_tokens": 0,
            "cached_tokens": 4,
            "output_tokens": 3,
            "counted_by": "engine",
            "status": 200,
            "outcome": "ok",
            "ended_by": "worker",
            "error": None,
        }
        == line
    )
    assert began <= datetime.fromisoformat(line["time"]).replace(microsecond=999_999)
    assert 0 < line["ttft_s"] <= line["duration_s"]
    stages = {name: line[name] for name in ("body_s", "tokens_s", "decide_s", "first_token_s")}
    assert sum(stages.values()) == pytest.approx(line["ttft_s"], abs=0.001)
    assert sum(stages.values()) + line["rest_s"] == pytest.approx(line["duration_s"], abs=0.001)
    assert line["wait_s"] is line["failed_s"] is line["whole_s"] is None
    assert SECRET not in str(line)


TURN = {"role": "user", "content": "Tell me more of it. " * 20}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 2000}),
        ("/v1/completions", {"prompt": TURN["content"], "max_tokens": 2000}),
        ("/v1/messages", {"messages": [TURN], "max_tokens": 2000}),
        ("/v1/responses", {"input": [TURN], "max_output_tokens": 2000}),
    ],
)
async def test_what_a_client_got_before_it_left_is_counted_here(
    one_redis_server, redis, capsys, path, asked
):
    tokenizer = str(FOLDER)
    async with (
        fake_engine(token_s=0.02, tokenizer=tokenizer) as engine,
        replica(one_redis_server.url, access_log=True) as door,
    ):
        await registered(redis, "a", engine.url, engine="vllm 0.33.0", tokenizer=tokenizer)
        await until_serving(door, 1)
        [model] = await models(door)
        body = {"model": model, **asked, "stream": True}
        lines(capsys)
        said = ""
        async with door.stream("POST", path, json=body) as answer:
            async for piece in answer.aiter_text():
                said += piece
                if len(re.findall(r'"(?:content|text|delta)":"[^"]', said)) >= 5:
                    break

        async def logged():
            return lines(capsys)

        [line] = await eventually(logged)
        assert (line["outcome"], line["counted_by"]) == ("left_after_token", "router")
        assert 5 <= line["output_tokens"] < 2000
        assert line["prompt_tokens"] > 20
        assert line["cached_tokens"] == line["predicted_cached_tokens"] == 0
        found = await scrape(door)
        for kind in ("output", "prompt"):
            counted = found("door_tokens_total", model=model, kind=f"{kind}_by_router")
            assert counted == line[f"{kind}_tokens"]
            assert not found("door_tokens_total", model=model, kind=kind)


async def test_identities_are_hashed_if_they_are_to_be(one_redis_server, redis, capsys):
    settings = {"access_log": True, "log_identities": "hash"}
    async with completing(redis, "a", complete), replica(one_redis_server.url, **settings) as door:
        await until_serving(door, 1)
        for _ in range(2):
            await door.post(PATH, json=ASKED | {"session_id": "s1", "user": "ann"})
        first, second = (line for line in lines(capsys) if line["path"] == PATH)
    for name in ("session", "user"):
        assert re.fullmatch("[0-9a-f]{16}", first[name])
        assert first[name] == second[name]


REFUSED = {
    "a wrong key": (
        {"headers": {"authorization": "Bearer no"}, "json": ASKED},
        (401, "invalid_api_key", ""),
    ),
    "an unknown model": ({"json": ASKED | {"model": "nope"}}, (404, "model_not_found", "")),
    "a body that is not JSON": ({"content": b"{"}, (400, "invalid_request_error", "")),
    "a bad value": (
        {"json": ASKED | {"prompt": {SECRET: 1}}},
        (400, "invalid_request_error", "m"),
    ),
    "a prompt that is too long": (
        {"json": ASKED | {"prompt": [1] * 200}},
        (400, "context_length_exceeded", "m"),
    ),
    "a body that is too large": ({"content": b" " * 70_000}, (413, "body_too_large", "")),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_refused_request_has_a_line_and_is_counted(
    one_redis_server, redis, capsys, caplog, what
):
    request, (status, outcome, model) = REFUSED[what]
    settings = {"access_log": True, "api_key": "k", "max_request_bytes": 65_536}
    async with (
        completing(redis, "a", complete, max_model_len=100),
        replica(one_redis_server.url, **settings) as door,
    ):
        await until_serving(door, 1)
        lines(capsys)
        caplog.clear()
        answer = await door.post(PATH, **request)
        assert answer.status_code == status
        [line] = lines(capsys)
        found = await scrape(door)
    told = {name: line[name] for name in ("status", "outcome", "ended_by", "client", "path")}
    assert told == {
        "status": status,
        "outcome": outcome,
        "ended_by": "router",
        "client": "127.0.0.1",
        "path": PATH,
    }
    assert line["error"]
    assert SECRET not in str(line)
    labels = {"outcome": outcome, "code": str(status), "model": model}
    assert found("door_requests_total", **labels) == 1
    assert f"({status} {outcome})" in caplog.text
    assert SECRET not in caplog.text


async def test_a_client_that_goes_while_it_sends_is_counted(one_redis_server, redis):
    async with completing(redis, "a", complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        _, writer = await asyncio.open_connection("127.0.0.1", door.base_url.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode())
        await writer.drain()
        writer.transport.abort()

        async def gone():
            found = await scrape(door)
            return found("door_requests_total", model="", outcome="left_before_token", code="499")

        await eventually(gone, lambda number: number == 1)


async def test_paths_beside_the_api_itself_are_logged_too(one_redis_server, redis, capsys):
    settings = {"access_log": True, "api_key": "k"}
    async with completing(redis, "a", complete), replica(one_redis_server.url, **settings) as door:
        await until_serving(door, 1)
        lines(capsys)
        await door.get("/v1/models")
        await door.get("/v1/models/none")
        await door.get(PATH)
        await door.post("/tokenize", json={"model": "m", "prompt": SECRET})
        await door.get("/health")
        told = [(line["path"], line["status"], line["outcome"]) for line in lines(capsys)]
    assert told == [
        ("/v1/models", 200, "ok"),
        ("/v1/models/none", 404, "model_not_found"),
        (PATH, 405, "method_not_allowed"),
        ("/tokenize", 404, "not_found"),  # this engine has no such path
    ]


async def test_what_a_client_sends_forges_no_line(one_redis_server, redis, capsys, caplog):
    settings = {"access_log": True}
    async with completing(redis, "a", complete), replica(one_redis_server.url, **settings) as door:
        await until_serving(door, 1)
        lines(capsys)
        caplog.clear()
        await door.get("/v1/models/a%0AERROR%20forged" + "x" * 1000)
        await door.post(
            PATH, content=b'{"model": "m", "a\\nERROR forged": 1, "a\\nERROR forged": 1}'
        )
        told = lines(capsys)
    assert [line["status"] for line in told] == [404, 400]
    assert len(told[0]["path"]) == 80
    assert len(caplog.messages) == 2
    assert not [message for message in caplog.messages if "\n" in message]


def test_lines_of_refused_requests_are_few_and_say_how_many_were_left_out(capsys, monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(access_log, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    log = AccessLog(on=True, hashes=False, replica="here:1")

    def ended(outcome, times):
        for _ in range(times):
            record = RequestRecord(PATH, status=401)
            record.close(outcome, ended_by="router")
            log.ended(record)
        return lines(capsys)

    [first] = ended("invalid_api_key", 1000)
    assert "left_out" not in first
    [other] = ended("model_not_found", 2)
    assert "left_out" not in other
    clock.now_s += 1 / access_log.REFUSED_PER_S
    [later] = ended("invalid_api_key", 1)
    assert later["left_out"] == 999
    assert len(ended("ok", 50)) == 50
    assert later.keys() == FIELDS.keys() | LINE_FIELDS.keys()


def test_reasons_repeat_no_value_of_the_callers():
    for kind in ERRORS:
        error = Exception.__new__(kind)
        Exception.__init__(error, f"prompt: must be text, got {SECRET!r}")
        assert reason_of(error) == "prompt: must be text"
    assert reason_of(LookupError(SECRET)) == "LookupError; see the router's log"


async def test_what_a_client_wrote_is_printed_as_escapes(one_redis_server, redis, capsys):
    hostile = "\x9b2J\u202eevil\u2028"
    async with (
        completing(redis, "a", complete),
        replica(one_redis_server.url, access_log=True) as door,
    ):
        await until_serving(door, 1)
        await door.get(f"/v1/models/{quote(hostile)}")
        await door.post(PATH, json=ASKED | {"user": hostile})
        headers = {"x-forwarded-for": b"\x9b2J", "x-request-id": "r1"}
        await door.post(PATH, json=ASKED, headers=headers)
    OUT.flush()
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    *_, one, two, three = [orjson.loads(line) for line in said.split("\n") if line]
    assert one["path"] == f"/v1/models/{hostile}"
    assert two["user"] == hostile
    assert three["forwarded_for"] == "\x9b2J"
