"""What a door has to see in an engine's answer: its first token, its usage, an error. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from app.core.errors import shown
from app.door.endings import ABORTED, CUT, FAILURES, MAY_END, reasons_of
from app.door.record import Usage

TAIL_BYTES = 4096
"""Of an answer, around its usage."""
MAX_EVENT_BYTES = 1024 * 1024
"""A longer one is passed on in parts, and may then reach a client that did not ask for it."""
MAX_TOKENS = 2**30
"""No request has as many. An engine that counts more is not believed."""
_EVENT_ENDS = (b"\n\n", b"\n\r\n")
_EVENT_END = re.compile(rb"\n\r?\n")
_BRACE = re.compile(rb"[{}]")
DONE = re.compile(rb"(?:^|\n)data:\s*\[DONE\]")
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_TTFT = re.compile(rb'"time_to_first_token_ms"\s*:\s*(\d{1,9}(?:\.\d{1,20})?)')
"""As vLLM says it in `metrics`, and only in an answer that no quotes are escaped in around it."""
_EMPTY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_SAYS = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json|delta)"\s*:\s*'
    rb'"[^"\n][^\n]*'
)
"""An event with something of the answer in it, whatever its API: a token, or several."""
_DATA = re.compile(rb"(?:^|\n)data:")
_PREAMBLE = re.compile(rb"event: ?response\.(?:created|queued|in_progress)\r?\ndata:")
"""Said before there is a token."""
_NAMES_ERROR = re.compile(rb"(?:\A|\n)event:\s*(?:error|response\.failed)\s*\n")
_TYPES_OF_ERROR = ("error", "response.failed")


def fields_of(event: bytes) -> dict[str, Any] | None:
    """Those of its data; None: that is no object."""
    data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    with suppress(ValueError):
        fields = parsed(data)
        return fields if isinstance(fields, dict) else None
    return None


def parsed(text: bytes) -> Any:
    """Returns what JSON says, as engines in Python write it: with NaN, and halves of characters.
    None: it is nested too deep to tell. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text.decode(errors="replace"))
        except RecursionError:
            return None


def reasons_in(event: bytes) -> dict[int, str]:
    """Returns the reasons of the choices that end with an event: see `reasons_of`."""
    return reasons_of(fields_of(event) or {}) if MAY_END.search(event) else {}


def tells_error(event: bytes) -> bool:
    """Whether it does, in any of the dialects."""
    if b"error" not in event and b"failed" not in event:
        return False
    return _NAMES_ERROR.search(event) is not None or is_error(fields_of(event) or {})


def is_error(fields: Mapping[str, Any]) -> bool:
    """Whether they are of an event, or of a whole answer, that tells an error instead of one."""
    return (
        bool(fields.get("error"))
        or fields.get("object") == "error"
        or fields.get("type") in _TYPES_OF_ERROR
        or (fields.get("object") == "response" and fields.get("status") == "failed")
    )


def usage_in(text: bytes, max_tokens: int = MAX_TOKENS, start: bytes = b"") -> Usage | None:
    """The last usage in `text`; None: there is none that could be true. max_tokens: that the engine
    can have read or written. start: with what a stream said as it began, which counts where the
    last one says 0, or nothing."""
    last, first = _usage_object(text), _usage_object(start) if start else None
    with suppress(ValueError):
        if last is not None:
            said = {
                name: count for name, count in last.items() if count or name not in (first or ())
            }
            usage = _usage({**(first or {}), **said})
            ttft = _TTFT.search(text[-2 * TAIL_BYTES :])
            if max(usage.prompt, usage.output) <= max_tokens:
                return replace(usage, ttft_s=float(ttft[1]) / 1000) if ttft else usage
    return None


def _usage_object(text: bytes) -> dict[str, Any] | None:
    """Returns the last one in `text`, if all of it is there."""
    begin = -1
    for usage in _USAGE.finditer(text):
        begin = usage.end() - 1
    depth = 0
    for brace in _BRACE.finditer(text, begin) if begin >= 0 else ():
        depth += 1 if brace.group() == b"{" else -1
        if depth == 0:
            with suppress(orjson.JSONDecodeError):
                values: dict[str, Any] = orjson.loads(text[begin : brace.end()])
                return values
            break
    return None


def _usage(values: dict[str, Any]) -> Usage:
    """Of any of the APIs: they name the counts differently. Raises ValueError."""
    details = values.get("prompt_tokens_details") or values.get("input_tokens_details")
    prompt = _count(values.get("prompt_tokens", values.get("input_tokens")))
    output = _count(values.get("completion_tokens", values.get("output_tokens", 0)))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = values.get("cache_read_input_tokens")
        if cached is not None:  # Anthropic counts them apart
            prompt += _count(cached) + _count(values.get("cache_creation_input_tokens") or 0)
    if cached is not None and _count(cached) > prompt:
        raise ValueError(f"{cached} of {prompt} tokens cached")
    return Usage(prompt, output, cached)


def _count(value: object) -> int:
    """Raises ValueError."""
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"not a number of tokens: {shown(value)}")
    return value


class Events:
    """Puts events together from the pieces that they come in. max_bytes: of one.

    Each piece is looked through once, however long the event is that it is of.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held = bytearray()
        """What of an event has come so far."""

    def whole(self, piece: bytes) -> bytes:
        """The events that have ended by now, or a part of one that is too long to be held."""
        begin = max(0, len(self.held) - 2)
        self.held += piece
        marks = ((self.held.rfind(mark, begin), len(mark)) for mark in _EVENT_ENDS)
        end = max((at + length for at, length in marks if at >= 0), default=0)
        if not end:
            if len(self.held) <= self._max_bytes:
                return b""
            end = len(self.held)
        events = bytes(self.held[:end])
        del self.held[:end]
        return events

    def rest(self) -> bytes:
        """What is left when no more comes."""
        rest = bytes(self.held)
        self.held.clear()
        return rest


def events_in(text: bytes) -> Iterator[bytes]:
    """Each event, with the blank line that ends it."""
    begin = 0
    for end in _EVENT_END.finditer(text):
        yield text[begin : end.end()]
        begin = end.end()
    if begin < len(text):
        yield text[begin:]


class Whole:
    """An answer that comes as one body."""

    def __init__(self) -> None:
        self.tail = self._latest = b""

    start = b""
    has_first_token = False
    num_said = 0
    broken = ""
    is_finished = False
    has_ended = True
    error = b""

    def passed(self, piece: bytes) -> bytes:
        text = self._latest + piece
        self._latest = text[-TAIL_BYTES:]
        for usage in _USAGE.finditer(text):
            self.tail = text[usage.start() : usage.start() + TAIL_BYTES]
        return piece

    def rest(self) -> bytes:
        return b""


class Stream:
    """An answer that comes as events.

    drops_usage: the client did not ask for the event of usage, and does not get it. says_end: each
    choice ends with a reason. num_choices: that were asked for.
    """

    def __init__(self, *, drops_usage: bool, says_end: bool = False, num_choices: int = 1) -> None:
        self.start = self.tail = b""
        """Where its usage stands that it said first, if as a message began, and last."""
        self.has_first_token = False
        self.num_said = 0
        """Events with something of the answer in them: tokens, where each has one."""
        self.error = b""
        """The event that told one."""
        self.broken = ""
        """ABORTED or CUT, once its engine has ended it so: from there on, nothing is passed on."""
        self.is_finished = False
        """Whether each choice has come to its end."""
        self._says_end = says_end
        self._num_choices = num_choices
        self._begun, self._ended = set[int](), set[int]()
        """Choices. Where only one was asked for, those that have begun are not looked for."""
        self._drops_usage = drops_usage
        self._events = Events(MAX_EVENT_BYTES)

    @property
    def has_ended(self) -> bool:
        """Whether all of it has come, now that no more comes."""
        if self._says_end and not self.error and not self.is_finished:
            self._until_broken(bytes(self._events.held) + b"\n\n")
        return not self._says_end or bool(self.error) or self.is_finished

    def rest(self) -> bytes:
        """What is left when the answer has ended."""
        return self.passed(self._events.rest(), is_rest=True) if self._events.held else b""

    def passed(self, piece: bytes, *, is_rest: bool = False) -> bytes:
        """What of the bytes so far is to be passed on now, unchanged but for what is dropped."""
        is_whole = is_rest or (piece.endswith(b"\n\n") and not self._events.held)
        events = piece if is_whole else self._events.whole(piece)
        if not events:
            return b""
        if b"error" in events or b"failed" in events:
            self.error = self.error or next(filter(tells_error, events_in(events)), b"")
        if self._says_end and (self._num_choices > 1 or self.broken or MAY_END.search(events)):
            events = self._until_broken(events)
        if not self.has_first_token:
            self.has_first_token = _DATA.search(_PREAMBLE.sub(b"", events)) is not None
        self.num_said += len(_SAYS.findall(events))
        if b'"usage"' in events:
            for usage in _USAGE.finditer(events):
                at = usage.start()
                if not self.start and b"message_start" in events:
                    self.start = events[at : at + TAIL_BYTES].partition(b"\n")[0]
                self.tail = events[max(0, at - TAIL_BYTES) : at + TAIL_BYTES]
            if self._drops_usage and _EMPTY.search(events):
                return _without_usage(events)
        return events

    def _until_broken(self, events: bytes) -> bytes:
        """Note which choices end by these events; returns those before the first one by which the
        answer breaks off."""
        begin, counts = 0, self._num_choices > 1
        for end in _EVENT_END.finditer(events):
            event = events[begin : end.end()]
            if not (self.broken or self.error) and (counts or MAY_END.search(event)):
                is_done = DONE.search(event) is not None
                fields = None if is_done else fields_of(event)
                if fields is not None:
                    reasons = reasons_of(fields)
                    self._ended.update(reasons)
                    self._begun.update(_numbers_of(fields) if counts else ())
                    is_done = fields.get("type") == "message_stop"
                    self.broken = "" if FAILURES.isdisjoint(reasons.values()) else ABORTED
                are_over = self._begun <= self._ended and len(self._ended) > 0
                if is_done and not are_over:
                    self.broken = CUT
                self.is_finished = are_over and (is_done or len(self._ended) >= self._num_choices)
            if self.broken:
                self.is_finished = False
                return events[:begin]
            begin = end.end()
        # Nobody can tell what a part of an event that is too long to be held would say.
        self._says_end = self._says_end and begin == len(events)
        return b"" if self.broken else events


def _numbers_of(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yields the number of each choice that is said something of."""
    choices = fields.get("choices")
    for at, choice in enumerate(choices if isinstance(choices, list) else ()):
        yield choice.get("index", at) if isinstance(choice, dict) else at


def _without_usage(events: bytes) -> bytes:
    """The events but for those of usage alone. Only around that is looked for where events end."""
    kept, begin = [], 0
    while (at := events.find(b'"usage"', begin)) >= 0:
        ends = ((events.rfind(mark, begin, at), len(mark)) for mark in _EVENT_ENDS)
        start = max((end + length for end, length in ends if end >= 0), default=begin)
        stop = end.end() if (end := _EVENT_END.search(events, at)) else len(events)
        event = events[start:stop]
        is_dropped = _USAGE.search(event) and _EMPTY.search(event)
        kept.append(events[begin : start if is_dropped else stop])
        begin = stop
    return b"".join([*kept, events[begin:]])
