"""Services that the endpoints of a replica share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor

from app.console.console import Console
from app.core.key_rules import KeyRules
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.door.door import Door
from app.door.errors import Stopping
from app.edge.errors import ErrorBody
from app.edge.large import BodyReader
from app.edge.tls import certificate_of
from app.http.keys import Keys, check_open
from app.router.router import Router
from app.router.routers import Routers

if TYPE_CHECKING:
    from app.edge.client import Client
    from app.edge.operators import ReadinessCheck
    from app.edge.reload import WatchedFiles

REQUEST_ID = "{request_id:any_text}"


class AnyText(PathConvertor):
    """Newlines included: with Starlette's own convertor one at the end is lost, and the id before
    it may be another request's."""

    regex = "(?s:.*)"


register_url_convertor("any_text", AnyText())


def errors(*statuses: int | str, error: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Returns what FastAPI takes to document answers with errors, all with `error` as their
    body."""
    return {status: {"model": error} for status in statuses}


def body_of(model: type[BaseModel], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what OpenAPI says of a body that FastAPI does not read. others: schemas of other
    bodies than JSON, by content type."""
    content = {"application/json": {"schema": model.model_json_schema()}, **(others or {})}
    return {"required": True, "content": content}


@dataclass(slots=True)
class Services:
    """Services of the endpoints of one replica. settings: `adopt` changes those that
    app/edge/reload.py names."""

    settings: RouterSettings
    routers: Routers
    door: Door
    keys: Keys
    bodies: BodyReader
    readiness: ReadinessCheck
    console: Console | None
    """None: it is off."""
    watched: list[WatchedFiles]
    beside: list[Callable[[], Coroutine[Any, Any, object]]] = field(default_factory=list)
    """Work beside the replica, whose errors end it."""
    clients: set[Client] = field(default_factory=set)
    """Clients that wait for an answer."""
    is_stopping: bool = False

    @property
    def router(self) -> Router:
        """Router of the replica's own namespace."""
        return self.routers.own

    @property
    def block_size(self) -> int | None:
        """Tokens per block there; None: not known yet."""
        return self.routers.own.fleet.block_size

    def cut_short(self) -> None:
        """Ends each answer with an error."""
        for client in [*self.clients]:
            client.cut_short(Stopping())

    def adopt(self, settings: RouterSettings) -> None:
        """Takes over settings. Raises ConfigError, and then changes nothing."""
        check(settings)
        self.keys.change(settings.api_key, settings.api_key_file, settings.metrics_key)
        logging.getLogger().setLevel(settings.log_level.upper())
        self.settings = settings
        self.door.adopt(settings)
        self.bodies.max_tokens = settings.max_prompt_tokens


RULES = "kvroute.rules"
"""Key of a request's scope: the rules of its key."""


async def _replica_of(request: Request) -> Services:
    replica: Services = request.app.replica
    return replica


Replica = Annotated[Services, Depends(_replica_of)]


async def _rules_of(request: Request) -> KeyRules | None:
    rules: KeyRules | None = request.scope[RULES]
    return rules


Rules = Annotated[KeyRules | None, Depends(_rules_of)]
"""Rules of a request's key; None: it may ask for anything."""
"""Has FastAPI give an endpoint what it uses."""


def check(settings: RouterSettings) -> Keys:
    """Checks settings as a start does. Returns their keys. Raises ConfigError."""
    Keyspace(settings.namespace)
    certificate_of(settings.tls_cert, settings.tls_key)
    keys = Keys(settings.api_key, settings.api_key_file, settings.metrics_key)
    check_open(settings.host, keys, no_auth=settings.no_auth)
    return keys
