"""An answer as its client gets it: whole, or as a stream, which is judged by its opening."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any

from app.core.failures import Failure
from app.door import blame
from app.door.answer.events import (
    ABORTED,
    CUT,
    DONE,
    EVENT_END,
    EVENT_ENDS,
    FAILURES,
    TAIL_BYTES,
    USAGE_OBJECT,
    Events,
    events_in,
    fields_of,
    first_end,
    reasons_in,
    reasons_of,
    said_in,
    tells_error,
    tokens_in,
)
from app.door.engine.connection import EngineAnswer

MAX_EVENT_BYTES = 1024 * 1024
"""A longer event is passed on in parts, and may then reach a client that did not ask for it."""
MAX_BYTES, MAX_EVENTS = 64 * 1024, 16
"""An opening that is longer is not held back: its client is to see that an answer has begun."""
_EMPTY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_SAYS = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json|delta)"\s*:\s*'
    rb'"[^"\n][^\n]*'
)
"""An event with something of the answer in it, whatever its API: a token, or several."""
_DATA = re.compile(rb"(?:^|\n)data:")
_PREAMBLE = re.compile(rb"event: ?response\.(?:created|queued|in_progress)\r?\ndata:")
"""Said before there is a token."""
_SAY_NOTHING = frozenset(
    (
        *("ping", "message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
        *("response.created", "response.queued", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    )
)
"""Types of events without anything of the answer."""
_FOREIGN = re.compile(rb"\s*(?!data|event|id|retry|:)[^\s:]{4}")
"""Beginning of text that is no event: JSON, or a page of what stands before the engine."""


class Whole:
    """An answer that comes as one body."""

    start = error = b""
    broken = ""
    num_said = 0
    has_first_token = is_finished = False
    has_ended = True

    def __init__(self) -> None:
        self.tail = self._latest = b""

    def passed(self, piece: bytes) -> bytes:
        text = self._latest + piece
        self._latest = text[-TAIL_BYTES:]
        for usage in USAGE_OBJECT.finditer(text):
            self.tail = text[usage.start() : usage.start() + TAIL_BYTES]
        return piece

    def rest(self) -> bytes:
        return b""


class Stream:
    """An answer that comes as events.

    drops_usage: the client did not ask for the event of usage, and does not get it. says_end: each
    of `num_choices` choices ends with a reason.

    start, tail: where the first usage stands, if that is as a message begins, and the last one.
    num_said: events with something of the answer, which are its tokens if each has one. error: the
    event that told one. broken: ABORTED or CUT once the engine has ended the answer so; nothing is
    passed on from there. is_finished: each choice has come to its end.
    """

    def __init__(self, *, drops_usage: bool, says_end: bool = False, num_choices: int = 1) -> None:
        self.start = self.tail = self.error = b""
        self.has_first_token = self.is_finished = False
        self.num_said = 0
        self.broken = ""
        self._says_end = says_end
        self._num_choices = num_choices
        self._begun, self._ended = set[int](), set[int]()
        """Choices. If only one was asked for, those that have begun are not looked for."""
        self._drops_usage = drops_usage
        self._events: Events | None = None
        """Puts parts of events together, once a piece ends within one."""

    @property
    def has_ended(self) -> bool:
        """Whether all of the answer has come, now that no more comes."""
        if self._says_end and not self.error and not self.is_finished:
            held = b"" if self._events is None else bytes(self._events.held)
            self._until_broken(held + b"\n\n")
        return not self._says_end or bool(self.error) or self.is_finished

    def rest(self) -> bytes:
        """Returns what is left when the answer has ended."""
        events = self._events
        return b"" if events is None or not events.held else self._seen(events.rest())

    def passed(self, piece: bytes) -> bytes:
        """Returns what is to be passed on once `piece` has come, with nothing changed but what is
        dropped."""
        if self._events is None and (not piece or piece.endswith(b"\n\n")):
            return self._seen(piece)
        self._events = self._events or Events(MAX_EVENT_BYTES)
        return self._seen(self._events.whole(piece))

    def _seen(self, events: bytes) -> bytes:
        if not events:
            return b""
        if self._num_choices == 1 and not self.broken and (told := tokens_in(events)) is not None:
            self.has_first_token = True
            num_said = 0
            for choice in told:
                says, thinks = said_in(choice)
                if says or thinks:
                    num_said += 1
            if num_said < len(told):  # or parts of a call of a tool
                num_said = len(_SAYS.findall(events))
            self.num_said += num_said
            return events
        if b"error" in events or b"failed" in events:
            self.error = self.error or next(filter(tells_error, events_in(events)), b"")
        if self._says_end:
            events = self._until_broken(events)
        if not self.has_first_token:
            self.has_first_token = _DATA.search(_PREAMBLE.sub(b"", events)) is not None
        self.num_said += len(_SAYS.findall(events))
        if b'"usage"' in events:
            for usage in USAGE_OBJECT.finditer(events):
                at = usage.start()
                if not self.start and b"message_start" in events:
                    self.start = events[at : at + TAIL_BYTES].partition(b"\n")[0]
                self.tail = events[max(0, at - TAIL_BYTES) : at + TAIL_BYTES]
            if self._drops_usage and _EMPTY.search(events):
                return _without_usage(events)
        return events

    def _until_broken(self, events: bytes) -> bytes:
        """Notes which choices end by these events. Returns those before the one by which the answer
        breaks off."""
        begin, first = 0, 0 if self._num_choices > 1 else first_end(events)
        if first < 0 and not self.broken and events.endswith(EVENT_ENDS):
            return events
        for end in EVENT_END.finditer(events):
            event = events[begin : end.end()]
            if 0 <= first < end.end() and not (self.broken or self.error):
                self._note_end(event)
            if self.broken:
                self.is_finished = False
                return events[:begin]
            begin = end.end()
        # A part of an event that is too long to be held tells nothing of its end.
        self._says_end = self._says_end and begin == len(events)
        return b"" if self.broken else events

    def _note_end(self, event: bytes) -> None:
        is_done = DONE.search(event) is not None
        fields = None if is_done else fields_of(event)
        if fields is not None:
            reasons = reasons_of(fields)
            self._ended.update(reasons)
            if self._num_choices > 1:
                self._begun.update(_numbers_of(fields))
            is_done = fields.get("type") == "message_stop"
            self.broken = "" if FAILURES.isdisjoint(reasons.values()) else ABORTED
        are_over = self._begun <= self._ended and len(self._ended) > 0
        if is_done and not are_over:
            self.broken = CUT
        self.is_finished = are_over and (is_done or len(self._ended) >= self._num_choices)


def _numbers_of(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yields the number of each choice that the fields of an event tell of."""
    choices = fields.get("choices")
    for at, choice in enumerate(choices if isinstance(choices, list) else ()):
        yield choice.get("index", at) if isinstance(choice, dict) else at


def _without_usage(events: bytes) -> bytes:
    """Returns the events but for those of usage alone, whose ends are looked for around it."""
    kept, begin = [], 0
    while (at := events.find(b'"usage"', begin)) >= 0:
        ends = ((events.rfind(mark, begin, at), len(mark)) for mark in EVENT_ENDS)
        start = max((end + length for end, length in ends if end >= 0), default=begin)
        stop = end.end() if (end := EVENT_END.search(events, at)) else len(events)
        event = events[start:stop]
        is_dropped = USAGE_OBJECT.search(event) and _EMPTY.search(event)
        kept.append(events[begin : start if is_dropped else stop])
        begin = stop
    return b"".join([*kept, events[begin:]])


class Opening:
    """The beginning of a stream, until it says something: until then another worker can take over,
    and the client sees nothing of it.

    is_over: the opening is to be passed on or, if one of the others is set, asked of another
    worker. error: the event that told one. is_aborted: a choice ends by a failure. is_empty: the
    stream has ended and said nothing. is_foreign: it is no stream of events.
    """

    def __init__(self) -> None:
        self.text = b""
        self.is_over = self.is_aborted = self.is_empty = self.is_foreign = False
        self.error = b""
        self._events = Events(MAX_BYTES)
        self._num_events = 0

    def take(self, piece: bytes) -> None:
        """Takes in a piece of the stream; b"" at its end."""
        self.text += piece
        if not self._num_events and _FOREIGN.match(self.text):
            self.is_over = self.is_foreign = True
            return
        for event in events_in(self._events.whole(piece) if piece else self._events.rest()):
            self._num_events += 1
            if tells_error(event):
                self.is_over, self.error = True, event
                return
            reasons = reasons_in(event)
            if reasons or _says_something(event):
                self.is_over = True
                self.is_aborted = not FAILURES.isdisjoint(reasons.values())
                return
        if not piece:
            self.is_over = self.is_empty = True
        if len(self.text) > MAX_BYTES or self._num_events > MAX_EVENTS:
            self.is_over = True


def _says_something(event: bytes) -> bool:
    """Whether an event has anything of the answer: no comment, preamble or role alone."""
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


def _begins_well(text: bytes) -> bool:
    """Whether a first piece has events of a chat or completion of which one says something, before
    any that ends a choice: so most streams begin, and an Opening would be over by it as well."""
    if not text.startswith(b"data:") or b'"choices"' not in text:
        return False
    if b"error" in text or b"failed" in text or (said := _SAYS.search(text)) is None:
        return False
    end = EVENT_END.search(text, said.end())
    return end is not None and first_end(text[: end.end()]) < 0


async def opening_of(answer: EngineAnswer, within_s: float) -> tuple[bytes, Failure | None]:
    """Returns what has come of a stream once it says something, and how it fails if that is an
    error. What says nothing for long, or at length, is passed on as it is."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    piece = await answer.read(within_s)
    if _begins_well(piece):
        return piece, None
    opening = Opening()
    opening.take(piece)
    while not opening.is_over:
        left_s = until_s - loop.time()
        if opening.text and left_s <= 0:
            break
        opening.take(await answer.read(left_s))
    if opening.error:
        return opening.text, blame.of_event(opening.error)
    why = {
        blame.EMPTY: opening.is_empty,
        blame.FOREIGN: opening.is_foreign,
        ABORTED: opening.is_aborted,
    }
    failure = next((blame.wrong(cause) for cause, is_so in why.items() if is_so), None)
    return opening.text, failure
