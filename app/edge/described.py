"""All paths in OpenAPI, as FastAPI makes it of routes. Only who asks for that loads this."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.console import answers as of_console
from app.edge import answers
from app.edge.routes import Route

TITLE = "kvroute router"


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The description of those that are to be described."""
    described = [_described(route) for route in routes if route.include_in_schema]
    return get_openapi(title=TITLE, version=version("kvroute"), routes=described)


def _described(route: Route) -> APIRoute:
    error = _model(route.error)
    return APIRoute(
        route.path,
        route.answer,
        methods=(route.methods or set()) - {"HEAD"},
        name=route.name,
        response_model=_model(route.answered),
        response_class=PlainTextResponse if route.is_text else JSONResponse,
        responses={status: {"model": error} for status in route.errors},
        openapi_extra=_asked(route),
    )


def _model(named: type[BaseModel] | str | None) -> type[BaseModel] | None:
    if not isinstance(named, str):
        return named
    found: type[BaseModel] = getattr(answers, named, None) or getattr(of_console, named)
    return found


def _asked(route: Route) -> dict[str, Any]:
    """Parameters and bodies, of which FastAPI knows nothing: a Client reads them."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    if route.query is not None:
        fields = route.query.model_json_schema()["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in fields.items()
        ]
    asked: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if (body := _model(route.body)) is not None:
        content = {"application/json": {"schema": body.model_json_schema()}, **route.other_bodies}
        asked["requestBody"] = {"required": True, "content": content}
    return asked
