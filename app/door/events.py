"""What a door has to see in an engine's answer: its first token, its usage, an error. No I/O."""

from __future__ import annotations

import re
from typing import Any

import orjson

from app.door.lifecycle import Usage

TAIL_BYTES = 4096
"""Usage comes at the end of an answer, followed by little else."""
MAX_HELD_BYTES = 1024 * 1024
"""Of an event that has not ended. A longer one is passed on in parts, and may then reach a client
that did not ask for it."""
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_EMPTY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_DATA = re.compile(rb"(?:^|\n)data:")
_PREAMBLE = re.compile(rb"event: ?response\.(?:created|queued|in_progress)\r?\ndata:")
"""Said before there is a token."""
ERROR = re.compile(rb'(?:^|\n)data:\s*\{"(?:error|object"\s*:\s*"error)"')


def usage_in(tail: bytes) -> Usage | None:
    """The usage in the last bytes of an answer; None: there is none."""
    last = tail.rfind(b'"usage"')
    found = _USAGE.match(tail, last) if last >= 0 else None
    if found is None:
        return None
    text = tail[found.end() - 1 :]
    depth = 0
    for brace in re.finditer(rb"[{}]", text):
        depth += 1 if brace.group() == b"{" else -1
        if depth == 0:
            break
    else:
        return None
    try:
        return _usage(orjson.loads(text[: brace.end()]))
    except (orjson.JSONDecodeError, ValueError):
        return None


def _usage(values: dict[str, Any]) -> Usage:
    """Of any of the APIs: they name the counts differently. Raises ValueError."""
    details = values.get("prompt_tokens_details") or values.get("input_tokens_details") or {}
    prompt = values.get("prompt_tokens", values.get("input_tokens"))
    output = values.get("completion_tokens", values.get("output_tokens", 0))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = values.get("cache_read_input_tokens")
        if type(prompt) is int and type(cached) is int:  # Anthropic counts them apart
            prompt += cached + (values.get("cache_creation_input_tokens") or 0)
    if type(prompt) is not int or type(output) is not int or type(cached) not in (int, type(None)):
        raise ValueError(f"not a usage: {values}")
    return Usage(prompt, output, cached)


class Whole:
    """An answer that comes as one body."""

    def __init__(self) -> None:
        self.tail = b""

    has_first_token = False
    failed = False
    is_broken = False

    def passed(self, piece: bytes) -> bytes:
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
        return piece

    def rest(self) -> bytes:
        return b""


class Stream:
    """An answer that comes as events.

    drops_usage: the client did not ask for the event of usage, and does not get it.
    """

    def __init__(self, *, drops_usage: bool) -> None:
        self.tail = b""
        self.has_first_token = False
        self.failed = False
        """Whether an event told an error."""
        self.is_broken = False
        self._drops_usage = drops_usage
        self._held = b""

    def passed(self, piece: bytes) -> bytes:
        """What of the bytes so far is to be passed on now, unchanged but for what is dropped."""
        if self._held:
            piece = self._held + piece
            self._held = b""
        end = len(piece) if piece.endswith(b"\n\n") else piece.rfind(b"\n\n") + 2
        if end < len(piece):
            if end == 1:  # no event has ended
                if b"\r\n\r\n" in piece or len(piece) > MAX_HELD_BYTES:
                    return self._seen(piece)
                self._held = piece
                return b""
            self._held, piece = piece[end:], piece[:end]
        return self._seen(piece)

    def rest(self) -> bytes:
        """What is left when the answer has ended."""
        held, self._held = self._held, b""
        return self._seen(held) if held else b""

    def _seen(self, events: bytes) -> bytes:
        if not self.has_first_token:
            self.has_first_token = _DATA.search(_PREAMBLE.sub(b"", events)) is not None
        if b'"error"' in events and ERROR.search(events):
            self.failed = True
        if b'"usage"' in events:
            self.tail = events[-TAIL_BYTES:]
            if self._drops_usage and _EMPTY.search(events):
                return b"".join(
                    event + b"\n\n"
                    for event in events.split(b"\n\n")
                    if event and not (_USAGE.search(event) and _EMPTY.search(event))
                )
        return events
