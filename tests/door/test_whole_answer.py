"""What is an answer of its API, and what only comes instead of one."""

import orjson
import pytest

from app.door import blame
from app.door.blame import MAX_PARSED_BYTES

JSON = "application/json"
CHAT, EMBEDDINGS, RERANK = "/v1/chat/completions", "/v1/embeddings", "/rerank"


def failure_in(body, kind=JSON, path=RERANK, status=200, *, is_all=True):
    headers = [(b"content-type", kind.encode())] if kind else []
    return blame.failure_of(status, headers, body, model="m", path=path, is_all=is_all)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "died", "type": "InternalServerError", "code": 500}},
        {"object": "error", "message": "died", "code": 500},
        {"type": "error", "error": {"type": "api_error", "message": "died"}},
        {"id": "x", "object": "response", "status": "failed", "error": {"code": "server_error"}},
        {"error": "died"},
    ],
)
def test_an_error_in_a_200_is_a_failure(body):
    for text in (orjson.dumps(body), orjson.dumps(body, option=orjson.OPT_INDENT_2)):
        failure = failure_in(text)
        assert failure is not None
        assert failure.cause == blame.ERROR_EVENT


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": {"content": 'say "error": {} and "failed"'}}]},
        {"choices": [{"logprobs": {"tokens": ["error", "failed"]}}]},
        {"object": "response", "status": "completed", "error": None},
        {"error": {"message": "too long", "type": "BadRequestError", "code": 400}},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
        {"object": "response", "status": "failed", "error": {"code": "invalid_prompt"}},
    ],
)
def test_what_is_no_failure_in_a_200(body):
    assert failure_in(orjson.dumps(body)) is None


CHOICE = b'{"choices":[{"message":{"content":"hi"}}]}'
CUTS = [b'{"choices":[{"text":"hel', b'{"error":{"a":{}}', b'{"a":[1,2}', b'{"choices":[1]}}']
FOREIGN = [b"<html>", b" ", b'"ok"', b"null", b"OK", b'data: {"choices":[]}\n\n', b"\x1f\x8b\x08"]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"", "empty"),
        *((body, "cut") for body in CUTS),
        *((body, "foreign") for body in FOREIGN),
        (b"{" + b" " * MAX_PARSED_BYTES, "cut"),
    ],
)
@pytest.mark.parametrize(
    "kind", [JSON, "application/problem+json; charset=utf-8", "text/plain", ""]
)
def test_an_answer_that_is_none(body, cause, kind):
    for path in (CHAT, EMBEDDINGS, RERANK):
        failure = failure_in(body, kind, path)
        assert failure is not None
        assert failure.cause == cause


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"status":"ok"}'),
        (CHAT, b"[]"),
        ("/v1/messages", CHOICE),
        ("/v1/responses", CHOICE),
        ("/v1/completions", b'{"detail":"' + b"x" * MAX_PARSED_BYTES + b'"}'),
    ],
)
def test_what_has_nothing_of_an_answer_is_none(path, body):
    failure = failure_in(body, path=path)
    assert failure is not None
    assert failure.cause == "foreign"


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (CHAT, "text/plain", CHOICE),
        (CHAT, "", b" \n" + CHOICE + b"\n"),
        (CHAT, JSON, CHOICE[:-1] + b',"logprob":-Infinity,"half":"\\ud83d"}'),
        (CHAT, JSON, b'{"choices":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        (EMBEDDINGS, "application/octet-stream", b"\x00\x01"),
        (EMBEDDINGS, JSON, b'{"data":[{"embedding":[NaN]}]}'),
        (RERANK, JSON, b'[{"index":0}]'),
        ("/tokenize", JSON, b'{"tokens":[]}'),
    ],
)
def test_what_engines_answer_counts(path, kind, body):
    assert failure_in(body, kind, path) is None


def test_a_long_answer_is_judged_by_how_it_begins():
    assert failure_in(CHOICE[:20], path=CHAT, is_all=False) is None
    assert failure_in(b"<html>", path=CHAT, is_all=False) is not None


@pytest.mark.parametrize("status", [201, 202, 204, 206, 300, 301, 302, 304, 307, 308])
def test_a_status_that_is_of_no_answer_and_no_error(status):
    failure = failure_in(CHOICE, path=CHAT, status=status)
    assert failure is not None
    assert (failure.cause, failure.in_a_row) == (f"status_{status}", 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (CHOICE, 200),
        (b'{"choices":[{"text":"\\"error\\" failed"}],"error":null}', 200),
        (b'{"error":{"message":"too long","type":"BadRequestError","code":422}}', 422),
        (b'{"type":"error","error":{"type":"invalid_request_error"}}', 400),
        (b'{"error":{"code":"4040"}}', 400),
    ],
)
def test_the_status_that_an_error_should_have_had(body, status):
    assert blame.status_of(body) == status
