"""A client of a replica: what is told of its request, comments while it waits, and errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app.core.errors import KvrouteError, cut
from app.core.key_rules import KeyRules
from app.core.outcomes import UNFIT
from app.core.worker_report import WorkerInfo
from app.door.errors import ModelUnavailable, WorkerFailed
from app.door.lifecycle import Lifecycle
from app.edge.errors import (
    GONE,
    INVALID_STATUSES,
    UNSERVED_STATUS,
    answer_to,
    dialect_of,
    ending_of,
    event_of,
    event_with,
    is_unserved,
    limits_shown,
    meaning_of,
    reason_of,
    refusal_of,
    told,
    unserved,
)
from app.edge.services import Services
from app.http import client as http
from app.http.client import CLIENT, JSON, ClientStalled, Headers

log = logging.getLogger(__name__)

NO_STREAM = (
    "the worker answered what is no stream, which comments have begun: see --comment-every-s"
)
SHOWN = b"x-kvroute-"
"""Headers that say where an answer comes from begin so."""


class Client(http.Exchange):
    """A request to a replica, and the client that waits for its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, replica: Services) -> None:
        super().__init__(scope, receive, send)
        scope[CLIENT] = self
        self.replica = replica
        self.stalled_s = replica.settings.stalled_s
        self.rules: KeyRules | None = None
        """Rules of the request's key; None: it may ask for anything."""
        self._began_s = time.monotonic()
        self._record: Lifecycle | None = None
        self.shows = False
        """Whether answers tell where they come from."""
        self.has_begun = False
        """Whether anything of such an answer has gone out."""
        self._waits_since_s = 0.0
        """Time since which a stream is waited for that has not begun; 0.0: none is."""
        self._saying: asyncio.Task[None] | None = None
        self._task = asyncio.current_task()
        self.ended_by: Exception | None = None
        """Why what is done for the client was cut short, if it was."""

    @property
    def is_of_client(self) -> bool:
        """Whether its key has to do with its own requests alone."""
        return self.rules is not None and self.rules.is_client

    @property
    def record(self) -> Lifecycle:
        """The record of a request to the front door."""
        if self._record is None:
            path, peer = self.scope["path"], self.scope.get("client")
            forwarded_for = self.raw_headers.get(b"x-forwarded-for", b"").decode("latin-1")
            self._record = Lifecycle(
                cut(path), peer[0] if peer else "", cut(forwarded_for), self._began_s
            )
        return self._record

    def cut_short(self, error: Exception) -> None:
        """Ends what is done for the client, in whose task this was made, as if it raised
        `error`."""
        if self._task is not None and self.ended_by is None:
            self.ended_by = error
            self._task.cancel()

    def waits(self) -> None:
        """Lets comments come before the answer, which is a stream."""
        self._waits_since_s = asyncio.get_running_loop().time()

    def comment_if_due(self, now_s: float, every_s: float, tasks: asyncio.TaskGroup) -> None:
        """Sends a comment if the client has waited for so long, and before the first one
        headers."""
        is_due = self._waits_since_s and now_s - self._waits_since_s >= every_s
        if is_due and (self._saying is None or self._saying.done()):
            self._waits_since_s = now_s
            self._saying = tasks.create_task(self._comment())

    async def _comment(self) -> None:
        with suppress(ClientStalled, OSError):  # which is found out where its answer is sent
            if not self.status:
                await super().start(200, HEADERS)
            await self.send(COMMENT)

    async def _end_comments(self) -> None:
        """Returns once none is sent any more."""
        self._waits_since_s = 0.0
        if self._saying is not None and not self._saying.done():
            await asyncio.wait([self._saying])

    async def start(self, status: int, headers: Headers) -> None:
        """Begins an answer. Raises WorkerFailed if comments have begun a stream, and the answer is
        none."""
        if self.shows:
            self.has_begun = True
            headers = [*headers, *self._shown()]
        if self._waits_since_s:
            await self._end_comments()
        if not self.status:
            await super().start(status, headers)
        elif _are_of_stream(headers):
            await self._show(headers)
        else:
            raise WorkerFailed(NO_STREAM)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answers with a whole body. Raises WorkerFailed if comments have begun a stream."""
        await self._end_comments()
        if self.status:
            raise WorkerFailed(NO_STREAM)
        await self.answer_whole(body, status, *headers)

    def _shown(self) -> Headers:
        """Returns headers that tell where an answer comes from, why the prompt's tokens were not
        known, and what is left of limits."""
        record = self.record
        decision, shown = record.decision, []
        if record.ids is not None and record.ids.tokens_from.startswith("blind:"):
            shown.append((b"x-kvroute-tokens", record.ids.tokens_from.encode()))
        if (spending := record.spending) is not None:
            dialect = dialect_of(self.scope["path"])
            shown += limits_shown(spending.rules, spending.left, dialect)
        hides = self.is_of_client and self.replica.keys.isolates
        if decision is None or hides or not self.replica.settings.show_decision:
            return shown
        overlap = f"{decision.overlap.total}/{decision.isl_blocks}"
        if decision.bound_blocks:
            overlap += f"; bound={decision.bound_blocks}"
        shown.append((b"x-kvroute-worker", record.worker.encode()))
        if self.is_of_client:
            return shown
        shown.append((b"x-kvroute-overlap", overlap.encode()))
        shown.append((b"x-kvroute-trust", decision.trust.encode()))
        if decision.source is not None:
            shown.append((b"x-kvroute-source", str(decision.source.worker.key).encode()))
        return shown

    async def _show(self, headers: Headers) -> None:
        """Tells in a comment where an answer comes from, as its headers have gone out before."""
        shown = [b": %b: %b\n" % each for each in headers if each[0].startswith(SHOWN)]
        if shown:
            await self.send(b"".join((*shown, b"\n")))

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        """Answers as an engine does that refuses a request, in the form of the path."""
        path = self.scope["path"]
        status, body = told(status, body, path, by)
        await self._end_comments()
        if self.status:
            self.has_begun = True
            await self.send(event_with(body, path), last=True)
            return
        kept = [each for each in headers if each[0].lower() != b"content-type"]
        await self.answer_whole(body, status, JSON, *kept)

    def report(self, error: BaseException | None) -> None:
        """Tells what became of the request, which has ended. error: by which, if by one."""
        record = self.record
        record.key_name = self.key_name
        if isinstance(error, Exception):
            record.error = reason_of(error)
        if isinstance(error, ModelUnavailable):
            record.unavailable = error.model
        if error is not None or self.is_gone or not self.status:
            ending = GONE if error is None else ending_of(error)
            record.status = self.status or ending.status
            if not record.close(ending.outcome, ended_by=ending.ended_by):
                record.note_left(ending.outcome, ended_by=ending.ended_by)
        else:
            record.status = self.status
            is_ok = self.status < 400
            record.close("ok" if is_ok else UNFIT, ended_by="" if is_ok else "worker")
        self.replica.door.ended(record)

    async def fail(self, error: Exception) -> None:
        """Answers with an error; in the midst of an answer, ends that with one."""
        path = self.scope["path"]
        await self._end_comments()
        if isinstance(error, ClientStalled):
            self.cut()
            return
        if isinstance(error, ValidationError | RequestValidationError):
            error = refusal_of(error)
        status, code, _ = meaning_of(error)
        if status in INVALID_STATUSES:
            self.replica.routers.own.telemetry.refusals.labels(code).inc()
        if not isinstance(error, KvrouteError | HTTPException):
            log.error("%s failed", path, exc_info=error)
        if self.has_ended:
            return
        if self.status and _are_of_stream(self._answer_headers):
            await self.send(event_of(error, path), last=True)
            return
        if self.status:
            self.cut()
            return
        answer = answer_to(error, path)
        asks = self.raw_headers.get(UNSERVED_STATUS) == b"425"
        if asks and is_unserved(error, has_failures=bool(self.record.failures)):
            answer = unserved(answer)
        status, headers, body = answer
        await self.answer_whole(body, status, JSON, *headers)


def _are_of_stream(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


COMMENT = b": waiting\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LOOK_S = 1.0


async def comment_each(clients: Collection[Client], every_s: float) -> None:
    """Gives clients that wait a comment each `every_s`, until cancelled. One task looks after all,
    as nearly every stream begins before its first one is due."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            await asyncio.sleep(min(LOOK_S, every_s / 2))
            now_s = loop.time()
            for client in [*clients]:
                client.comment_if_due(now_s, every_s, tasks)
