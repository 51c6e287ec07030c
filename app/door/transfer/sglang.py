"""Prefill and decode as SGLang divides them: both engines get the same request at once.

The body names a room, and the source's bootstrap server, at which the two find each other. The
client gets the answer of the one that decodes; what the other says is of no interest. Neither can
finish without the other, so if one fails, the other is told to abort.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from app.core.types import new_id
from app.core.worker_report import WorkerInfo
from app.door import after_failure
from app.door.members import Headers
from app.door.transfer.sources import Call, Handover, SourceFailed, of_rank, source_failed
from app.door.upstream import EngineAnswer, Upstream, UpstreamError

ABORT_S = 2.0

T = TypeVar("T")


ROOM_BITS = 62
"""Of the number of a room, which has 63. SGLang gives the sequences of one request, as with `n` or
several prompts, the rooms from that number on; from a list of rooms it would give those of `n` the
same one (io_struct.py, 0.5.23)."""


def handover_of(source: WorkerInfo) -> Handover:
    return Handover(
        members={
            "bootstrap_host": urlsplit(source.address).hostname,
            "bootstrap_port": source.bootstrap_port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
            "rid": new_id(),
        }
    )


class Meetings:
    """Requests that two engines work on at once."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Future[Any]] = set()
        """What goes on once a target has answered, or has not."""

    async def beside(
        self,
        call: Call,
        target: WorkerInfo,
        handover: Handover,
        decoding: Coroutine[Any, Any, EngineAnswer],
        *,
        watch: AbstractContextManager[None],
        on_computed: Callable[[], None],
    ) -> EngineAnswer:
        """The beginning of the target's answer, while the source computes the prompt.

        call: of the source. decoding: waits for that beginning. watch: raises UpstreamBroken within
        it once the source is gone. on_computed: called when the source's answer has ended. Raises
        SourceFailed, and what `decoding` raises.
        """
        computing = self._kept(self._compute(call, handover, watch, on_computed))
        answering = self._kept(decoding)
        answer: EngineAnswer | None = None
        try:
            await asyncio.wait((computing, answering), return_when=asyncio.FIRST_COMPLETED)
            if computing.done():
                computing.result()
            answer = await answering
        finally:
            if answer is None or answer.status >= 400:
                rid = orjson.dumps({"rid": handover.members["rid"]})
                for task, worker in ((computing, call.source.worker), (answering, target)):
                    task.cancel()
                    self._kept(self._abort(worker, call.headers, rid))
        return answer

    def _kept(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it was told; else the target's answer tells all

    async def _compute(
        self,
        call: Call,
        handover: Handover,
        watch: AbstractContextManager[None],
        on_computed: Callable[[], None],
    ) -> None:
        """Raises SourceFailed."""
        source = call.source.worker
        try:
            with watch:
                answer = await self._upstream.send(
                    source.address,
                    call.path,
                    [*call.headers, *of_rank(source)],
                    call.outgoing.for_worker(source, members=handover.members),
                    connect_s=call.connect_s,
                    answer_s=call.answer_s,
                )
                if answer.status < 400:
                    while await answer.read(call.answer_s):
                        pass
        except UpstreamError as error:
            raise source_failed(error) from None
        answer.abort()
        failure = after_failure.of_status(
            answer.status, answer.headers, model=str(call.outgoing.asked.model or "")
        )
        if failure is not None:
            raise SourceFailed(f"answered {answer.status}", failure)
        on_computed()

    async def _abort(self, worker: WorkerInfo, headers: Headers, rid: bytes) -> None:
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
