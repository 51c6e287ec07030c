"""docs/front-door.md: HTTP as clients and balancers speak it. Each row is tried on every path, from
raw sockets."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import brotli
import httpx
import orjson
import pytest
import zstandard
from aiohttp import web

from app.door.answer_request import COUNT_TOKENS, PASSED_ON, PATHS
from tests.door.conftest import registered, replica, until_serving

PAGE = (Path(__file__).parents[2] / "docs/front-door.md").read_text()
ROWS = {
    line.split("|")[1].strip()
    for line in PAGE.partition("## HTTP")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| request")
}
TURN = {"role": "user", "content": "hi there"}
POSTED = {
    **{path: {"input": "hi there", "query": "q", "documents": ["hi there"]} for path in PATHS},
    **{path: {"input": "hi there"} for path in PASSED_ON},
    **{path: {"text_1": "a", "text_2": "hi there"} for path in ("/v1/score", "/score")},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "hi there"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 4},
    COUNT_TOKENS: {"messages": [TURN], "max_tokens": 4},
}
OWN = {"/v1/route": {"token_ids": [1, 2, 3]}}
GOTTEN = ("/", "/health", "/readiness", "/metrics", "/docs", "/v1/models", "/v1/models/m")
GOTTEN += ("/openapi.json", "/v1/workers")
WHOLE = {"choices": [{"text": "x", "message": {"content": "x"}, "finish_reason": "stop"}]}
WHOLE |= {"content": [], "output": [], "input_tokens": 3, "type": "message", "stop_reason": "x"}


@dataclass
class Front:
    """A replica with a limit of 64 KB, and what its engine got."""

    address: tuple[str, int]
    client: httpx.AsyncClient
    heard: deque[tuple[str, str, bytes]] = field(default_factory=deque)

    async def raw(self, data):
        """Status, headers and body of what is answered until the connection ends."""
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*self.address)
            writer.write(data)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        return int(lines[0].split()[1]), headers, body

    async def post(self, path, body, *more, version="1.1", method="POST"):
        lines = [f"{method} {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "Connection: close", *more, "", ""])
        return await self.raw(head.encode() + body)


@pytest.fixture
async def front(redis, one_redis_server):
    heard = deque[tuple[str, str, bytes]](maxlen=100)

    async def answer(request):
        body = await request.read()
        heard.append((request.path, request.headers["content-type"], body))
        if b'"stream":true' not in body:
            return web.json_response(WHOLE)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for reason in (b"null", b'"stop"'):
            event = orjson.dumps(WHOLE).replace(b'"stop"', reason)
            await stream.write(b"data: " + event + b"\n\n")
            await asyncio.sleep(0.05)
            if b'"cut"' in body and request.transport is not None:
                request.transport.abort()
                return stream
        await stream.write(b"data: [DONE]\n\n")
        return stream

    app = web.Application(client_max_size=2**22)
    app.add_routes([web.post("/{path:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    limits = {"max_request_bytes": 65536}
    async with replica(one_redis_server.url, **limits) as client:
        await registered(redis, "a", f"http://{host}:{port}")
        await until_serving(client, 1)
        url = client.base_url
        yield Front((url.host, url.port or 0), client, heard)
    await runner.cleanup()


def body_of(path, **more):
    return orjson.dumps({"model": "m", **POSTED[path], **more} if path in POSTED else OWN[path])


def raw_deflated(body):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODED = [
    ("gzip", gzip.compress),
    ("X-Gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflated),
    ("br", brotli.compress),
    ("zstd", zstandard.compress),
    ("zstd", lambda body: zstandard.ZstdCompressor().compressobj().compress(body)),
    ("identity", bytes),
]


async def encoded(front):
    for path in (*POSTED, *OWN):
        for name, encode in ENCODED:
            body = body_of(path)
            packed = encode(body)
            if not packed:  # all of it is in what flush would bring
                packer = zstandard.ZstdCompressor().compressobj()
                packed = packer.compress(body) + packer.flush()
            status, _, said = await front.post(path, packed, f"Content-Encoding: {name}")
            assert status == 200, (path, name, said)
            if path in POSTED:
                assert front.heard[-1][0] == path
                assert front.heard[-1][2].startswith(body[:-1])


async def otherwise_encoded(front):
    for path in (*POSTED, *OWN):
        for name in ("compress", "gzip, br", "x"):
            status, _, said = await front.post(path, body_of(path), f"Content-Encoding: {name}")
            assert status == 415, (path, name, said)
            assert b"zstd" in said


async def wrongly_encoded(front):
    for path in (*POSTED, *OWN):
        for name, encode in ENCODED[:-2]:
            for body in (b"{}", b"", encode(body_of(path))[:-3]):
                answer = await front.post(path, body, f"Content-Encoding: {name}")
                assert answer[0] == (400 if path in POSTED else 422), (path, name, body, answer)


async def too_large(front):
    bomb = b" " * 2**26
    packed = [(name, encode(bomb)) for name, encode in (ENCODED[0], *ENCODED[2:6])]
    assert max(len(body) for _, body in packed) < 70_000
    for path in (*POSTED, *OWN):
        plain = b" " * 65536 + body_of(path)
        for name, body in [("identity", plain), *packed]:
            status, _, said = await front.post(path, body, f"Content-Encoding: {name}")
            assert (status, b"--max-request-bytes" in said) == (413, True), (path, name, said)


async def halves(front):
    for path in POSTED:
        half = rb"hi \ud83d \\ud83d \ud83d\ude00 there"
        body = body_of(path).replace(b"hi there", half)
        status, _, said = await front.post(path, body)
        assert status == 200, (path, said)
        assert rb"hi \ufffd \\ud83d \ud83d\ude00 there" in front.heard[-1][2]
        ends_so = body_of(path).replace(b"hi there", rb"cut: \ud83d")
        assert (await front.post(path, ends_so))[0] == 200


async def forms(front):
    front.client.headers["x"] = "x"
    parts = (
        b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b0\r\n'
        b'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\n%b\r\n--b0--\r\n'
    )
    sound = bytes(range(256))
    kind = 'Content-Type: multipart/form-data; boundary="b0"'
    for path in (each for each in PASSED_ON if "audio" in each):
        body = parts % (b"m", sound)
        assert (await front.post(path, body, kind))[0] == 200
        assert front.heard[-1][1:] == (kind.removeprefix("Content-Type: "), body)
        assert (await front.post(path, parts % (b"none", sound), kind))[0] == 404
        refused = body.replace(b'"file"; filename="model"', b'"priority"')
        assert (await front.post(path, refused, kind))[0] == 400
        assert (await front.post(path, body, "Content-Type: multipart/form-data"))[0] == 400


async def heads(front):
    for path in GOTTEN:
        gotten = await front.post(path, b"", method="GET")
        status, headers, said = await front.post(path, b"", method="HEAD")
        assert (status, said) == (gotten[0], b""), path
        assert headers["content-type"] == gotten[1]["content-type"]
    assert (await front.post("/api/hello", b"", method="HEAD"))[::2] == (404, b"")


async def options(front):
    for path in (*GOTTEN, *POSTED, *OWN, "/v1/requests/r"):
        status, headers, said = await front.post(path, b"", method="OPTIONS")
        assert (status, said) == (204, b""), path
        allowed = set(headers["allow"].split(", "))
        assert allowed > {"options"}
        assert ("head" in allowed) == ("get" in allowed) == (path in GOTTEN)
    assert (await front.post("/none", b"", method="OPTIONS"))[0] == 404


async def other_methods(front):
    for path, method in [*((p, "PUT") for p in GOTTEN), *((p, "GET") for p in (*POSTED, *OWN))]:
        status, headers, _ = await front.post(path, b"", method=method)
        assert (status, bool(headers["allow"])) == (405, True), path


async def websockets(front):
    for path in (*GOTTEN, *POSTED, "/none"):
        asks = (
            "GET %s HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %s\r\n\r\n"
        )
        status, headers, _ = await front.raw((asks % (path, "WebSocket")).encode())
        assert (status, headers["upgrade"]) == (426, "http/1.1"), path
    body = body_of("/v1/completions")
    h2c = ("Connection: close, Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x")
    assert (await front.post("/v1/completions", body, *h2c))[0] == 200


async def old_version(front):
    for path in (*POSTED, *OWN):
        status, headers, said = await front.post(path, body_of(path), version="1.0")
        assert (status, "transfer-encoding" in headers) == (200, False), path
        assert orjson.loads(said)
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = await front.post(path, body_of(path, stream=True), version="1.0")
        status, headers, said = answer
        assert (status, "transfer-encoding" in headers) == (200, False)
        assert said.startswith(b"data: ")
        assert said.endswith(b"data: [DONE]\n\n")
    for path in GOTTEN:
        for method in ("GET", "HEAD"):
            status, headers, said = await front.post(path, b"", version="1.0", method=method)
            assert (status, "transfer-encoding" in headers) == (200, False), path
            assert bool(said) == (method == "GET")


async def odd_paths(front):
    for path in (*POSTED, "/v1/models"):
        method = "GET" if path == "/v1/models" else "POST"
        plain = path.removeprefix("/v1")
        odd = [f"/{path}", f"{path}/", f"/v1/v1{plain}", plain]
        for each in odd:
            if each in (*POSTED, "/v1/models"):
                continue
            status, _, said = await front.post(each, b"{}", method=method)
            assert (status, path.encode() in said) == (404, True), (each, said)


TRIED = {
    "body in `gzip`, `deflate`, `br`, `zstd`": encoded,
    "body in another encoding": otherwise_encoded,
    "body that is not in the encoding it names": wrongly_encoded,
    "body over the limit, also once decoded": too_large,
    "body with half a surrogate pair (`\\ud83d`)": halves,
    "form at `/v1/audio/`": forms,
    "`HEAD` where there is `GET`": heads,
    "`OPTIONS`": options,
    "another method": other_methods,
    "`Upgrade: websocket`": websockets,
    "HTTP/1.0": old_version,
    "`//v1/…`, `…/`, `/v1` missing or twice": odd_paths,
}


def test_every_row_is_tried():
    assert TRIED.keys() == ROWS


@pytest.mark.parametrize("row", TRIED)
async def test_each_row_of_the_page(row, front):
    await TRIED[row](front)


async def test_a_cut_stream_of_http_1_0_ends_in_an_error(front):
    # There the end of a connection looks like success.
    body = body_of("/v1/completions", stream=True, user="cut")
    status, headers, said = await front.post("/v1/completions", body, version="1.0")
    assert (status, "transfer-encoding" in headers) == (200, False)
    assert b'"error"' in said


async def test_an_empty_name_means_the_only_model(front):
    body = body_of("/v1/completions").replace(b'"m"', b'""')
    assert (await front.post("/v1/completions", body))[0] == 200
    assert orjson.loads(front.heard[-1][2])["model"] == "m"
