"""A picker in this process, and what plays the gateway that asks it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import httpx
import orjson
import pytest

from app.core.settings.router import PickerSettings
from app.router import routers
from tests.door.conftest import port_of, registered
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

if find_spec("grpc") is None or find_spec("h2") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from app.edge.app import create_app
    from app.gateway import ext_proc, messages
    from app.gateway.messages import FULL_DUPLEX_STREAMED
    from app.gateway.processor import SERVICE, Processor
    from app.http.server import listen, serve

USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
EVENTS = (
    b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}\n\n',
)
DONE = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(routers, "DIRECTORY_INTERVAL_S", 0.1)


@dataclass(slots=True)
class Told:
    """What a picker made of a request. headers: that it sets. body: as it goes on."""

    endpoints: str = ""
    metadata: str = ""
    headers: dict[str, bytes] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    num_pieces: int = 0
    has_trailers: bool = False
    """Whether no piece is the last, and trailers follow."""
    status: int = 0
    """Of an answer by the picker itself; 0: there is none."""

    @property
    def fields(self):
        return orjson.loads(self.body)


class Asked:
    """One call to a picker, and what it says."""

    def __init__(self, call):
        self.call = call

    async def headers(self, path, *, mode, about, meta):
        said = ext_proc.ProcessingRequest()
        pseudo = {":method": "POST", ":path": path, ":authority": "gw", "x-request-id": "r-1"}
        _fill(said.request_headers.headers, pseudo | about)
        said.protocol_config.request_body_mode = FULL_DUPLEX_STREAMED
        said.protocol_config.response_body_mode = mode
        if meta:
            said.metadata_context.filter_metadata[messages.SUBSET_HINT].update(meta)
        await self.call.write(said)

    async def body(self, *pieces, ends=True):
        for at, piece in enumerate(pieces):
            said = ext_proc.ProcessingRequest()
            said.request_body.body = piece
            said.request_body.end_of_stream = ends and at == len(pieces) - 1
            await self.call.write(said)

    async def told(self):
        """What it says until the whole body has gone on, or all is over."""
        told = Told()
        while True:
            said = await self.call.read()
            assert said is not grpc.aio.EOF
            if said.HasField("immediate_response"):
                answer = said.immediate_response
                told.status, told.body = answer.status.code, answer.body
                told.headers = _read(answer.headers)
                return told
            if said.HasField("request_headers"):
                mutation = said.request_headers.response.header_mutation
                told.headers, told.removed = _read(mutation), [*mutation.remove_headers]
                told.endpoints = told.headers[messages.ENDPOINT].decode()
                told.metadata = said.dynamic_metadata[messages.LB][messages.ENDPOINT]
                continue
            told.has_trailers = said.HasField("request_trailers")
            piece = said.request_body.response.body_mutation.streamed_response
            told.body += piece.body
            told.num_pieces += said.HasField("request_body")
            if piece.end_of_stream or told.has_trailers:
                return told

    async def answers_at_once(self, status, body, served=""):
        """What the picker makes of the headers and the body of an answer in JSON."""
        await self.begins(status, "application/json", served)
        await self.says_of_answer(body)
        headers = (await self.call.read()).response_headers.response.header_mutation
        piece = (await self.call.read()).response_body.response.body_mutation.streamed_response
        assert piece.end_of_stream
        return headers, piece.body

    async def answer_begins(self, status=200, kind="", served=""):
        """Returns what the picker says of it."""
        await self.begins(status, kind, served)
        return (await self.call.read()).response_headers.response.header_mutation

    async def begins(self, status, kind, served=""):
        said = ext_proc.ProcessingRequest()
        _fill(
            said.response_headers.headers,
            {
                ":status": str(status),
                "content-type": kind or "text/event-stream",
                "retry-after": "7",
            },
        )
        if served:
            said.metadata_context.filter_metadata[messages.LB].update({messages.SERVED: served})
        await self.call.write(said)

    async def says_of_answer(self, *pieces, ends=True):
        for at, piece in enumerate(pieces):
            said = ext_proc.ProcessingRequest()
            said.response_body.body = piece
            said.response_body.end_of_stream = ends and at == len(pieces) - 1
            await self.call.write(said)

    async def answers(self, *pieces, ends=True):
        """What goes on of each piece."""
        passed = []
        for at, piece in enumerate(pieces):
            await self.says_of_answer(piece, ends=ends and at == len(pieces) - 1)
            answered = (await self.call.read()).response_body.response
            passed.append(answered.body_mutation.streamed_response.body)
        return passed

    async def told_of_answer(self, *pieces):
        """What goes on of them all, message by message."""
        await self.says_of_answer(*pieces)
        passed, is_over = [], False
        while not is_over:
            answered = (await self.call.read()).response_body.response
            piece = answered.body_mutation.streamed_response
            passed.append(piece.body)
            is_over = piece.end_of_stream
        return passed

    async def ends(self):
        """The gateway says no more, and sees the call end."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


def _fill(headers, given):
    for name, value in given.items():
        headers.headers.add(key=name, raw_value=value.encode())


def _read(mutation):
    return {each.header.key: each.header.raw_value for each in mutation.set_headers}


@dataclass(slots=True)
class Gateway:
    """One that asks a picker. http: a client of what the picker serves besides."""

    http: httpx.AsyncClient
    channel: Any
    processor: Processor

    def call(self):
        made = self.channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )
        return Asked(made())

    async def asks(
        self,
        fields,
        path="/v1/completions",
        *,
        pieces=1,
        mode=None,
        about=None,
        meta=None,
        method="POST",
    ):
        asked = self.call()
        mode = FULL_DUPLEX_STREAMED if mode is None else mode
        about = {":method": method} | (about or {})
        await asked.headers(path, mode=mode, about=about, meta=meta)
        body = fields if isinstance(fields, bytes) else orjson.dumps(fields)
        size = -(-len(body) // pieces)
        await asked.body(*(body[at * size : (at + 1) * size] for at in range(pieces)))
        return asked, await asked.told()

    async def reserved(self):
        """Requests that each worker is reserved for, of those that have some."""
        workers = (await self.http.get("/v1/workers")).json()["workers"]
        loads = {each["worker_id"]: each["active_requests"] for each in workers}
        return {name: num for name, num in loads.items() if num}

    async def health(self, service):
        """As the picker tells it over gRPC."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def waiting(self):
        """Requests that wait for a worker."""
        text = (await self.http.get("/metrics")).text
        lines = [each for each in text.splitlines() if each.startswith("kvroute_waiting_req")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def until_reserved(self, **expected):
        await eventually(self.reserved, lambda found: found == expected)

    async def until_serving(self, num_workers):
        async def known():
            answer = await self.http.get("/v1/workers")
            listed = (await self.http.get("/v1/models")).json()["data"]
            return len(answer.json()["workers"]) if listed else 0

        await eventually(known, lambda found: found == num_workers)


@asynccontextmanager
async def picking(redis_url, **settings):
    """A gateway that asks a picker with these settings."""
    refuses = {"wait_queue": 0, "seed": 7, "redis_timeout_ms": 5000}
    chosen = refuses | {"grpc_port": 0, "drain_s": 0.0} | settings
    given = PickerSettings(redis_url=redis_url, namespace=NAMESPACE, comment_every_s=0.0, **chosen)
    app = create_app(given)
    processor = Processor(app, given)
    app.replica.beside.append(processor.run)
    with listen("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(serve(app, listening, on_stop=processor.stop))
        url = f"http://127.0.0.1:{port_of(listening)}"
        key = chosen.get("api_key")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as http,
                grpc.aio.insecure_channel(f"127.0.0.1:{processor.port}") as channel,
            ):
                yield Gateway(http, channel, processor)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await processor.stop()


@asynccontextmanager
async def fleet(redis, url, num=2, **settings):
    """The same, with workers w1, w2, ... of model m at 10.0.0.1:80, 10.0.0.2:80, ..."""
    about = {name: settings.pop(name) for name in ("max_requests",) if name in settings}
    for at in range(1, num + 1):
        await registered(redis, f"w{at}", f"http://10.0.0.{at}:80", **about)
    async with picking(url, **settings) as gateway:
        await gateway.until_serving(num)
        yield gateway


@pytest.fixture
async def gateway(request, redis, one_redis_server):
    """What `fleet` yields for the arguments of the mark `fleet`."""
    mark = request.node.get_closest_marker("fleet")
    args, settings = (mark.args, mark.kwargs) if mark else ((), {})
    async with fleet(redis, one_redis_server.url, *args, **settings) as one:
        yield one
