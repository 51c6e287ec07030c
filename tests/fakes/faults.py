"""Faults of an engine and its answers, as data."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson

HANG_S = 86_400.0
MB = 2**20
MOST_BYTES = 256 * MB
"""Tokens that an answer without an end sends; the door says how many it takes."""

How = Literal[
    "well",
    "error first",
    "error before tokens",
    "error within",
    "empty",
    "unfinished",
    "reset first",
    "reset within",
    "silent",
    "hang",
    "stall",
]
BREAKS = ("reset within", "error within", "unfinished")


@dataclass(frozen=True, slots=True)
class Faults:
    """health_s, metrics_s, tokenize_s: how late these answer; HANG_S: never. *_status: what they
    answer; 0: the connection is reset.

    more_running, more_waiting: of what /metrics shows, those that are not its own. kv_usage: what
    it shows, 0-1; None: its own. lists_models: whether /v1/models has any. max_model_len:
    instead of its own.

    how: an answer goes. status, headers, body: of answers, which come at once unless the status is
    200 and there is no body; a body of None is the dialect's. error_event: instead of the
    dialect's. raw: which of RAW is sent instead of an answer, before the connection is closed.
    prefill_s, token_s: instead of its own; None: its own. whole_s: that answers which are not
    streamed take longer. only: text in the bodies that these faults are for, such as a model's
    name; "": all. times: for so many; 0: all. away_s: so long, from now on, it accepts nothing, and
    all connections are reset.
    """

    health_s: float = 0.0
    health_status: int = 200
    metrics_s: float = 0.0
    metrics_status: int = 200
    tokenize_s: float = 0.0
    tokenize_status: int = 200
    models_status: int = 200
    lists_models: bool = True
    max_model_len: int | None = None
    more_running: int = 0
    more_waiting: int = 0
    kv_usage: float | None = None
    how: How = "well"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | bytes | None = None
    error_event: str = ""
    raw: str = ""
    prefill_s: float | None = None
    token_s: float | None = None
    whole_s: float = 0.0
    only: str = ""
    times: int = 0
    away_s: float = 0.0


WELL = Faults()
JSON, PAGE, EVENTS = (
    {"content-type": kind} for kind in ("application/json", "text/html", "text/event-stream")
)
SIGN_IN = "<!doctype html><title>Sign in</title>"
FOREIGN = {
    "a page": Faults(headers=PAGE, body=SIGN_IN),
    "a page as JSON": Faults(headers=JSON, body=SIGN_IN),
    "a page as events": Faults(headers=EVENTS, body=SIGN_IN),
    "a page as text": Faults(headers={"content-type": "text/plain"}, body=SIGN_IN),
    "elsewhere": Faults(status=302, headers=PAGE | {"location": "/login"}, body=SIGN_IN),
    "elsewhere for good": Faults(
        status=308, headers=JSON | {"location": "https://127.0.0.1/"}, body=""
    ),
    "as before": Faults(status=304, body=""),
    "no content": Faults(status=204, body=""),
    "accepted": Faults(status=202, body='{"id":"later"}'),
    "other JSON": Faults(body='{"status":"ok"}'),
    "a word of JSON": Faults(body='"ok"'),
    "half": Faults(body='{"id":"x","data":[{"index":0}],"choices":[{"text":""}'),
    "zipped": Faults(headers=JSON | {"content-encoding": "gzip"}, body=gzip.compress(b"{}")),
    "an end alone": Faults(headers=EVENTS, body="data: [DONE]\n\n"),
    "half an event": Faults(headers=EVENTS, body='data: {"choices":[{"del'),
}
"""Answers that are none of any API, and come at once."""


def _whole(usage, text="hello"):
    """An answer in one body."""
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    body = orjson.dumps({"id": "x", "object": "text_completion", "choices": [choice]})
    body = body[:-1] + b',"usage":' + (usage if isinstance(usage, bytes) else orjson.dumps(usage))
    length = b"content-length: %d" % (len(body) + 1)
    return _head(b"content-type: application/json", length) + body + b"}"


def _head(*lines, status=b"200"):
    return b"\r\n".join((b"HTTP/1.1 %b X" % status, *lines, b"", b""))


def _chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(*data):
    text = b"".join(b"data: %b\n\n" % one for one in (*data, b"[DONE]"))
    return _STREAM + _chunk(text) + b"0\r\n\r\n"


def _for_ever(begin, again):
    def parts():
        yield begin
        for _ in range(MOST_BYTES // len(again)):
            yield again

    return parts


_CHUNKED = _head(b"transfer-encoding: chunked")
_STREAM = _head(b"content-type: text/event-stream", b"transfer-encoding: chunked")
_COUNTS = {"prompt_tokens": 3, "completion_tokens": 1}
_DEEP = b"[" * 1000 + b"]" * 1000
_KB64 = b"x" * 65536

RAW = {
    "usage negative": _whole({"prompt_tokens": -3, "completion_tokens": -1}),
    "usage text": _whole({"prompt_tokens": "3", "completion_tokens": "1"}),
    "usage huge": _whole({"prompt_tokens": 3, "completion_tokens": 10**18}),
    "usage huge cached": _whole(_COUNTS | {"cache_read_input_tokens": 10**18}),
    "usage text cached": _whole(
        _COUNTS | {"cache_read_input_tokens": 1, "cache_creation_input_tokens": "1"}
    ),
    "usage beyond integers": _whole(b'{"prompt_tokens":3,"completion_tokens":1e999}'),
    "usage array": _whole([1, 2]),
    "usage deep": _whole(b'{"prompt_tokens":%b}' % _DEEP),
    "usage nested": _whole({"prompt_tokens": {"prompt_tokens": 3}}),
    "events of no objects": _events(b"5", b"null", b"{", b'{"choices":5}', b'{"choices":[[]]}'),
    "events deep": _events(b'{"choices":%b,"usage":%b}' % (_DEEP, _DEEP)),
    "events with false ids": _events(
        b'{"choices":[{"text":"a","token_ids":[99999999999999999999]}]}',
        b'{"choices":[{"text":"a","token_ids":[1,,2 3]}],"usage":"none"}',
    ),
    "event without end": _for_ever(_STREAM + _chunk(b"data: "), _chunk(_KB64)),
    "lines without end": _for_ever(_STREAM, _chunk(b": x\n" * 16384)),
    "status 600": _head(b"content-length: 0", status=b"600"),
    "status 099": _head(b"content-length: 0", status=b"099"),
    "status 000": _head(b"content-length: 0", status=b"000"),
    "status 101": _head(b"upgrade: x", b"connection: upgrade", status=b"101"),
    "status 204 with a body": _head(b"content-length: 5", status=b"204") + b"hello",
    "trailers without end": _for_ever(
        _CHUNKED + _chunk(b"hello") + b"0\r\n", b"x-late: %b\r\n" % (b"y" * 1000)
    ),
    "extensions without end": _for_ever(_CHUNKED + b"5;", b"e" * 65536),
    "head without end": _for_ever(_head()[:-2], b"x: %b\r\n" % (b"y" * 1000)),
    "continues without end": _for_ever(b"", _head(status=b"100")),
    "body without end": _for_ever(_CHUNKED, _chunk(_KB64)),
    "two lengths": _head(b"content-length: 5", b"content-length: 6") + b"hello!",
    "length and chunks": _head(b"content-length: 5", b"transfer-encoding: chunked") + b"hello",
    "shorter than it says": _head(b"content-length: 50") + b"hello",
    "longer than it says": _whole(_COUNTS) + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "header of another answer": _head(b"x: a\r\rcontent-length: 5", b"content-length: 0"),
    "nothing": b"",
}
"""Bytes in place of an answer, before the connection is closed."""
ENDLESS = tuple(name for name, answer in RAW.items() if not isinstance(answer, bytes))
