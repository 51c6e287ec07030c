"""Who sent a request, and how its answer goes: the one argument of every endpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import cached_property

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.core.errors import KvrouteError, cut
from app.core.worker_report import WorkerInfo
from app.door.door import Headers
from app.door.errors import ClientStalled, ModelUnavailable
from app.door.record import RequestRecord
from app.edge.engine_errors import told
from app.edge.errors import (
    GONE,
    INVALID,
    answer_to,
    ending_of,
    event_of,
    meaning_of,
    reason_of,
    refusal_of,
)
from app.edge.services import Services
from app.http.body import read_body, resumed
from app.http.protocol import CUT
from app.http.watch import watched

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")


class Client(Request):
    """A request, and the client that waits for its answer.

    about: headers of every answer. key_name: of the key that opened the replica; "": it needs none.
    status: of the answer; 0: none has begun.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, replica: Services) -> None:
        super().__init__(scope, receive, send)
        self.replica = replica
        self.about: Headers = ()
        self.key_name = ""
        self.status = 0
        self._began_s = time.monotonic()
        self._has_ended = False

    @cached_property
    def raw_headers(self) -> Mapping[bytes, bytes]:
        """Of those that come twice, the last."""
        return dict(self.scope["headers"])

    @cached_property
    def record(self) -> RequestRecord:
        """What is known of a request to the front door."""
        peer = self.scope.get("client")
        forwarded_for = self.raw_headers.get(b"x-forwarded-for", b"").decode("latin-1")
        return RequestRecord(
            cut(self.scope["path"]), peer[0] if peer else "", cut(forwarded_for), self._began_s
        )

    async def read(self, limit: int) -> bytes:
        """The body. Raises as `read_body`."""
        return await read_body(self, limit)

    def watched(self) -> watched:
        """Cancels what is done within it once the client is gone."""
        return watched(self.scope)

    async def start(self, status: int, headers: Headers) -> None:
        """Raises ClientStalled, like `send` and `say`, if it takes nothing for too long."""
        await self.say(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.about],
            }
        )

    async def send(self, piece: bytes, *, last: bool = False) -> None:
        """A piece of the answer's body."""
        await self.say({"type": "http.response.body", "body": piece, "more_body": not last})

    async def answer(self, content: object, status: int = 200) -> None:
        """In JSON."""
        await self.answer_whole(orjson.dumps(content), status, JSON)

    async def answer_whole(self, body: bytes, status: int, *headers: tuple[bytes, bytes]) -> None:
        """An answer whose body is known."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send(body, last=True)

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        """Answer as an engine does that refuses a request, in the form of the path."""
        status, body = told(status, body, self.scope["path"], by)
        kept = [each for each in headers if each[0].lower() != b"content-type"]
        await self.answer_whole(body, status, JSON, *kept)

    async def say(self, message: Message) -> None:
        """As ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._has_ended = not message.get("more_body", False)
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        # Only a client that is behind is waited for, and a deadline for each part would cost.
        stalled_s = self.replica.settings.stalled_s
        try:
            async with asyncio.timeout(stalled_s):
                await resumed(sending, waits_for)
        except TimeoutError:
            raise ClientStalled(f"took nothing for {stalled_s:g} s") from None

    def report(self, error: BaseException | None) -> None:
        """The request has ended; tell what became of it. error: by which, if by one."""
        record = self.record
        record.key_name = self.key_name
        if isinstance(error, Exception):
            record.error = reason_of(error)
        if isinstance(error, ModelUnavailable):
            record.unavailable = error.model
        if error is not None or not self.status:
            ending = GONE if error is None else ending_of(error)
            record.status = self.status or ending.status
            record.end(ending.outcome, ended_by=ending.ended_by)
        else:
            record.status = self.status
            is_ok = self.status < 400
            record.end("ok" if is_ok else "refused", ended_by="" if is_ok else "worker")
        self.replica.door.ended(record)

    async def fail(self, error: Exception) -> None:
        """Answer with an error; in the midst of an answer, end that with one."""
        path = self.scope["path"]
        if isinstance(error, ClientStalled):
            if (cut := self.scope.get(CUT)) is not None:
                cut()
            return
        if isinstance(error, ValidationError):
            error = refusal_of(error)
        status, code, _ = meaning_of(error)
        if status in INVALID:
            self.replica.routers.own.telemetry.refusals.labels(code).inc()
        if not isinstance(error, KvrouteError | HTTPException):
            log.error("%s failed", path, exc_info=error)
        if self._has_ended:
            return
        if self.status:
            await self.send(event_of(error, path), last=True)
            return
        status, headers, body = answer_to(error, path)
        await self.answer_whole(body, status, JSON, *headers)
