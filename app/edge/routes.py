"""The paths on which requests depend, served without FastAPI, which would take a third of a
decision's CPU; and the table that documents them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.door.answer_request import COUNT_TOKENS, PASSED_ON, PATHS
from app.edge import openai, route
from app.edge.answers import BestWorker, RequestState, Routed
from app.edge.client import Client
from app.edge.errors import AnthropicError, ErrorBody, OpenAIError
from app.edge.schemas import FindBestWorker, Generation, ReleaseOptions, RouteBody, RouteOptions
from app.edge.services import REQUEST_ID, body_of, errors
from app.http.client import Route


class BareRoute(Route):
    """A path, and what documents it. It is no APIRoute: the models of 20 paths' errors would take
    0.2 s of a router's start."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Client], Awaitable[None]],
        *statuses: int,
        answered: Any = None,
        error: Any = ErrorBody,
        body: type[BaseModel] | None = None,
        other_bodies: Mapping[str, Any] | None = None,
        query: type[BaseModel] | None = None,
    ) -> None:
        """statuses: that the path has besides 200, all with `error` as their body. other_bodies:
        schemas of bodies but JSON, by content type."""
        super().__init__(method, path, endpoint)
        self.method, self.answer = method, endpoint
        self._statuses, self._answered, self._error = statuses, answered, error
        self._body, self._other_bodies, self._query = body, other_bodies, query

    def documented(self) -> APIRoute:
        """Returns what FastAPI documents."""
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in self.param_convertors
        ]
        fields = self._query.model_json_schema()["properties"] if self._query else {}
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in fields.items()
        ]
        asked: dict[str, Any] = {"parameters": parameters} if parameters else {}
        if self._body is not None:
            asked["requestBody"] = body_of(self._body, self._other_bodies)
        return APIRoute(
            self.path,
            self.answer,
            methods=[self.method],
            response_model=self._answered,
            responses=errors(*self._statuses, error=self._error),
            openapi_extra=asked,
        )


def _posted(path: str, endpoint: Callable[[Client], Awaitable[None]], *statuses: int) -> BareRoute:
    return BareRoute(
        "POST",
        path,
        endpoint,
        *(400, 401, 404, 408, 413, *statuses),
        error=AnthropicError if path in (COUNT_TOKENS, "/v1/messages") else OpenAIError,
        body=Generation,
    )


_FAILURES = (429, 502, 503, 504)
_RAW = {
    "type": "string",
    "format": "binary",
    "description": "token ids as little-endian u32; the other fields go in the query",
}
_REQUEST = f"/v1/requests/{REQUEST_ID}"
BARE_ROUTES = [
    BareRoute(
        "POST",
        "/v1/route",
        route.route,
        *(401, 408, 409, 413, 422, 429, 503),
        answered=Routed,
        body=RouteBody,
        other_bodies={route.RAW_TOKENS.decode(): {"schema": _RAW}},
        query=RouteOptions,
    ),
    BareRoute(
        "DELETE",
        _REQUEST,
        route.release,
        *(401, 422, 503),
        answered=RequestState,
        query=ReleaseOptions,
    ),
    *(
        BareRoute("POST", f"{_REQUEST}/{end.__name__}", end, 401, 422, 503, answered=RequestState)
        for end in (route.prefill_complete, route.source_complete)
    ),
    BareRoute(
        "POST",
        "/find_best_worker",
        route.find_best_worker,
        *(401, 408, 413, 422, 429, 503),
        answered=BestWorker,
        body=FindBestWorker,
    ),
    *(_posted(path, openai.answer, 409, *_FAILURES) for path in PATHS),
    _posted(COUNT_TOKENS, openai.count_tokens, *_FAILURES),
    *(_posted(path, openai.pass_on, 502, 503) for path in PASSED_ON),
]
