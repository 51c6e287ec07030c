"""What a door has to see in an engine's answer: its first token, its usage, an error. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from app.core.errors import shown
from app.door.record import Usage

TAIL_BYTES = 4096
"""Usage comes at the end of an answer, followed by little else."""
MAX_EVENT_BYTES = 1024 * 1024
"""A longer one is passed on in parts, and may then reach a client that did not ask for it."""
MAX_TOKENS = 2**30
"""No request has as many. An engine that counts more is not believed."""
_EVENT_ENDS = (b"\n\n", b"\n\r\n")
_EVENT_END = re.compile(rb"\n\r?\n")
_BRACE = re.compile(rb"[{}]")
_DONE = b"\n\ndata: [DONE]\n\n"
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
_ENDS = re.compile(
    rb'(?:^|\n)data:\s*\[DONE\]|"finish_reason"\s*:\s*"|"stop_reason"\s*:\s*"'
    rb'|"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|failed|cancelled))"'
)


def fields_of(event: bytes) -> dict[str, Any] | None:
    """Those of its data; None: that is no object."""
    data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    with suppress(orjson.JSONDecodeError):
        fields = orjson.loads(data)
        return fields if isinstance(fields, dict) else None
    return None


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


def usage_in(tail: bytes, max_tokens: int = MAX_TOKENS) -> Usage | None:
    """The usage in the last bytes of an answer; None: there is none that could be true. max_tokens:
    that the engine can have read or written."""
    last = tail.rfind(b'"usage"')
    opening = _USAGE.match(tail, last) if last >= 0 else None
    if opening is None:
        return None
    ttft = _TTFT.search(tail)
    text = tail[opening.end() - 1 :]
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace.group() == b"{" else -1
        if depth == 0:
            with suppress(ValueError):
                usage = _usage(orjson.loads(text[: brace.end()]))
                if max(usage.prompt, usage.output) > max_tokens:
                    return None
                return replace(usage, ttft_s=float(ttft[1]) / 1000) if ttft else usage
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
        self._buffer = bytearray()

    def whole(self, piece: bytes) -> bytes:
        """The events that have ended by now, or a part of one that is too long to be held."""
        if not self._buffer and piece.endswith(b"\n\n"):
            return piece
        begin = max(0, len(self._buffer) - 2)
        self._buffer += piece
        marks = ((self._buffer.rfind(mark, begin), len(mark)) for mark in _EVENT_ENDS)
        end = max((at + length for at, length in marks if at >= 0), default=0)
        if not end:
            if len(self._buffer) <= self._max_bytes:
                return b""
            end = len(self._buffer)
        events = bytes(self._buffer[:end])
        del self._buffer[:end]
        return events

    @property
    def pending(self) -> bytes:
        """What of an event has come so far."""
        return bytes(self._buffer)

    def rest(self) -> bytes:
        """What is left when no more comes."""
        rest = bytes(self._buffer)
        self._buffer.clear()
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
        self.tail = b""

    has_first_token = False
    num_said = 0
    failed = False
    is_broken = False
    has_ended = True
    error = b""

    def passed(self, piece: bytes) -> bytes:
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
        return piece

    def rest(self) -> bytes:
        return b""


class Stream:
    """An answer that comes as events.

    drops_usage: the client did not ask for the event of usage, and does not get it. says_end: it
    ends with an event that says so.
    """

    def __init__(self, *, drops_usage: bool, says_end: bool = False) -> None:
        self.tail = b""
        self.has_first_token = False
        self.num_said = 0
        """Events with something of the answer in them: tokens, where each has one."""
        self.error = b""
        """The event that told one."""
        self.is_broken = False
        self._says_end = says_end
        self._latest = b"", b""
        self._drops_usage = drops_usage
        self._events = Events(MAX_EVENT_BYTES)

    @property
    def failed(self) -> bool:
        """Whether an event told an error."""
        return bool(self.error)

    @property
    def has_ended(self) -> bool:
        """Whether all of it has come, now that no more comes."""
        if not self._says_end or self.error:
            return True
        latest = b"".join((*self._latest, self._events.pending))
        return latest.endswith(_DONE) or _ENDS.search(latest) is not None

    def passed(self, piece: bytes) -> bytes:
        """What of the bytes so far is to be passed on now, unchanged but for what is dropped."""
        events = self._events.whole(piece)
        return self._passed(events) if events else b""

    def rest(self) -> bytes:
        """What is left when the answer has ended."""
        rest = self._events.rest()
        return self._passed(rest) if rest else b""

    def _passed(self, events: bytes) -> bytes:
        if not self.has_first_token:
            self.has_first_token = _DATA.search(_PREAMBLE.sub(b"", events)) is not None
        self._latest = self._latest[1], events
        self.num_said += len(_SAYS.findall(events))
        if b"error" in events or b"failed" in events:
            self.error = self.error or next(filter(tells_error, events_in(events)), b"")
        if b'"usage"' in events:
            self.tail = events[-TAIL_BYTES:]
            if self._drops_usage and _EMPTY.search(events):
                return _without_usage(events)
        return events


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
