"""How a path is declared: Starlette finds its endpoint, app/edge/described.py documents it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor

from app.edge.client import Client
from app.http import route

REQUEST_ID = "{request_id:any_text}"


class AnyText(PathConvertor):
    """Newlines included: with Starlette's own convertor one at the end is lost, and the id before
    it may be another request's."""

    regex = "(?s:.*)"


register_url_convertor("any_text", AnyText())


class Route(route.Route):
    """A path whose endpoint reads its request and sends its answer through a Client.

    What only documents is named, and loaded when somebody asks for it: that takes half of the time
    in which a router starts.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Client], Awaitable[None]],
        *errors: int,
        answered: str | None = None,
        error: str = "ErrorBody",
        body: type[BaseModel] | str | None = None,
        other_bodies: dict[str, Any] | None = None,
        query: type[BaseModel] | None = None,
        is_text: bool = False,
        name: str | None = None,
        is_described: bool = True,
    ) -> None:
        """errors: statuses that the path has besides 200, all with `error` as their body.

        answered: the model of the answer. Models are named that only app.edge.answers or
        app.console.answers has. other_bodies: schemas of bodies but JSON, by content type. is_text:
        the answer is.
        """
        super().__init__(method, path, endpoint)
        self.answer = endpoint
        self.name = name or self.name
        self.include_in_schema = is_described
        self.errors, self.error, self.answered = errors, error, answered
        self.body, self.other_bodies, self.query = body, other_bodies or {}, query
        self.is_text = is_text
