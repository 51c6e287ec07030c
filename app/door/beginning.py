"""The beginning of an engine's answer, by which it is judged before anything goes to the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.core.failures import Failure
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.connection import EngineAnswer
from app.door.opening import Opening


@dataclass(slots=True)
class Beginning:
    """A first part of an answer. whole: all of it is. in_events: it is a stream.
    failure: why another worker is to be asked; None: it is one to pass on."""

    worker: WorkerInfo
    answer: EngineAnswer
    first: bytes
    whole: bool
    in_events: bool
    failure: Failure | None = None

    @property
    def says_why(self) -> bool:
        """Whether it tells an error, as its API has it, or as engines do."""
        is_error = self.failure is not None and self.failure.cause == blame.ERROR_EVENT
        return bool(self.first) and (is_error or self.answer.status >= 400)


async def opening_of(answer: EngineAnswer, within_s: float) -> tuple[bytes, Failure | None]:
    """What has come of a stream once it says something, and how it fails if that is an error. What
    says nothing for long, or at length, is passed on as it is."""
    loop, opening = asyncio.get_running_loop(), Opening()
    until_s = loop.time() + within_s
    while not opening.is_over:
        left_s = until_s - loop.time()
        if opening.text and left_s <= 0:
            break
        opening.take(await answer.read(left_s))
    if opening.is_empty:
        return opening.text, blame.wrong(blame.EMPTY)
    if opening.is_foreign:
        return opening.text, blame.wrong(blame.FOREIGN)
    if opening.is_aborted:
        return opening.text, blame.wrong(blame.ABORTED)
    return opening.text, blame.of_event(opening.error) if opening.error else None
