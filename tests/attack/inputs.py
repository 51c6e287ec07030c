"""Hostile inputs: what an attacker may send to a balancer, a router or a worker, as bytes for a raw
connection.

Each input follows from a seed and its number alone, so that a failure can be sent again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal
from urllib.parse import quote

from app.door.forwarding import ONLY_ROUTERS
from tests.attack.bodies import COMPLETION, door_schemas, drawn, valid_body
from tests.attack.costly import costly
from tests.attack.hostile_bodies import hostile_bodies

JSON_TYPE = b"content-type: application/json\r\n"
RAW_TYPE = b"content-type: application/octet-stream\r\n"
CLOSE = b"connection: close\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"

Ending = Literal["read", "wait", "hang up", "reset", "half-close"]
"""The client's conduct once all is sent: reads what must be answered at once; waits for an answer,
or for the server to give up on the rest; closes; resets the connection; ends its sending, and reads
as well."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """The parts that one connection sends. statuses: allowed ones of the answer; none: any
    below 500."""

    parts: tuple[bytes, ...]
    ending: Ending = "read"
    kind: str = ""
    statuses: Collection[int] = ()

    @property
    def may_exclude_all(self):
        """Whether it may ask for a worker that does not exist."""
        return any(b"exclude" in part for part in self.parts)


@dataclass(frozen=True, slots=True)
class Surface:
    """A server under attack. bodies: path -> what hypothesis would post there. model: of the front
    door; "": it is another part. is_worker: routers may say there what clients may not."""

    get: Sequence[str]
    bodies: Mapping[str, Sequence[bytes]]
    ids: str = "/v1/requests/{}"
    model: str = ""
    is_worker: bool = False

    @property
    def upload_path(self):
        return min(path for path in self.bodies if not path.startswith("/console/"))

    @classmethod
    def of_router(cls, openapi, count, seed):
        paths = openapi["paths"]
        posts = {path: spec["post"] for path, spec in paths.items() if "post" in spec}
        bodies = {
            path: post["requestBody"]["content"]["application/json"]["schema"]
            for path, post in posts.items()
            if "requestBody" in post
        }
        return cls(
            [path for path, spec in paths.items() if "get" in spec],
            {path: drawn(schema, count, seed) for path, schema in bodies.items()},
        )

    @classmethod
    def of_door(cls, model, count, seed, *, is_worker=False):
        bodies = {path: drawn(schema, count, seed) for path, schema in door_schemas(model).items()}
        get = ["/v1/models", f"/v1/models/{model}"]
        return cls(get, bodies, "/v1/models/{}", model, is_worker)

    @classmethod
    def of_worker(cls, count, seed):
        return cls(["/health", "/metrics"], {"/v1/completions": drawn(COMPLETION, count, seed)})


def request(method, path, body=b"", headers=JSON_TYPE + CLOSE):
    """A whole request; the method, path and headers are sent as they are."""
    target = path if isinstance(path, bytes) else path.encode()
    if body or method == "POST":
        headers += b"content-length: %d\r\n" % len(body)
    head = b"%b %b HTTP/1.1\r\nhost: kvroute\r\n%b\r\n"
    return head % (method.encode(), target, headers) + body


def _path(rng, surface):
    return rng.choice(sorted(surface.bodies))


def _good(rng, surface, headers=JSON_TYPE + CLOSE):
    if rng.random() < 0.3:
        return request("GET", rng.choice(surface.get), headers=headers)
    path = _path(rng, surface)
    return request("POST", path, valid_body(rng, path, surface.model), headers)


def valid(rng, surface):
    return Hostile((_good(rng, surface),))


def drawn_from_the_schema(rng, surface):
    path = _path(rng, surface)
    return Hostile((request("POST", path, rng.choice(surface.bodies[path])),))


@cache
def _malformed(size):
    return [body for _, body in hostile_bodies(size)]


def malformed_json(rng, surface):
    path = _path(rng, surface)
    body = rng.choice(_malformed(rng.choice((400, 6_000, 100_000))))
    if path == "/v1/completions":
        body = body.replace(b'"token_ids"', b'"prompt"')
    return Hostile((request("POST", path, body),))


def damaged_json(rng, surface):
    path = _path(rng, surface)
    body = bytearray(
        rng.choice((valid_body(rng, path, surface.model), rng.choice(surface.bodies[path])))
    )
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        body[at : at + rng.randint(0, 2)] = rng.choice(
            (b"", b"\0", b'"', b"[", b"}", b"\xff", b"\\u", b"1e999", b"NaN", rng.randbytes(3))
        )
    return Hostile((request("POST", path, bytes(body)),))


def odd_encoding(rng, surface):
    path = _path(rng, surface)
    body = valid_body(rng, path, surface.model)
    text = body.decode()
    body = rng.choice(
        (
            b"\xef\xbb\xbf" + body,
            text.encode("utf-16"),
            text.encode("utf-32-le"),
            body.replace(b'"', b"'"),
            body.replace(b"{", b'{"\xc0\xaf":1,', 1),
            body.replace(b"{", b'{"\xed\xa0\x80":"\xf4\x90\x80\x80",', 1),
            body.replace(b"0", "\u0660".encode()),
            body + body,
            body + b"\0",
            json.dumps(text).encode(),
            b"null",
            b"",
        )
    )
    types = (
        b"",
        b"application/json; charset=utf-16",
        b"text/plain",
        b"\xff",
        b"multipart/form-data",
    )
    kind = b"content-type: %b\r\n" % rng.choice(types)
    coding = rng.choice((b"", b"content-encoding: gzip\r\n", b"content-encoding: br, br\r\n"))
    return Hostile((request("POST", path, body, kind + coding + CLOSE),))


def raw_tokens(rng, surface):
    names = ("request_id", "policy", "exclude", "reserve", "max_tokens", "stream", "prompt", "x")
    values = ("", "%", "%00", "%ff%fe", "true", "-1", "1e999", "%0a", "[]", "a" * 3000, "3", "\x7f")
    query = "&".join(f"{rng.choice(names)}={rng.choice(values)}" for _ in range(rng.randint(0, 5)))
    body = rng.randbytes(rng.choice((0, 1, 4, 63, 64, 4_000, 65_537)))
    return Hostile((request("POST", f"{_path(rng, surface)}?{query}", body, RAW_TYPE + CLOSE),))


def flood_of_headers(rng, surface):
    count = rng.choice((90, 1_000, 3_000))
    floods = (
        b"".join(b"x-%d: %b\r\n" % (n, b"v" * rng.choice((0, 90))) for n in range(count)),
        b"x: " + b"v" * rng.choice((60_000, 70_000, 300_000)) + b"\r\n",
        b"n" * 70_000 + b": v\r\n",
        b"cookie: a=b\r\n" * count,
        b"x: " + b"\r\n folded" * count + b"\r\n",
    )
    return Hostile((_good(rng, surface, rng.choice(floods) + JSON_TYPE + CLOSE),))


def bad_headers(rng, surface):
    lines = (
        b"no colon\r\n",
        b": no name\r\n",
        b"x y: z\r\n",
        b"x: \0\r\n",
        b"x: \xff\xfe\r\n",
        b"x: a\rb\r\n",
        b" leading: space\r\n",
        b"host: another\r\n",
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"content-length: 0x10\r\n",
        b"content-length: 1, 1\r\n",
        "content-length: \u0661\r\n".encode(),
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"transfer-encoding: \x0bchunked\r\n",
        b"expect: 100-continue\r\n",
        b"expect: miracles\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n",
        b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AA\r\n",
        b"x-request-id: \xff\r\n",
        b"x-request-id: " + b"i" * 129 + b"\r\n",
        b"x-session-id: a b\r\nx-tenant-id: \xe9\r\n",
        b"x-forwarded-for: 1.2.3.4, %s\r\nforwarded: for=_\r\n",
        b"range: bytes=0-18446744073709551615\r\n",
        b"te: trailers\r\ntrailer: content-length\r\n",
        b"accept-encoding: gzip;q=1.0, *;q=nan\r\n",
        b"origin: null\r\naccess-control-request-method: X\r\n",
    )
    path = _path(rng, surface)
    chosen = b"".join(rng.sample(lines, rng.randint(1, 2)))
    return Hostile(
        (request("POST", path, valid_body(rng, path, surface.model), JSON_TYPE + CLOSE + chosen),),
        "wait",
    )


def long_url(rng, surface):
    size = rng.choice((8_000, 31_000, 33_000, 120_000, 400_000))
    filler = rng.choice(("a", "/", "%2f", "%", "../", "a&", "&a=1"))
    text = (filler * size)[:size]
    path = rng.choice((f"/{text}", f"/v1/requests/{text}", f"/v1/workers?{text}"))
    return Hostile((request(rng.choice(("GET", "POST", "DELETE")), path),))


def bad_chunks(rng, surface):
    path = _path(rng, surface)
    body = valid_body(rng, path, surface.model)
    size = b"%x\r\n" % len(body)
    whole = size + body + b"\r\n"
    framings = (
        b"zz\r\n" + body + b"\r\n0\r\n\r\n",
        b"-1\r\n\r\n",
        b"f" * 16 + b"\r\n" + body,
        b"f" * 17 + b"\r\n" + body,
        b"0" * 5000 + whole + b"0\r\n\r\n",
        size + body + b"0\r\n\r\n",
        size.replace(b"\r", b"") + body + b"\n0\n\n",
        b"%x;%b\r\n" % (len(body), b"e" * 100_000) + body + b"\r\n0\r\n\r\n",
        b"".join(b"1;x=%d\r\n%c\r\n" % (n, byte) for n, byte in enumerate(body)) + b"0\r\n\r\n",
        whole + b"0\r\n" + b"t: %b\r\n" % (b"v" * 100) * 3000 + b"\r\n",
        whole + b"0\r\nno colon\r\n\r\n",
        whole + b"0\r\ncontent-length: 1\r\ntransfer-encoding: x\r\n\r\n",
        whole + b"00000\r\n\r\n",
    )
    length = rng.choice((b"", b"", b"content-length: 3\r\n"))
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n" % path.encode() + JSON_TYPE + CLOSE + length + CHUNKED
    return Hostile((head + b"\r\n", rng.choice(framings)), "wait")


def _cut(rng, surface):
    whole = _good(rng, surface)
    ends = rng.choice((rng.randrange(len(whole)), whole.index(b"\r\n\r\n") + rng.randint(0, 4)))
    begun = whole[:ends]
    middle = rng.randrange(len(begun) + 1)
    return begun[:middle], begun[middle:]


def half_request(rng, surface):
    ending = rng.choice(("hang up", "reset"))
    return Hostile(_cut(rng, surface), ending)


def stalled_request(rng, surface):
    return Hostile(_cut(rng, surface), "wait")


def early_hang_up(rng, surface):
    ending = rng.choice(("hang up", "reset"))
    return Hostile((_good(rng, surface),), ending)


def pipelined(rng, surface):
    requests = [_good(rng, surface, JSON_TYPE) for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.3:
        requests.insert(rng.randrange(len(requests)), b"nonsense\r\n\r\n")
    ending = rng.choice(("read", "read", "reset"))
    return Hostile((b"".join(requests) + _good(rng, surface),), ending)


def wrong_method_or_path(rng, surface):
    known = rng.choice((*surface.get, *surface.bodies))
    methods = (
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "get",
    )
    method = rng.choice((*methods, "BREW", "G\0T", "A" * 9000, ""))
    path = rng.choice(
        (
            known,
            f"{known}/",
            f"/{known}",
            f"{known}%00",
            f"{known};a=b",
            f"{known}?{'a=b&' * 50}",
            known.upper(),
            quote(known, safe="").replace("%2F", "/%2e/"),
            f"/../..{known}",
            f"http://elsewhere{known}",
            "*",
            "kvroute:80",
            "/docs",
            "/redoc",
            "/openapi.json/..",
            "/\u00e9\udc80".encode(errors="surrogateescape"),
            "",
        )
    )
    return Hostile((request(method, path),), "wait")


def bad_id(rng, surface):
    ids = ("", "%0a", "id%0a", "%00", "%", "%zz", "a b", "a%20b", "..", "%2e%2e%2f", "a/b", "a%2Fb")
    more = (
        "i" * 129,
        "%f0%9f%92%a9",
        "%ff",
        "\u00e9",
        "a?worker_failed=maybe",
        "a#b",
        "{}",
        "\\",
        "*",
    )
    path = surface.ids.format(rng.choice(ids + more))
    method, ending = rng.choice((("DELETE", ""), ("POST", "/prefill_complete")))
    return Hostile((request(method, path + ending),))


def not_http(rng, _):
    texts = (
        b"",
        b"\r\n" * 50_000,
        b"\0" * 100,
        b"PRI * HTTP/1.1\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508),
        b"*1\r\n$8\r\nFLUSHALL\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        rng.randbytes(rng.randint(1, 5_000)),
        b"nonsense\r\n\r\n",
    )
    return Hostile((rng.choice(texts),), rng.choice(("hang up", "reset", "wait")))


KINDS = {
    valid: 10,
    drawn_from_the_schema: 20,
    malformed_json: 10,
    damaged_json: 10,
    odd_encoding: 5,
    raw_tokens: 5,
    flood_of_headers: 4,
    bad_headers: 6,
    long_url: 4,
    bad_chunks: 6,
    half_request: 5,
    stalled_request: 1,
    early_hang_up: 5,
    pipelined: 2,
    wrong_method_or_path: 5,
    bad_id: 5,
    not_http: 3,
}
"""How often each kind comes, against the others."""


def hostile(seed, number, surface):
    """The input of that number."""
    rng = random.Random(f"{seed} {number}")
    [make] = rng.choices(list(KINDS), list(KINDS.values()))
    return replace(make(rng, surface), kind=make.__name__)


NO_KEY = "no key"
"""Kind of an input that is sent as it is also where a key is asked for."""
_MANY = 100_000
_REFUSED = (400, 422)


def named(surface, key):
    """Inputs that have hurt a front door, or could: all of them are sent each time."""
    model = surface.model
    chat, old = "/v1/chat/completions", "/v1/completions"
    messages = [{"role": "user", "content": "x"}]
    fields = {"model": model, "messages": messages, "max_tokens": 1}
    text = json.dumps(fields).encode()

    def deep(name):
        nested = b"[" * 900 + b"]" * 900
        return json.dumps(fields | {name: "*"}).encode().replace(b'"*"', nested)

    bodies = {
        "messages of lists": (chat, fields | {"messages": [[]] * _MANY}),
        "messages of nothing": (chat, fields | {"messages": [{}] * _MANY}),
        "tools": (chat, fields | {"tools": [{}] * _MANY}),
        "many members": (chat, fields | {f"a{n}": 0 for n in range(_MANY)}),
        "prompts": (old, {"model": model, "prompt": [[0, 0]] * _MANY, "max_tokens": 1}),
        "texts": (old, {"model": model, "prompt": [""] * _MANY, "max_tokens": 1}),
        "long text": (old, {"model": model, "prompt": "a" * 10 * _MANY, "max_tokens": 1}),
    }
    for name, (path, body) in bodies.items():
        yield Hostile((request("POST", path, json.dumps(body).encode()),), kind=name)
    for name in (
        "model",
        "messages",
        "tools",
        "stream_options",
        "n",
        "user",
        "chat_template_kwargs",
    ):
        yield Hostile((request("POST", chat, deep(name)),), kind=f"deep {name}")
    for name, path, body in costly(model):
        yield Hostile((request("POST", path, body),), kind=name)
    yield from _whole(chat, text)
    yield from _unprintable(chat, fields)
    if not surface.is_worker:
        yield from _of_routers(chat, fields)
        yield from _of_other_pages()
    twice = text[:-1] + b',"model":"other"}'
    yield Hostile((request("POST", chat, twice),), kind="model twice", statuses=_REFUSED)
    upload = request("POST", chat, b" " * 16_000_000)
    yield Hostile((upload[:1_000_000],), "wait", kind="unfinished upload")
    for word in ("a", "word ", "\u6f22"):
        body = {"model": model, "prompt": word * (3_000_000 // len(word.encode()))}
        sent = request("POST", old, json.dumps(body, ensure_ascii=False).encode())
        yield Hostile((sent,), "wait", kind="text of megabytes")
    if not key:
        return
    for path in _SPELLED:
        sent = request("GET", path, headers=CLOSE)
        yield Hostile((sent,), kind=NO_KEY, statuses=(400, 401, 404))
    for given in (b"", b"Bearer", b"Bearer " + key[:-1].encode(), b"Basic " + key.encode()):
        line = b"authorization: %b\r\n" % given if given else b""
        for sent in (
            request("POST", chat, text, JSON_TYPE + CLOSE + line),
            request("GET", "/v1/models", headers=CLOSE + line),
            request("GET", "/metrics", headers=CLOSE + line),
            request("GET", "/health/../v1/models", headers=CLOSE + line),
        ):
            yield Hostile((sent,), kind=NO_KEY, statuses=(400, 401, 404))


def _whole(path, text):
    """Valid requests, sent in ways that few clients have."""
    sent = request("POST", path, text)
    # HAProxy answers 400 itself.
    yield Hostile((sent,), "half-close", kind="half-close", statuses=(*_ANSWERED, 400))
    for wish in (b"h2c", b"websocket", b"TLS/1.2, h2c"):
        upgrade = b"connection: upgrade, http2-settings\r\nhttp2-settings: AA\r\nupgrade: " + wish
        headers = JSON_TYPE + upgrade + b"\r\n"
        yield Hostile((request("POST", path, text, headers),), "half-close", kind="upgrade")
    for line in _OBEYED:
        sent = request("POST", path, text, JSON_TYPE + CLOSE + line)
        yield Hostile((sent,), kind="a header that engines obey", statuses=_ANSWERED)
    sent = request("POST", path, text, JSON_TYPE + CLOSE + b"content-encoding: br\r\n")
    yield Hostile((sent,), kind="a body that is not br", statuses=(400, 422))


def _of_routers(path, fields):
    for name in ONLY_ROUTERS:
        for each in (path, "/tokenize"):
            sent = request("POST", each, json.dumps(fields | {name: {"a": 1}}).encode())
            yield Hostile((sent,), kind=f"a router's {name}", statuses=_REFUSED)
    for name, value in _HIDDEN:
        sent = request("POST", path, json.dumps(fields | {name: value}).encode())
        yield Hostile((sent,), kind=f"hidden in {name}", statuses=_REFUSED)


def _unprintable(path, fields):
    """Characters that change terminals, in all that answers and logs repeat."""
    text = "\x1b[2J\x9b2J\u202e\u2066\u2028\ud800 "
    for name in ("model", "user", "tool_choice", "stop", "n", text):
        sent = request("POST", path, json.dumps({**fields, name: text}).encode())
        yield Hostile((sent,), kind="unprintable")
    raw = text.encode(errors="replace").replace(b"\x1b", b"")
    for name in (b"x-request-id", b"user-agent", b"x-tenant-id", b"x-session-id", b"x-priority"):
        line = name + b": " + raw + b"\r\n"
        sent = request("POST", path, json.dumps(fields).encode(), JSON_TYPE + CLOSE + line)
        yield Hostile((sent,), kind="unprintable")
    for spelled in (quote(raw), "%1b%5b2J%9b", "%c2%9b%e2%80%ae"):
        for each in ("/v1/models/", "/v1/", "/console/", "/v1/requests/"):
            yield Hostile((request("GET", each + spelled, headers=CLOSE),), kind="unprintable")


def _of_other_pages():
    elsewhere = b"origin: https://elsewhere.example\r\n"
    ways = (
        elsewhere + b"x-kvroute-console: 1\r\n",
        b"sec-fetch-site: cross-site\r\nx-kvroute-console: 1\r\n",
        b"origin: null\r\nx-kvroute-console: 1\r\n",
        b"",
    )
    for way in ways:
        body = b'{"worker":"nobody"}'
        sent = request("POST", "/console/api/drain", body, JSON_TYPE + CLOSE + way)
        yield Hostile((sent,), kind="drain of another page", statuses=(401, 403))
        if way:
            sent = request("GET", "/console/api/overview", headers=CLOSE + way)
            yield Hostile((sent,), kind="console of another page", statuses=(401, 403))


_SPELLED = (
    *("/consol%65/api/overview", "/%63onsole/api/workers", "//console/api/overview"),
    *("/console/../v1/models", "/console/%2e%2e/v1/models", "/console//api/overview"),
    *("/health/../metrics", "/v1/%6dodels", "/%76%31/models", "/metric%73", "/console/api/"),
)
"""Paths that need a key, however they are spelled."""
_ANSWERED = (200, 429, 503)
_OBEYED = (
    b"x-vllm-priority: -9\r\n",
    b"x-vllm-priority: none\r\n",
    b"x-data-parallel-rank: 99\r\n",
    b"x-smg-target-worker: 0\r\n",
)
"""An engine that got one of these would refuse the request, or go wrong."""
_HIDDEN = (
    ("chat_template_kwargs", {"chat_template": "x"}),
    ("chat_template_kwargs", {"tokenize": True}),
    ("vllm_xargs", {"kv_transfer_params": "x"}),
    ("custom_params", {"priority": 1}),
)
