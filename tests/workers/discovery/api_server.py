"""An API server of Kubernetes that has pods, and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio import client

NAMESPACE = "models"
CUT, CLOSE = b"cut", b""
"""What ends a watch: in the middle of a line, or well."""


def pod(name: str, url: str, uid: str = "", **changes: Any) -> dict[str, Any]:
    """As the API has it. changes: ready, leaving, phase, ip and annotations."""
    parts = urlsplit(url)
    annotations = {f"kvroute.io/{k}": v for k, v in changes.get("annotations", {}).items()}
    metadata: dict[str, Any] = {
        "name": name,
        "uid": uid or f"uid-{name}",
        "annotations": annotations,
    }
    if "revision" in changes:
        metadata["labels"] = {"kvroute.io/revision": changes["revision"]}
    if changes.get("leaving"):
        metadata["deletionTimestamp"] = "2026-11-28T12:00:00Z"
    ready = "True" if changes.get("ready", True) else "False"
    return {
        "metadata": metadata,
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": parts.port}]}]},
        "status": {
            "phase": changes.get("phase", "Running"),
            "podIP": changes.get("ip", parts.hostname),
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


class ApiServer:
    """Each change is an event, which watches are told of unless they are silent."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        """The query of each list."""
        self.watches: list[dict[str, str]] = []
        self.list_status = self.watch_status = 200
        self.is_gone = False
        """Whether each watch is told that its version is too old."""
        self.is_silent = False
        """Whether watches are told nothing, and never end."""
        self._version = 1
        self._open = set[asyncio.Queue[bytes]]()

    def put(self, changed: dict[str, Any]) -> None:
        uid = changed["metadata"]["uid"]
        kind = "MODIFIED" if uid in self.pods else "ADDED"
        self.pods[uid] = changed
        self._tell(kind, changed)

    def delete(self, uid: str) -> None:
        self._tell("DELETED", self.pods.pop(uid))

    def bookmark(self) -> None:
        self.tell_of({"metadata": {}}, "BOOKMARK")

    def tell_of(self, about: object, kind: str = "MODIFIED") -> None:
        """An event that changes nothing, whatever it is about."""
        for queue in self._open:
            queue.put_nowait(orjson.dumps({"type": kind, "object": about}) + b"\n")

    def end_watches(self, how: bytes = CLOSE) -> None:
        for queue in self._open:
            queue.put_nowait(how)

    @property
    def num_open(self) -> int:
        """Watches that are told of changes."""
        return len(self._open)

    def _tell(self, kind: str, about: dict[str, Any]) -> None:
        self._version += 1
        about["metadata"]["resourceVersion"] = str(self._version)
        if not self.is_silent:
            self.tell_of(about, kind)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        if "watch" in query:
            self.watches.append(query)
            return await self._watch(request)
        self.lists.append(query)
        if self.list_status != 200:
            return web.json_response({"code": self.list_status}, status=self.list_status)
        listed = {"metadata": {"resourceVersion": str(self._version)}}
        return web.json_response(listed | {"items": list(self.pods.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.watch_status != 200:
            return web.json_response({}, status=self.watch_status)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.is_gone:
            error = {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}
            await answer.write(orjson.dumps(error) + b"\n")
            return answer
        queue = asyncio.Queue[bytes]()
        self._open.add(queue)
        try:
            while text := await queue.get():
                if text == CUT:
                    await answer.write(b'{"type": "ADDED", "obj')
                    assert request.transport is not None
                    request.transport.close()
                    break
                await answer.write(text)
        finally:
            self._open.discard(queue)
        return answer


@asynccontextmanager
async def api_server() -> AsyncIterator[tuple[ApiServer, client.Configuration]]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods", server.answer)
    async with TestServer(app) as http:
        configuration = client.Configuration(host=str(http.make_url("/")).rstrip("/"))
        try:
            yield server, configuration
        finally:
            server.is_silent = False
            server.end_watches()
