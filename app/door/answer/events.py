"""Events of an engine's answer, and what they or a whole answer tell: errors, reasons, usage. No
I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from app.core.errors import shown
from app.door.record import Usage

TAIL_BYTES = 4096
"""Bytes of an answer around its usage."""
MAX_TOKENS = 2**30
"""No request has as many. An engine that counts more is not believed."""
EVENT_ENDS = (b"\n\n", b"\n\r\n")
EVENT_END = re.compile(rb"\n\r?\n")
_BRACE = re.compile(rb"[{}]")
DONE = re.compile(rb"(?:^|\n)data:\s*\[DONE\]")
USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_TTFT = re.compile(rb'"time_to_first_token_ms"\s*:\s*(\d{1,9}(?:\.\d{1,20})?)')
"""Time to the first token in `metrics` of vLLM, where no quotes around it are escaped."""
_NAMES_ERROR = re.compile(rb"(?:\A|\n)event:\s*(?:error|response\.failed)\s*\n")
_ERROR_TYPES = ("error", "response.failed")
ABORTED, CUT = "aborted", "cut"
"""How an answer fails at its end: by a reason that is a failure, or as it ends without one."""
FAILURES = frozenset(("abort", "aborted", "cancelled", "canceled", "error", "failed"))
"""Reasons that are none of the request's: the engine shut down, was paused, or gave it up."""
ABORTS = re.compile(
    rb'"(?:finish_reason|stop_reason|status|type|reason)"\s*:\s*"(?:%b)"'
    % "|".join(sorted(FAILURES)).encode()
)
"""Matches in each whole answer with such a reason, and perhaps in texts."""
_REASON = re.compile(rb'_reason"\s*:\s*["{]')
_TYPE_ENDS = re.compile(
    rb'"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|cancelled))"'
)
_RESPONSE_ENDINGS = ("response.completed", "response.incomplete", "response.cancelled")


def fields_of(event: bytes) -> dict[str, Any] | None:
    """Returns the fields of an event's data; None if that is no object."""
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


def first_end(events: bytes) -> int:
    """Returns where the first one of these events may have the reason of a choice's end, or stand
    behind the last one: true of each that has, and of some texts. -1: none may. Patterns that begin
    alike are found ten times as fast as one of all."""
    found = [_REASON.search(events)]
    if b'"type"' in events:
        found.append(_TYPE_ENDS.search(events))
    at = [end.start() for end in found if end is not None]
    if (done := events.find(b"[DONE]")) >= 0:
        at.append(done)
    return min(at, default=-1)


def tokens_in(events: bytes) -> list[dict[str, Any]] | None:
    """Returns the choice of each of these events if all are of a chat or a completion, and say more
    of its only choice, as nearly all do, and nothing else; None: some may tell more. To parse an
    event takes as long as to look for three words in it."""
    if not events.startswith(b"data: {"):
        return None
    try:
        each = [orjson.loads(events[6:])]
    except orjson.JSONDecodeError:  # several of them, or no JSON
        try:
            each = orjson.loads(b"[%b]" % events[6:].replace(b"}\n\ndata: {", b"},{"))
        except orjson.JSONDecodeError:
            return None
    told = []
    for fields in each:
        choices = fields.get("choices")
        if type(choices) is not list or len(choices) != 1:
            return None
        choice = choices[0]
        if type(choice) is not dict or choice.get("finish_reason"):
            return None
        if fields.get("usage") or "error" in fields:
            return None
        told.append(choice)
    return told


def said_in(choice: Mapping[str, Any]) -> tuple[object, object]:
    """Returns what a choice says, and what it thinks; None or "": nothing."""
    delta = choice.get("delta")
    if type(delta) is not dict:
        return choice.get("text"), None
    return delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")


def reasons_in(event: bytes) -> dict[int, str]:
    """Returns the reasons of the choices that end with an event: see `reasons_of`."""
    return reasons_of(fields_of(event) or {}) if first_end(event) >= 0 else {}


def tells_error(event: bytes) -> bool:
    """Whether an event tells an error, in any of the dialects."""
    if b"error" not in event and b"failed" not in event:
        return False
    return _NAMES_ERROR.search(event) is not None or is_error(fields_of(event) or {})


def is_error(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of an event, or of a whole answer, tell an error in its place."""
    return (
        bool(fields.get("error"))
        or fields.get("object") == "error"
        or fields.get("type") in _ERROR_TYPES
        or (fields.get("object") == "response" and fields.get("status") == "failed")
    )


def usage_in(text: bytes, max_tokens: int = MAX_TOKENS, start: bytes = b"") -> Usage | None:
    """Returns the last usage in `text`, or None if none could be true. max_tokens: that the engine
    can have read or written. start: what a stream said as it began, which counts where the last
    usage says 0, or nothing."""
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
    for usage in USAGE_OBJECT.finditer(text):
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
    """Returns a usage as any of the APIs names its counts. Raises ValueError."""
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


def reasons_of(fields: Mapping[str, Any]) -> dict[int, str]:
    """Returns the reason of each choice that ends with an event, or with a whole answer, by the
    choice's number. A choice that goes on has none; nor has one whose reason is empty."""
    choices = fields.get("choices")
    if isinstance(choices, list):
        reasons = {}
        for at, choice in enumerate(choices):
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(reason, dict):  # as SGLang names it on its own path
                reason = reason.get("type")
            if reason:
                reasons[choice.get("index", at)] = str(reason)
        return reasons
    kind, response = fields.get("type"), fields.get("response")
    if fields.get("object") == "response":
        response = fields
    elif kind not in _RESPONSE_ENDINGS:
        told = fields.get("delta") if kind == "message_delta" else fields
        reason = told.get("stop_reason") if isinstance(told, dict) else None
        return {0: str(reason)} if kind in ("message", "message_delta") and reason else {}
    response = response if isinstance(response, dict) else {}
    details, status = response.get("incomplete_details"), response.get("status")
    if status == "incomplete" and isinstance(details, dict):
        status = details.get("reason") or status
    return {0: str(status or kind).removeprefix("response.")}


class Events:
    """Puts events together from the pieces that they come in. max_bytes: of one.

    Each piece is looked through once, however long the event is that it is of.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held = bytearray()
        """The part of an event that has come so far."""

    def whole(self, piece: bytes) -> bytes:
        """Returns the events that have ended by now, or a part of one that is too long to be
        held."""
        begin = max(0, len(self.held) - 2)
        self.held += piece
        marks = ((self.held.rfind(mark, begin), len(mark)) for mark in EVENT_ENDS)
        end = max((at + length for at, length in marks if at >= 0), default=0)
        if not end:
            if len(self.held) <= self._max_bytes:
                return b""
            end = len(self.held)
        events = bytes(self.held[:end])
        del self.held[:end]
        return events

    def rest(self) -> bytes:
        rest = bytes(self.held)
        self.held.clear()
        return rest


def events_in(text: bytes) -> Iterator[bytes]:
    """Yields each event, with the blank line that ends it."""
    begin = 0
    for end in EVENT_END.finditer(text):
        yield text[begin : end.end()]
        begin = end.end()
    if begin < len(text):
        yield text[begin:]
