"""Request and answer in one: the argument of every endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

import orjson
from starlette import routing
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.core.errors import KvrouteError
from app.http.body import read_body, resumed
from app.http.held import HELD
from app.http.protocol import CUT, ON_GONE, UNTIL_TAKEN

Headers = Sequence[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
STALLED_S = 300.0
"""Seconds a worker's client may take nothing: longer than a router waits for its own clients."""


CLIENT = "kvroute.client"


class watched:  # noqa: N801 - used like asyncio.timeout
    """Cancels work for a client, whose body has been read, as soon as it hangs up. is_gone: whether
    it did."""

    def __init__(self, scope: Scope) -> None:
        self.is_gone = False
        # Only servers of other makes, in tests, do not say.
        self._watch = scope.get(ON_GONE, lambda _: None)

    async def __aenter__(self) -> watched:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch(self._cancel)
        return self

    def _cancel(self) -> None:
        self.is_gone = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watch(None)
        if self.is_gone:
            self._task.uncancel()
        return self.is_gone and kind is not None and issubclass(kind, asyncio.CancelledError)


class ClientStalled(KvrouteError):
    """A client has taken nothing of its answer for too long."""


class Exchange(Request):
    """A request, and the client that waits for its answer. about: headers of every answer.
    key_name: of the key that opened the server; "": none was needed. raw_headers: the last of each
    name. status: of the answer; 0: none has begun."""

    stalled_s = STALLED_S
    """How long the client may take nothing."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.about: Headers = ()
        self.key_name = ""
        self.raw_headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.status = 0
        self.has_ended = False
        self._answer_headers: Headers = ()
        self._watched: watched | None = None
        self._behind: tuple[Any, Generator[Any, None, None]] | None = None
        """The future that the sending of a message waits for, and the rest of that sending; None:
        none waits."""

    @property
    def holder(self) -> str:
        """Holder of a share of what all callers share: a key, or else an address."""
        peer = self.scope.get("client")
        return self.key_name or (peer[0] if peer else "")

    async def read(self, limit: int, flag: str = "") -> bytes:
        """Returns the body. flag: named in errors of the limit. Raises what `read_body` raises."""
        if (held := self.scope.get(HELD)) is not None:
            held.belong_to(self.holder)
        return await read_body(self, limit, flag)

    def watched(self) -> watched:
        """Returns a context manager that cancels what is done within it once the client is gone."""
        self._watched = watched(self.scope)
        return self._watched

    @property
    def is_gone(self) -> bool:
        """Whether the client went while it was watched."""
        return self._watched is not None and self._watched.is_gone

    async def start(self, status: int, headers: Headers) -> None:
        """Begins the answer. Raises ClientStalled if the client takes nothing for too long."""
        self._answer_headers = [*headers, *self.about]
        await self.say(
            {"type": "http.response.start", "status": status, "headers": self._answer_headers}
        )

    async def send(self, piece: bytes, *, last: bool = False) -> None:
        """Sends a piece of the answer's body. Raises ClientStalled."""
        await self.say({"type": "http.response.body", "body": piece, "more_body": not last})

    async def answer(self, content: object, status: int = 200) -> None:
        await self.answer_whole(orjson.dumps(content), status, JSON)

    async def answer_whole(self, body: bytes, status: int, *headers: tuple[bytes, bytes]) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send(body, last=True)

    def offer(self, piece: bytes) -> bool:
        """Sends a piece of the answer's body. Returns whether the client keeps up: if it does not,
        `taken` is to be awaited before the next one."""
        return self._sends({"type": "http.response.body", "body": piece, "more_body": True})

    async def taken(self) -> None:
        """Returns once the client has taken nearly all of what it was sent. Raises
        ClientStalled."""
        if (behind := self._behind) is None:
            return
        self._behind = None
        waits_for, sending = behind
        try:
            async with asyncio.timeout(self.stalled_s):
                await resumed(sending, waits_for)
        except TimeoutError:
            raise self._stalled() from None

    async def say(self, message: Message) -> None:
        """Sends an ASGI message. Raises ClientStalled."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.has_ended = not message.get("more_body", False)
        if not self._sends(message):
            await self.taken()
        if self.has_ended and (until_taken := self.scope.get(UNTIL_TAKEN)) is not None:
            try:
                await until_taken(self.stalled_s)
            except TimeoutError:
                raise self._stalled() from None

    def _sends(self, message: Message) -> bool:
        """Whether a message is sent at once. Only a client that is behind is waited for, and a
        deadline for each message would cost."""
        sending = self._send(message).__await__()
        try:
            self._behind = next(sending), sending
        except StopIteration:
            return True
        return False

    def _stalled(self) -> ClientStalled:
        return ClientStalled(f"took nothing for {self.stalled_s:g} s")

    def cut(self) -> None:
        """Cuts the connection: to end the answer in order would say that it is complete."""
        if (cut := self.scope.get(CUT)) is not None:
            cut()


class Route(routing.Route):
    """A path with one method, and HEAD where that is GET."""

    def __init__(self, method: str, path: str, endpoint: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__(path, endpoint)
        self.methods = {method, "HEAD"} if method == "GET" else {method}

        async def app(scope: Scope, _: Receive, __: Send) -> None:
            await endpoint(scope[CLIENT])

        self.app = app
