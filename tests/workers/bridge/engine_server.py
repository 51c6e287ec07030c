"""HTTP servers that answer as engines do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from workers.bridge.http.engine import EngineHttp

DATA = Path(__file__).parents[2] / "data" / "engines"
VLLM = {
    f"/{path}": (DATA / "vllm-0.32" / name).read_bytes()
    for path, name in (
        ("version", "version.json"),
        ("v1/models", "models.json"),
        ("kv_event_sources", "kv_event_sources.json"),
        ("metrics", "metrics.txt"),
    )
}
SGLANG_INFO = {
    "version": "0.5.23",
    "page_size": 16,
    "dp_size": 2,
    "max_total_num_tokens": 65_536,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557"}',
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 32,
        "dp_size": 2,
        "replay_endpoint_port_base": 5657,
    },
}
SGLANG_MODELS = {
    "data": [
        {"id": "llama", "max_model_len": 8192},
        {"id": "poems", "parent": "llama", "max_model_len": None},
    ]
}
SGLANG: dict[str, Any] = {"/server_info": SGLANG_INFO, "/v1/models": SGLANG_MODELS, "/ready": b""}

Answers = Mapping[str, Any]
"""By path: bytes, an object to be sent as JSON, or a status."""


def sglang(**changes: Any) -> dict[str, Any]:
    """SGLANG with these fields in /server_info."""
    return SGLANG | {"/server_info": deepcopy(SGLANG_INFO) | changes}


def vllm_metrics(*changes: tuple[bytes, bytes]) -> dict[str, Any]:
    """VLLM with text replaced in /metrics."""
    text = VLLM["/metrics"]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return VLLM | {"/metrics": text}


@asynccontextmanager
async def serving(answers: Answers) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session, and the URL of a server that gives `answers`: it may be changed meanwhile."""

    async def answer(request: web.Request) -> web.Response:
        what = answers.get(request.path, 404)
        if isinstance(what, int):
            return web.Response(status=what)
        return web.Response(body=what if isinstance(what, bytes) else orjson.dumps(what))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield session, str(server.make_url("/"))


@asynccontextmanager
async def engine_of(answers: Answers) -> AsyncIterator[EngineHttp]:
    async with serving(answers) as (session, url):
        yield EngineHttp(session, url)
