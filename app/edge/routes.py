"""How a path is declared: FastAPI finds its endpoint and documents it, and does nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor

from app.edge import schemas
from app.edge.client import Client
from app.http.route import through_client

REQUEST_ID = "{request_id:any_text}"


class AnyText(PathConvertor):
    """Newlines included: with Starlette's own convertor one at the end is lost, and the id before
    it may be another request's."""

    regex = "(?s:.*)"


register_url_convertor("any_text", AnyText())


class Route(APIRoute):
    """A path whose endpoint reads its request and sends its answer through a Client."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Client], Awaitable[None]],
        *errors: int,
        error: type[BaseModel] = schemas.ErrorBody,
        **options: Any,
    ) -> None:
        """errors: statuses that the path has besides 200, all with `error` as their body."""
        responses = {status: {"model": error} for status in errors}
        options["responses"] = responses | options.get("responses", {})
        super().__init__(path, endpoint, methods=[method], **options)

        self.answer = endpoint
        self.app = through_client(endpoint)


def in_path(name: str) -> list[dict[str, Any]]:
    """The description of a text in a path."""
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]


def parameters_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The fields of `model` as the description of a query."""
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a request whose body is that in JSON."""
    content: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
