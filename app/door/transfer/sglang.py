"""Prefill and decode as SGLang divides them: both engines get the same request at once.

The body names a room, and the source's bootstrap server, at which the two find each other. The
client gets the answer of the one that decodes; what the other says is of no interest. Neither can
finish without the other, so if one fails, the other is told to abort.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from app.core.types import new_id
from app.core.worker_report import WorkerInfo
from app.door.engine.connection import EngineAnswer, UpstreamError
from app.door.engine.upstream import Upstream
from app.door.forwarding import Headers
from app.door.transfer.base import SourceCall, Transfer, failed

ABORT_S = 2.0

T = TypeVar("T")


ROOM_BITS = 62
"""Bits of a room's number, which has 63. SGLang gives the sequences of one request the rooms from
that number on; from a list of rooms it would give those of `n` the same one (io_struct.py,
0.5.23)."""


class Sglang:
    """A TransferProtocol."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Future[Any]] = set()
        """Work that goes on once a target has answered, or has not."""

    async def begin(self, call: SourceCall) -> Transfer:
        members = {
            "bootstrap_host": urlsplit(call.source.address).hostname,
            "bootstrap_port": call.source.bootstrap_port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
            "rid": new_id(),
        }
        return _AtOnce(members=members, protocol=self, call=call)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins work, and sees it through."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it was told; else the target's answer tells all

    async def compute(self, call: SourceCall, body: bytes) -> None:
        """Has the source compute the prompt. Raises SourceFailed."""
        try:
            with call.watch():
                answer = await call.send(self._upstream, body)
                if answer.status < 400:
                    while await answer.read(call.answer_s):
                        pass
        except UpstreamError as error:
            raise failed(error) from None
        answer.abort()
        call.check(answer)
        call.on_computed()

    async def abort(self, worker: WorkerInfo, headers: Headers, rid: bytes) -> None:
        with suppress(UpstreamError):
            answer = await self._upstream.send(
                worker.address,
                "/abort_request",
                [*headers],
                rid,
                connect_s=ABORT_S,
                answer_s=ABORT_S,
            )
            answer.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtOnce(Transfer):
    """The source computes the prompt while the target's answer is waited for."""

    protocol: Sglang
    call: SourceCall

    async def answer(self, answering: Coroutine[Any, Any, EngineAnswer]) -> EngineAnswer:
        call, protocol = self.call, self.protocol
        body = call.outgoing.for_worker(call.source, members=self.members)
        computing = protocol.start(protocol.compute(call, body))
        decoding = protocol.start(answering)
        answer: EngineAnswer | None = None
        try:
            await asyncio.wait((computing, decoding), return_when=asyncio.FIRST_COMPLETED)
            if computing.done():
                computing.result()
            answer = await decoding
        finally:
            if answer is None or answer.status >= 400:
                rid = orjson.dumps({"rid": self.members["rid"]})
                for task, worker in ((computing, call.source), (decoding, call.target)):
                    task.cancel()
                    protocol.start(protocol.abort(worker, call.headers, rid))
        return answer
