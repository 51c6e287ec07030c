"""A fake cluster of one router and two workers, one always idle, that answers as scripted."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

SILENT = 0
BREAKS_AFTER_FIRST_TOKEN = 1
SENDS_AN_ERROR = 2


@dataclass
class FakeCluster:
    """Every call succeeds unless a script says otherwise; each script entry is used once."""

    calls: list[str] = field(default_factory=list)
    """`<method> <path>` of every call, in order."""
    queries: list[dict[str, str]] = field(default_factory=list)
    """Queries of the calls to /v1/route and /v1/completions."""
    prompts: list[bytes] = field(default_factory=list)
    route_script: deque[int] = field(default_factory=deque)
    """Statuses of the next answers of /v1/route, or SILENT."""
    worker_script: deque[int] = field(default_factory=deque)
    """Statuses of the next completions, or one of the above."""
    cached_tokens: int = 0
    refuses_calls: bool = False
    """Confirmations and releases get 503."""
    body_delay_s: float = 0.0
    """How much later than its headers the body of the answer to one of these comes, if above 0."""
    num_late_bodies: int = 0
    """How many of these bodies the client was still there to get."""
    speaks_nonsense: bool = False
    """The router's answers are not JSON."""
    completing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a completion has been requested."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Completions wait for this event before their first token; set from the start."""
    url: str = ""

    def __post_init__(self):
        self.hold.set()

    def app(self):
        app = web.Application(client_max_size=2**22)
        app.add_routes(
            [
                web.post("/v1/route", self._route),
                web.get("/v1/workers", self._workers),
                web.post("/worker/v1/completions", self._complete),
                web.post("/v1/requests/{id}/prefill_complete", self._bookkeeping),
                web.delete("/v1/requests/{id}", self._bookkeeping),
            ]
        )
        return app

    async def _route(self, request):
        self._note(request)
        body = await request.read()
        status = self.route_script.popleft() if self.route_script else 200
        if status == SILENT:
            await asyncio.Event().wait()
        if status != 200:
            return _refusal(status)
        if self.speaks_nonsense:
            return web.Response(text="<html>")
        choice = {
            "request_id": request.query["request_id"],
            "worker_id": "w1",
            "dp_rank": 0,
            "address": f"{self.url}/worker",
            "overlap_blocks": {"device": 0, "host": 0, "disk": 0},
            "isl_tokens": len(body) // 4,
            "degraded": False,
            "reserved": True,
        }
        return web.json_response(choice)

    async def _workers(self, request):
        if self.speaks_nonsense:
            return web.Response(text="<html>")
        workers = [{"worker_id": name, "dp_rank": 0} for name in ("w2", "w1")]
        return web.json_response({"workers": workers})

    async def _complete(self, request):
        self._note(request)
        self.prompts.append(await request.read())
        self.completing.set()
        status = self.worker_script.popleft() if self.worker_script else 200
        if status >= 400:
            return _refusal(status)
        if status == SILENT:
            await asyncio.Event().wait()
        await self.hold.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if status == SENDS_AN_ERROR:
            await response.write(b'data: {"error":{"message":"out of memory"}}\n\n')
            return response
        await response.write(b'data: {"choices":[{"index":0,"text":"","token_ids":[7]}]}\n\n')
        if status == BREAKS_AFTER_FIRST_TOKEN:
            assert request.transport is not None
            request.transport.close()
            return response
        usage = {
            "prompt_tokens": len(self.prompts[-1]) // 4,
            "completion_tokens": int(request.query["max_tokens"]),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _bookkeeping(self, request):
        path = re.sub(r"(&ttft_ms)=\d{1,4}$", r"\1", request.path_qs)
        self.calls.append(f"{request.method} {path}")
        if self.body_delay_s:
            response = web.StreamResponse(headers={"Content-Length": "2"})
            await response.prepare(request)
            await asyncio.sleep(self.body_delay_s)
            self.num_late_bodies += request.transport is not None
            await response.write(b"{}")
            return response
        return _refusal(503) if self.refuses_calls else web.Response(status=204)

    def _note(self, request):
        self.calls.append(f"{request.method} {request.path}")
        self.queries.append(dict(request.query))


def _refusal(status):
    headers = {"Retry-After": "0"} if status == 429 else {}
    return web.json_response({"error": {"code": "scripted"}}, status=status, headers=headers)


@pytest.fixture
async def cluster():
    fake = FakeCluster()
    async with TestServer(fake.app()) as server:
        fake.url = str(server.make_url("")).rstrip("/")
        yield fake
