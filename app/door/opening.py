"""The beginning of an engine's answer, by which it is judged. Until a stream says something,
another worker can take over, and the client sees nothing of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.core.failures import Failure
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.connection import EngineAnswer
from app.door.endings import FAILURES, MAY_END
from app.door.stream import Events, events_in, fields_of, reasons_in, tells_error

MAX_BYTES = 64 * 1024
MAX_EVENTS = 16
"""More is not held back: the client is to see that its answer has begun."""
_SAY_NOTHING = frozenset(
    (
        *("ping", "message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
        *("response.created", "response.queued", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    )
)
"""Types of events."""
_FOREIGN = re.compile(rb"\s*(?!data|event|id|retry|:)[^\s:]{4}")
"""What no line of an event begins with: JSON, or a page of what stands before the engine."""


class Opening:
    """What has come so far.

    is_over: whether it is to be passed on, or, with any of the others, asked of another worker.
    error: the event that told one. is_aborted: a choice ends by a failure. is_empty: it has ended,
    and said nothing. is_foreign: it is no stream of events at all.
    """

    def __init__(self) -> None:
        self.text = b""
        self.is_over = self.is_aborted = self.is_empty = self.is_foreign = False
        self.error = b""
        self._events = Events(MAX_BYTES)
        self._num_events = 0

    def take(self, piece: bytes) -> None:
        """piece: of the stream; b"": it has ended."""
        self.text += piece
        if not self._num_events and _FOREIGN.match(self.text):
            self.is_over = self.is_foreign = True
            return
        for event in events_in(self._events.whole(piece) if piece else self._events.rest()):
            self._num_events += 1
            if tells_error(event):
                self.is_over, self.error = True, event
                return
            reasons = reasons_in(event) if MAY_END.search(event) else {}
            if reasons or _says_something(event):
                self.is_over = True
                self.is_aborted = not FAILURES.isdisjoint(reasons.values())
                return
        if not piece:
            self.is_over = self.is_empty = True
        if len(self.text) > MAX_BYTES or self._num_events > MAX_EVENTS:
            self.is_over = True


def _says_something(event: bytes) -> bool:
    """Whether anything of the answer is in it: not in a comment, a preamble, or a role alone."""
    if b"data:" not in event:
        return False
    fields = fields_of(event)
    if fields is None:  # no API says anything in another form
        return False
    choices = fields.get("choices")
    if isinstance(choices, list):
        return any(map(_has_content, choices))
    return fields.get("type") not in _SAY_NOTHING


def _has_content(choice: object) -> bool:
    if not isinstance(choice, dict):
        return True
    delta: Mapping[str, Any] = choice.get("delta") or {}
    said = [value for name, value in delta.items() if name != "role"]
    return any((*said, choice.get("text")))


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
