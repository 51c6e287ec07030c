"""An API server of Kubernetes that has pods, and fails on demand."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio import client

NAMESPACE = "models"
CUT, CLOSE = b"cut", b""
"""What ends a watch: in the middle of a line, or well."""


def pod(name, url, uid="", **changes):
    """As the API has it. changes: ready, leaving, phase, ip, annotations, labels and namespace."""
    parts = urlsplit(url)
    annotations = {f"kvroute.io/{k}": v for k, v in changes.get("annotations", {}).items()}
    metadata = {
        "name": name,
        "uid": uid or f"uid-{name}",
        "annotations": annotations,
        "namespace": changes.get("namespace", NAMESPACE),
        "labels": dict(changes.get("labels", {"app": "vllm"})),
    }
    if "revision" in changes:
        metadata["labels"]["kvroute.io/revision"] = changes["revision"]
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


def is_selected(about, request):
    """Whether a request asks for that pod: by its namespace, and by labels that equal values."""
    metadata = about["metadata"] if isinstance(about, dict) else {}
    if metadata.get("namespace") is None:
        return True
    pairs = (text.split("=") for text in request.query.get("labelSelector", "").split(","))
    is_there = metadata["namespace"] == request.match_info["namespace"]
    labels = metadata["labels"].items()
    return bool(is_there and dict(pair for pair in pairs if len(pair) == 2).items() <= labels)


class ApiServer:
    """Each change is an event, which watches are told of unless they are silent. forbidden:
    namespaces that nobody may list."""

    def __init__(self):
        self.pods = {}
        self.lists = []
        """The query of each list."""
        self.watches = []
        self.list_status = self.watch_status = 200
        self.forbidden = set[str]()
        self.is_gone = False
        """Whether each watch is told that its version is too old."""
        self.is_silent = False
        """Whether watches are told nothing, and never end."""
        self._version = 1
        self._open = set[asyncio.Queue[tuple[object, bytes]]]()

    def put(self, changed):
        uid = changed["metadata"]["uid"]
        kind = "MODIFIED" if uid in self.pods else "ADDED"
        self.pods[uid] = changed
        self._tell(kind, changed)

    def delete(self, uid):
        self._tell("DELETED", self.pods.pop(uid))

    def bookmark(self):
        self.tell_of({"metadata": {}}, "BOOKMARK")

    def tell_of(self, about, kind="MODIFIED"):
        """An event that changes nothing, whatever it is about."""
        for queue in self._open:
            text = orjson.dumps({"type": kind, "object": about}) + b"\n"
            queue.put_nowait((about, text))

    def end_watches(self, how=CLOSE):
        for queue in self._open:
            queue.put_nowait((None, how))

    @property
    def num_open(self):
        """Watches that are told of changes."""
        return len(self._open)

    def _tell(self, kind, about):
        self._version += 1
        about["metadata"]["resourceVersion"] = str(self._version)
        if not self.is_silent:
            self.tell_of(about, kind)

    async def answer(self, request):
        query = dict(request.query)
        if "watch" in query:
            self.watches.append(query)
            return await self._watch(request)
        self.lists.append(query)
        is_forbidden = request.match_info["namespace"] in self.forbidden
        if (status := 403 if is_forbidden else self.list_status) != 200:
            return web.json_response({"code": status}, status=status)
        listed = {"metadata": {"resourceVersion": str(self._version)}}
        found = [each for each in self.pods.values() if is_selected(each, request)]
        return web.json_response(listed | {"items": found})

    async def _watch(self, request):
        if self.watch_status != 200:
            return web.json_response({}, status=self.watch_status)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.is_gone:
            error = {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}
            await answer.write(orjson.dumps(error) + b"\n")
            return answer
        queue = asyncio.Queue[tuple[object, bytes]]()
        self._open.add(queue)
        try:
            while (told := await queue.get())[1]:
                about, text = told
                if about is not None and not is_selected(about, request):
                    continue
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
async def api_server(*routes):
    """routes: what else it answers."""
    server = ApiServer()
    app = web.Application()
    app.add_routes(routes)
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", server.answer)
    async with TestServer(app) as http:
        configuration = client.Configuration(host=str(http.make_url("/")).rstrip("/"))
        try:
            yield server, configuration
        finally:
            server.is_silent = False
            server.end_watches()
