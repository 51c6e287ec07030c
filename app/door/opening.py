"""The beginning of a stream, until it says something: until then another worker can take over, and
the client sees nothing of it. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
