"""Paths whose endpoints read their request, and send its answer, through a Client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette import routing
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.client import Client

CLIENT = "kvroute.client"
"""Key in a request's scope: its Client."""


class Route(routing.Route):
    """A path with one method, and HEAD where that is GET."""

    def __init__(self, method: str, path: str, endpoint: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__(path, endpoint)
        self.methods = {method, "HEAD"} if method == "GET" else {method}

        async def app(scope: Scope, _: Receive, __: Send) -> None:
            await endpoint(scope[CLIENT])

        self.app = app


async def routed(router: ASGIApp, client: Client) -> None:
    """Has the route of a client's path answer. Raises HTTPException if there is none."""
    client.scope[CLIENT] = client
    await router(client.scope, client.receive, client.say)
