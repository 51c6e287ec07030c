"""One request of a gateway, and the answer to it: an ASGI server's part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol
from urllib.parse import unquote

from starlette.types import Message, Scope

from app.door import blame
from app.door.answer.stream import Whole
from app.door.forwarding import Outgoing
from app.door.lifecycle import Parser
from app.edge.openai import CARRIER
from app.gateway import messages
from app.gateway.messages import Request, Response
from app.http.held import HELD, HeldBodies, HeldBody
from app.http.protocol import ON_GONE

UNKNOWN = "unknown"
"""Holder of bodies from unknown addresses."""
FIRST_BYTES = blame.MAX_PARSED_BYTES
"""Bytes of an answer that is no stream, by which it is judged."""
_DETAILS = "response.code_details"
_VIA_UPSTREAM = "via_upstream"


class GatewayCall(Protocol):
    async def read(self) -> bytes | None: ...

    async def write(self, message: bytes) -> None: ...


class GatewayRequest:
    """Reads what the gateway says, and says what an application answers.

    Until a worker's answer begins, the application's answer takes its place; from then on it is
    about that answer.
    """

    def __init__(self, call: GatewayCall, first: Request, held: HeldBodies) -> None:
        """first: the headers of the request."""
        self._call = call
        self.first = first
        self.headers = messages.headers_of(first.request_headers.headers)
        self.answer_mode: int = first.protocol_config.response_body_mode
        """How the gateway passes bodies of answers. One that does not say passes them."""
        if not first.HasField("protocol_config"):
            self.answer_mode = messages.FULL_DUPLEX_STREAMED
        self.has_trailers = False
        """Whether trailers came behind the body of the request."""
        self._has_body = not first.request_headers.end_of_stream
        self._ahead: asyncio.Task[Request | None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._is_handed_on = False
        self._has_answer = False
        self._start: Message = {}
        self._body: list[bytes] = []
        forwarded = dict(self.headers).get(b"x-forwarded-for", b"")
        self.client = forwarded.rpartition(b",")[2].strip().decode("latin-1") or UNKNOWN
        self.held = HeldBody(held, self.client)

    def scope(self, carrier: Callable[..., object]) -> Scope:
        """Returns the request as ASGI has it. carrier: see app/edge/openai.py."""
        about = dict(self.headers)
        path, _, query = about.get(b":path", b"/").partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": about.get(b":method", b"GET").decode("latin-1"),
            "scheme": about.get(b":scheme", b"http").decode("latin-1"),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [each for each in self.headers if not each[0].startswith(b":")],
            "client": (self.client, 0),
            "server": None,
            HELD: self.held,
            ON_GONE: self._watch,
            CARRIER: carrier,
        }

    async def read(self) -> Request | None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            said = await ahead
        else:
            said = await self._read()
        if said is not None and said.HasField("response_headers"):
            self._has_answer = True
        return said

    async def _read(self) -> Request | None:
        said = await self._call.read()
        return messages.parsed(said) if said is not None else None

    def _watch(self, on_gone: Callable[[], None] | None) -> None:
        """Have `on_gone` called once the gateway has hung up."""
        self._on_gone = on_gone
        if on_gone is not None and self._ahead is None:
            self._ahead = asyncio.ensure_future(self._read())
            self._ahead.add_done_callback(self._look)

    def _look(self, ahead: asyncio.Task[Request | None]) -> None:
        has_ended = not ahead.cancelled() and not ahead.exception() and ahead.result() is None
        if has_ended and self._on_gone is not None and not self._is_handed_on:
            self._on_gone()

    def close(self) -> None:
        self.held.clear()
        if self._ahead is not None:
            self._ahead.cancel()

    async def receive(self) -> Message:
        if not self._has_body:
            return {"type": "http.request", "body": b"", "more_body": False}
        said = await self.read()
        if said is None:
            return {"type": "http.disconnect"}
        piece = said.request_body.body
        self.has_trailers = said.HasField("request_trailers")
        self._has_body = said.HasField("request_body") and not said.request_body.end_of_stream
        self.held.add(len(piece))
        return {"type": "http.request", "body": piece, "more_body": self._has_body}

    async def hand_on(self, *said: Response) -> None:
        """Have a worker answer. said: its endpoint, and the body that it gets."""
        self._is_handed_on = True
        self.held.clear()
        for one in said:
            await self.say(one)

    def answers_itself(self) -> None:
        """Let the application's answer take the place of a worker's that has begun."""
        self._has_answer = False

    async def say(self, said: Response) -> None:
        await self._call.write(said.SerializeToString())

    async def send(self, message: Message) -> None:
        if self._has_answer:
            await self._answer(message)
        elif message["type"] == "http.response.start":
            self._start = message
        else:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                status, headers = self._start["status"], self._start["headers"]
                await self.say(messages.at_once(status, headers, b"".join(self._body)))

    async def _answer(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self.say(messages.answer_headers(message["status"], message["headers"]))
        elif self.answer_mode != messages.NONE:
            is_last = not message.get("more_body", False)
            piece = message.get("body", b"")
            await self.say(messages.answer_piece(piece, mode=self.answer_mode, is_last=is_last))


class GatewayAnswer:
    """An answer as far as it has come. No I/O.

    in_events: whether it is a stream. is_of_gateway: whether the gateway answered in a worker's
    place. sees_all: whether its body passes here. is_refusal: whether it is an error, in whose
    place another body can go on. first: its beginning, unless it is a stream.
    """

    def __init__(self, said: messages.Request, outgoing: Outgoing, mode: int) -> None:
        """said: its headers. mode: how the gateway passes bodies."""
        self.headers = messages.headers_of(said.response_headers.headers)
        about = dict(self.headers)
        status = about.get(b":status", b"")
        self.status = int(status) if status.isdigit() else 0
        details = messages.attribute_in(said, _DETAILS)
        self.is_of_gateway = details not in ("", _VIA_UPSTREAM)
        kind = blame.type_in(self.headers)
        self.in_events = self.status == 200 and kind == b"text/event-stream"
        self.sees_all = mode != messages.NONE
        self.is_refusal = self.status >= 400 and mode == messages.FULL_DUPLEX_STREAMED
        self.parser: Parser = outgoing.parser() if self.in_events else Whole()
        self.first = b""
        self._kept: list[bytes] = []
        self._num_kept = 0

    def passed(self, piece: bytes, *, is_last: bool) -> bytes:
        """Returns the part of an answer that goes on now."""
        if not self.in_events and len(self.first) < FIRST_BYTES:
            self.first += piece[: FIRST_BYTES - len(self.first)]
        passed = self.parser.passed(piece) if piece else b""
        return passed + self.parser.rest() if is_last else passed

    def goes_on(self, passed: bytes, *, is_last: bool) -> list[bytes]:
        """Returns the pieces that are sent now. An answer that is no stream waits until a message
        is full, as each costs a seventh of a decision."""
        self._kept.append(passed)
        self._num_kept += len(passed)
        if not (is_last or self.in_events or self._num_kept >= messages.CHUNK_BYTES):
            return []
        kept, self._kept, self._num_kept = self._kept, [], 0
        return kept

    @property
    def error(self) -> bytes:
        """The worker's own words about why it failed, if it said any."""
        return self.parser.error or (self.first if self.status >= 400 else b"")
