"""The paths of a server, and the servers that are no routers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Router
from starlette.types import Receive, Scope, Send

from app.core.errors import cut
from app.http.client import CLIENT, JSON, ClientStalled, Exchange, Route
from app.http.errors import INTERNAL, Dialect, ErrorTable
from app.http.keys import METRICS, Keys

log = logging.getLogger(__name__)


class Paths(Router):
    """Routes, and what a server answers where none of them takes a request."""

    def __init__(self, *routes: Any) -> None:
        # A redirect to the path with or without a slash would repeat the caller's Host header.
        super().__init__(routes, redirect_slashes=False)

    async def answered(self, client: Exchange) -> bool:
        """Answers if the client asks for OPTIONS, and returns whether it does. Raises HTTPException
        if no route takes the request: it names the methods that do, or the path that was meant."""
        scope, path = client.scope, client.scope["path"]
        at_path: list[Any] = [one for one in self.routes if one.matches(scope)[0] is not Match.NONE]
        methods = {"OPTIONS"}.union(*(one.methods for one in at_path))
        methods |= {"HEAD"} if "GET" in methods else set()
        if meant := self._meant_by(path):
            raise HTTPException(404, f"There is no {cut(path)}: ask {meant} instead.")
        if not at_path:
            raise HTTPException(404)
        allowed = ", ".join(sorted(methods))
        if scope["method"] not in methods:
            raise HTTPException(405, headers={"Allow": allowed})
        if scope["method"] == "OPTIONS":
            await client.answer_whole(b"", 204, (b"allow", allowed.encode()))
        return bool(scope["method"] == "OPTIONS")

    def _meant_by(self, path: str) -> str | None:
        """Returns another path that has the same words, with `/v1` before them or without it; None
        if there is none, or a route has this very path."""
        routes: list[Any] = self.routes
        paths = {one.path for one in routes}
        plain = "".join([f"/{word}" for word in path.split("/") if word not in ("", "v1")])
        meant = [each for each in (f"/v1{plain}", plain) if each in paths]
        return meant[0] if meant and path not in paths else None


class Server:
    """The HTTP interface of a worker, an agent or a planner: the paths that are added, and GET
    /metrics. keys: that open it."""

    def __init__(self, errors: ErrorTable, metrics: CollectorRegistry, keys: Keys) -> None:
        self._errors, self._collected, self._keys = errors, metrics, keys
        self._paths = Paths()
        self.add("GET", METRICS, self._metrics)

    def add(self, method: str, path: str, endpoint: Callable[[Exchange], Awaitable[None]]) -> None:
        self._paths.routes.append(Route(method, path, endpoint))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._paths(scope, receive, send)
            return
        client = scope[CLIENT] = Exchange(scope, receive, send)
        try:
            # Its name tells no caller from another: all routers have the same key.
            self._keys.check(scope["path"], scope["headers"])
            if not await self._paths.answered(client):
                await self._paths(scope, client.receive, client.say)
        except (ClientDisconnect, ClientStalled):
            client.cut()
        except Exception as error:
            await self._fail(client, error)

    async def _fail(self, client: Exchange, error: Exception) -> None:
        if self._errors.meaning_of(error) is INTERNAL:
            log.error("%s failed", client.scope["path"], exc_info=error)
        if client.status:
            client.cut()
            return
        status, headers, body = self._errors.answer_to(error, Dialect.OURS)
        await client.answer_whole(body, status, JSON, *headers)

    async def _metrics(self, client: Exchange) -> None:
        kind = (b"content-type", CONTENT_TYPE_LATEST.encode())
        await client.answer_whole(generate_latest(self._collected), 200, kind)
