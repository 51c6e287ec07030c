import asyncio
import re
import struct
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from app.core.settings.router import RouterSettings
from app.door.answer_request import COUNT_TOKENS, PASSED_ON, PATHS
from app.edge import answers, errors
from app.edge.app import create_app
from app.http import body
from app.router.fleet import Fleet

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
LOCAL = [14643705804678351452, 16777012769546811212]
TOKENS = {"token_ids": PROMPT}
HASHES = {"local_hashes": LOCAL, "num_tokens": 10}
RAW = {"content-type": "application/octet-stream"}
NUMBERS = struct.pack("<4I", 1, 2, 3, 4)


@pytest.fixture
async def one(workers):
    await workers.register("w1")
    return workers


async def assert_refused(response, workers, field, message):
    """A 422 that names `field` and contains `message`; nothing was reserved."""
    assert response.status_code == 422, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert error["message"].startswith(f"{field}: ")
    assert message in error["message"]
    assert (await workers.load("w1")).total == 0


BAD_BODIES = {
    "neither": ({}, "token_ids", "either token_ids, or local_hashes"),
    "both": (TOKENS | HASHES, "token_ids", "either token_ids, or local_hashes"),
    "empty tokens": ({"token_ids": []}, "token_ids", "0 tokens"),
    "negative token": ({"token_ids": [1, 2, -1]}, "token_ids.2", "got -1"),
    "token too large": ({"token_ids": [1, 2**32]}, "token_ids.1", "got 4294967296"),
    "token not an integer": ({"token_ids": [1, 2.5]}, "token_ids.1", "got 2.5"),
    "token a list": ({"token_ids": [[1], [2]]}, "token_ids.0", "got [1]"),
    "token a list with another field of lists": (
        {"token_ids": [1, [2], 3, 4], "mm_hashes": [[7]]},
        "token_ids.1",
        "got [2]",
    ),
    "token a boolean": ({"token_ids": [True]}, "token_ids.0", "got True"),
    "token a boolean with a boolean field": (
        {"reserve": True, "token_ids": [1, False]},
        "token_ids.1",
        "got False",
    ),
    "tokens not a list": ({"token_ids": "1 2"}, "token_ids", "got '1 2'"),
    "many unknown fields": (
        {f"f{n}": 0 for n in range(1000)},
        "body",
        "1,000 fields are unknown or wrong",
    ),
    "no num_tokens": ({"local_hashes": LOCAL}, "num_tokens", "required with local_hashes"),
    "num_tokens with tokens": (
        TOKENS | {"num_tokens": 9},
        "num_tokens",
        "only allowed with local_hashes",
    ),
    "num_tokens 0": (HASHES | {"num_tokens": 0}, "num_tokens", "got 0"),
    "num_tokens too large": (HASHES | {"num_tokens": 10**30}, "num_tokens", f"{10**30}"),
    "too many hashes": (
        HASHES | {"num_tokens": 7},
        "local_hashes",
        "2 full blocks of 4 tokens do not fit into num_tokens 7",
    ),
    "too few hashes": (
        HASHES | {"num_tokens": 12},
        "local_hashes",
        "2 full blocks of 4 tokens do not fill num_tokens 12",
    ),
    "too many excluded": (TOKENS | {"exclude": ["w2"] * 4097}, "exclude", "at most 4096 items"),
    "hash a list": (HASHES | {"local_hashes": [[1]]}, "local_hashes.0", "got [1]"),
    "hash too large": (HASHES | {"local_hashes": [1, 2**64]}, "local_hashes.1", f"{2**64}"),
    "hash too negative": (
        HASHES | {"local_hashes": [-(2**63) - 1]},
        "local_hashes.0",
        "-9223372036854775809",
    ),
    "hash short": (HASHES | {"local_hashes": ["abc"]}, "local_hashes.0", "'abc'"),
    "hash not hex": (
        HASHES | {"local_hashes": ["cb38e4d7fb2dca5g"]},
        "local_hashes.0",
        "'cb38e4d7fb2dca5g'",
    ),
    "hash with sign": (
        HASHES | {"local_hashes": ["-b38e4d7fb2dca5c"]},
        "local_hashes.0",
        "'-b38e4d7fb2dca5c'",
    ),
    "hash a float": (HASHES | {"local_hashes": [1.0]}, "local_hashes.0", "1.0"),
    "hash a boolean": (HASHES | {"local_hashes": [True]}, "local_hashes.0", "True"),
    "hash a boolean with a boolean field": (
        HASHES | {"explain": False, "local_hashes": [True]},
        "local_hashes.0",
        "True",
    ),
    "multimodal items of too few blocks": (TOKENS | {"mm_hashes": []}, "mm_hashes", "0 lists"),
    "multimodal items not lists": (TOKENS | {"mm_hashes": [1]}, "mm_hashes.0", "got 1"),
    "multimodal items with hashes": (
        HASHES | {"mm_hashes": [[]]},
        "mm_hashes",
        "only allowed with token_ids",
    ),
    "LoRA with hashes": (HASHES | {"lora_name": "sql"}, "lora_name", "only allowed with token_ids"),
    "cache namespace with hashes": (
        HASHES | {"cache_namespace": "tenant-7"},
        "cache_namespace",
        "only allowed with token_ids",
    ),
    "a JSON array": ([1, 2], "body", "got [1, 2]"),
    "unknown field": (TOKENS | {"polcy": "logit"}, "polcy", "got 'logit'"),
    "unknown policy": (TOKENS | {"policy": "fastest"}, "policy", "got 'fastest'"),
    "boolean as text": (TOKENS | {"reserve": "no"}, "reserve", "got 'no'"),
    "id with a blank": (TOKENS | {"request_id": "a b"}, "request_id", "got 'a b'"),
    "id with a newline": (TOKENS | {"request_id": "ab\n"}, "request_id", r"got 'ab\n'"),
    "empty id": (TOKENS | {"request_id": ""}, "request_id", "got ''"),
    "id too long": (TOKENS | {"request_id": "x" * 300}, "request_id", "got 'xxx"),
    "id not text": (TOKENS | {"request_id": 7}, "request_id", "got 7"),
    "exclude not a list": (TOKENS | {"exclude": "w1"}, "exclude", "got 'w1'"),
}


@pytest.mark.parametrize(
    ("body", "field", "message"), BAD_BODIES.values(), ids=[n.replace(" ", "-") for n in BAD_BODIES]
)
async def test_a_bad_body_is_refused_with_its_field_and_value(client, one, body, field, message):
    await assert_refused(await client.post("/v1/route", json=body), one, field, message)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"local_hashes": LOCAL}, "num_tokens", "required"),
        ({"num_tokens": 128}, "local_hashes", "required"),
        ({"local_hashes": ["xyz"], "num_tokens": 128}, "local_hashes.0", "'xyz'"),
        ({"local_hashes": LOCAL, "num_tokens": 2**40}, "num_tokens", "1099511627776"),
        ({"local_hashes": LOCAL, "num_tokens": 7}, "local_hashes", "num_tokens 7"),
        (HASHES | {"token_ids": [1]}, "token_ids", "not permitted"),
    ],
)
async def test_find_best_worker_refuses_a_bad_body_in_the_same_way(
    client, one, body, field, message
):
    await assert_refused(await client.post("/find_best_worker", json=body), one, field, message)


@pytest.mark.parametrize(
    ("body", "shown"), [(b"", "''"), (b"token_ids=1", "token_ids=1"), (b'{"token_ids": [1,', "[1,")]
)
@pytest.mark.parametrize("path", ["/v1/route", "/find_best_worker"])
async def test_a_body_that_is_not_json_is_refused(client, one, path, body, shown):
    response = await client.post(path, content=body)
    await assert_refused(response, one, "body", "Invalid JSON")
    assert shown in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "body", "field", "message"),
    [
        ("", b"", "token_ids", "0 tokens"),
        ("", NUMBERS[:7], "token_ids", "7 bytes are not a whole number of u32"),
        ("", NUMBERS[:3], "token_ids", "3 bytes are not a whole number of u32"),
        ("reserve=perhaps", NUMBERS, "reserve", "got 'perhaps'"),
        ("policy=fastest", NUMBERS, "policy", "got 'fastest'"),
        ("request_id=a%20b", NUMBERS, "request_id", "got 'a b'"),
        ("num_tokens=4", NUMBERS, "num_tokens", "got '4'"),
    ],
)
async def test_bad_raw_tokens_and_options_are_refused(client, one, query, body, field, message):
    response = await client.post(f"/v1/route?{query}", content=body, headers=RAW)
    await assert_refused(response, one, field, message)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (TOKENS | {"request_id": "x" * 300}, f"got '{'x' * 76}..."),
        (HASHES | {"local_hashes": [10**4000]}, f"does not fit in 64 bits, got 1{'0' * 76}..."),
        (HASHES | {"num_tokens": 10**4000}, f"num_tokens: got 1{'0' * 76}... tokens"),
        (TOKENS | {"x" * 300: 1}, "x" * 77 + "..."),
    ],
)
async def test_a_long_value_or_name_is_shortened_in_the_message(body, shown, client, one):
    response = await client.post("/v1/route", json=body)
    message = response.json()["error"]["message"]
    assert shown in message
    assert len(message) < 250


OVER = "body: over 64 bytes: see --max-request-bytes"


class TestLimits:
    @pytest.fixture
    async def small(self, one_redis_server, replica):
        """Accepts prompts of up to 8 tokens, and bodies of up to 64 bytes."""
        async with replica(
            one_redis_server.url, max_prompt_tokens=8, max_request_bytes=64
        ) as client:
            yield client

    async def test_a_prompt_of_the_longest_length_allowed_is_accepted(self, small, one):
        for response in await self.routed_in_every_form(small, num_tokens=8):
            assert response.status_code == 200

    async def test_a_longer_prompt_is_refused(self, small, one):
        raw, tokens, hashes = await self.routed_in_every_form(small, num_tokens=9)
        message = "got 9 tokens; 1 to 8 are allowed"
        await assert_refused(raw, one, "token_ids", message)
        await assert_refused(tokens, one, "token_ids", message)
        await assert_refused(hashes, one, "num_tokens", message)

    async def routed_in_every_form(self, client, num_tokens):
        tokens = list(range(num_tokens))
        raw = struct.pack(f"<{num_tokens}I", *tokens)
        return [
            await client.post("/v1/route", content=raw, headers=RAW),
            await client.post("/v1/route", json={"token_ids": tokens}),
            await client.post("/v1/route", json={"local_hashes": [1, 2], "num_tokens": num_tokens}),
        ]

    @pytest.mark.parametrize("path", ["/v1/route", "/find_best_worker"])
    async def test_a_body_whose_content_length_is_too_large_is_refused_unread(
        self, small, one, path
    ):
        read = 0

        async def chunks():
            nonlocal read
            for _ in range(65):
                read += 1
                yield b" "

        response = await small.post(path, content=chunks(), headers={"content-length": "65"})
        self.assert_too_large(response)
        assert read == 0

    async def test_a_chunked_body_is_refused_once_it_is_too_large(self, small, one):
        read = 0

        async def endless():
            nonlocal read
            while True:
                read += 1
                yield b" " * 10

        response = await small.post("/v1/route", content=endless())
        self.assert_too_large(response)
        assert read <= 8

    async def test_a_body_of_the_largest_size_allowed_is_accepted(self, small, one):
        body = orjson.dumps({"token_ids": [1]}).ljust(64)
        assert (await small.post("/v1/route", content=body)).status_code == 200

    def assert_too_large(self, response):
        assert response.status_code == 413
        assert response.json() == {
            "error": {"code": "body_too_large", "message": OVER, "field": None}
        }


async def test_a_body_that_stalls_is_not_waited_for_forever(client, monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)

    async def trickle():
        yield b"{"
        await asyncio.Event().wait()

    response = await client.post("/v1/route", content=trickle())
    assert response.status_code == 408
    assert response.headers["connection"] == "close"
    assert response.json() == {
        "error": {
            "code": "body_timeout",
            "message": "body: nothing of it for 0.05 s, or under 8192 bytes a second",
            "field": None,
        }
    }


async def test_an_unknown_path_gets_an_error_in_the_common_format(client):
    response = await client.get("/v2/route")
    assert response.status_code == 404
    assert response.json() == {
        "error": {"code": "not_found", "message": "Not Found", "field": None}
    }


@pytest.mark.parametrize("path", ["/v1/workers/", "/v1/route/", "/find_best_worker/"])
async def test_no_answer_repeats_the_callers_host(client, path):
    for method in ("GET", "POST"):
        answer = await client.request(method, path, headers={"host": "evil.example"})
        assert answer.status_code == 404
        assert "evil" not in f"{answer.headers}{answer.text}"


async def test_a_wrong_method_gets_an_error_in_the_common_format(client):
    response = await client.get("/v1/route")
    assert (response.status_code, response.headers["allow"]) == (405, "OPTIONS, POST")
    assert response.json() == {
        "error": {"code": "method_not_allowed", "message": "Method Not Allowed", "field": None}
    }


@pytest.mark.parametrize("path", ["/v1/route", "/v1/workers"])
async def test_an_internal_fault_gets_an_error_in_the_common_format(client, one, monkeypatch, path):
    def fault(self, snapshot):
        raise ZeroDivisionError

    monkeypatch.setattr(Fleet, "view", fault)
    method = "POST" if path == "/v1/route" else "GET"
    response = await client.request(method, path, json=TOKENS)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"


async def test_answers_of_bare_routes_are_as_they_are_documented(client, one):
    for model, answer in (
        (answers.Routed, await client.post("/v1/route", json=TOKENS | {"explain": True})),
        (answers.BestWorker, await client.post("/find_best_worker", json=HASHES)),
        (answers.RequestState, await client.delete("/v1/requests/r1")),
        (errors.OpenAIError, await client.post("/v1/chat/completions", json={"model": "x"})),
        (errors.AnthropicError, await client.post("/v1/messages", json={"model": "x"})),
    ):
        documented = TypeAdapter[Any](model)
        found = documented.validate_json(answer.content)
        assert documented.dump_python(found, mode="json") == answer.json()


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/route", {"code", "message", "field"}),
        ("/v1/nowhere", {"code", "message", "field"}),
        ("/v1/chat/completions", {"code", "message", "type", "param"}),
        ("/tokenize", {"code", "message", "type", "param"}),
        ("/v1/models/x", {"code", "message", "type", "param"}),
        ("/v1/messages", {"type", "message"}),
        ("/v1/messages/count_tokens", {"type", "message"}),
    ],
)
async def test_every_error_is_told_in_the_dialect_of_its_path(
    one_redis_server, replica, path, dialect
):
    async with replica(one_redis_server.url, api_key="k") as client:
        unauthorized = await client.get(path)
        headers = {"authorization": "Bearer k"}
        for answer in (unauthorized, await client.delete(path, headers=headers)):
            assert set(answer.json()["error"]) == dialect
        assert unauthorized.status_code == 401
        assert unauthorized.headers["www-authenticate"] == "Bearer"
        assert answer.status_code == (404 if path == "/v1/nowhere" else 405)


@pytest.fixture(scope="module")
def document():
    return create_app(RouterSettings()).openapi()


class TestOpenApi:
    def test_it_lists_every_endpoint(self, document):
        assert document["openapi"].startswith("3.1.")
        assert {(path, *methods) for path, methods in document["paths"].items()} >= {
            ("/find_best_worker", "post"),
            ("/v1/route", "post"),
            ("/v1/requests/{request_id}/prefill_complete", "post"),
            ("/v1/requests/{request_id}", "delete"),
            ("/v1/workers", "get"),
            ("/health", "get"),
            ("/readiness", "get"),
            ("/metrics", "get"),
            *((path, "post") for path in (*PATHS, *PASSED_ON, COUNT_TOKENS)),
            ("/v1/models", "get"),
            ("/v1/models/{model}", "get"),
        }

    def test_every_reference_resolves(self, document):
        references = [ref for ref in walk(document) if ref.startswith("#/")]
        assert len(references) > 10
        for reference in references:
            target = document
            for part in reference[2:].split("/"):
                target = target[part]

    def test_every_operation_documents_its_parameters_and_a_response(self, document):
        operation_ids = set()
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation_ids.add(operation["operationId"])
                in_path = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
                assert in_path == set(re.findall("{(.*?)}", path))
                assert operation["responses"]["200"]["description"]
        assert len(operation_ids) == sum(map(len, document["paths"].values()))

    def test_route_takes_json_or_raw_tokens(self, document):
        operation = document["paths"]["/v1/route"]["post"]
        content = operation["requestBody"]["content"]
        assert set(content) == {"application/json", "application/octet-stream"}
        fields = {
            "token_ids",
            "local_hashes",
            "num_tokens",
            "mm_hashes",
            "request_id",
            "retry",
            "lora_name",
            "session_id",
            "tenant",
            "priority",
            "cache_namespace",
            "policy",
            "exclude",
            "reserve",
            "explain",
        }
        assert set(content["application/json"]["schema"]["properties"]) == fields
        assert content["application/octet-stream"]["schema"]["format"] == "binary"
        query = {p["name"] for p in operation["parameters"] if p["in"] == "query"}
        assert query == fields - {"token_ids", "local_hashes", "num_tokens", "mm_hashes"}
        body = document["paths"]["/find_best_worker"]["post"]["requestBody"]["content"]
        schema = body["application/json"]["schema"]
        assert schema["required"] == ["local_hashes", "num_tokens"]

    def test_a_hash_may_be_a_number_or_text(self, document):
        body = document["paths"]["/find_best_worker"]["post"]["requestBody"]["content"]
        items = body["application/json"]["schema"]["properties"]["local_hashes"]["items"]
        assert "type" not in items
        assert [kind["type"] for kind in items["anyOf"]] == ["integer", "string"]

    def test_errors_are_documented_in_the_common_format(self, document):
        error = {"$ref": "#/components/schemas/ErrorBody"}
        of_decisions = {"401", "408", "413", "422", "429", "503"}
        of_requests = {"401", "422", "503"}
        for path, method, statuses in (
            ("/v1/route", "post", of_decisions | {"409"}),
            ("/find_best_worker", "post", of_decisions),
            ("/v1/requests/{request_id}", "delete", of_requests),
            ("/v1/requests/{request_id}/prefill_complete", "post", of_requests),
            ("/v1/workers", "get", {"401", "503"}),
        ):
            responses = document["paths"][path][method]["responses"]
            assert set(responses) == {"200"} | statuses
            for status in statuses:
                assert responses[status]["content"]["application/json"]["schema"] == error


def walk(node):
    """Every $ref in a document."""
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in walk(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in walk(value)]
    return []
