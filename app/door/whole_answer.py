"""Whether what an engine sent, and not in events, is an answer of its API. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from app.core.failures import Failure
from app.door import blame
from app.door.asked import AUDIO
from app.door.endings import ABORTS, FAILURES, reasons_of
from app.door.stream import is_error, parsed

MAX_PARSED_BYTES = 64 * 1024
"""What is larger is not parsed, as that would take milliseconds: it only has to begin and end like
JSON."""
_OPENS, _CLOSES = (b"{", b"["), (b"}", b"]")
_OF_ERRORS = (b'"error"', b'"failed"')
_HAS: Mapping[str, str] = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/messages": "content",
    "/v1/responses": "output",
}
"""Path -> the member without which there is no answer. Of others, engines have their own."""
_MAY_BE_BINARY = ("/v1/embeddings",)

Headers = Sequence[tuple[bytes, bytes]]


def type_in(headers: Headers) -> bytes:
    """The content type; b"": none is said. headers: names in lower case."""
    said = next((value for name, value in headers if name == b"content-type"), b"")
    return said.partition(b";")[0].strip().lower()


def is_json(headers: Headers) -> bool:
    kind = type_in(headers)
    return kind == b"application/json" or kind.endswith(b"+json")


def _is_binary(headers: Headers) -> bool:
    kind = type_in(headers)
    return kind != b"" and not kind.startswith(b"text/") and not is_json(headers)


def failure_of(
    status: int, headers: Headers, body: bytes, *, model: str, path: str, is_all: bool
) -> Failure | None:
    """How it fails; None: it does not, or that is the request's own fault.

    body: its beginning. model, path: that were asked for. is_all: whether the body is whole.
    """
    if status != 200:
        missing_path = path if blame.is_path_missing(status, body) else ""
        return blame.of_status(status, headers, model=model, missing_path=missing_path)
    if not body:
        return blame.wrong(blame.EMPTY)
    if path in _MAY_BE_BINARY and _is_binary(headers):
        return None
    if path.startswith(AUDIO) and not is_json(headers) and type_in(headers) != b"text/html":
        return None  # sound, or plain text
    if body.lstrip()[:1] not in _OPENS:
        return blame.wrong(blame.FOREIGN)
    if not is_all:
        return None
    return _failure_in(body, _HAS.get(path, ""))


def _failure_in(body: bytes, member: str) -> Failure | None:
    """The same of a whole body that begins as JSON does. member: that it must have; "": any."""
    fields: Any = None
    if body.rstrip()[-1:] not in _CLOSES:
        return blame.wrong(blame.CUT)
    aborts = ABORTS.search(body) is not None
    if aborts or len(body) <= MAX_PARSED_BYTES:
        try:
            fields = parsed(body)
        except ValueError:
            return blame.wrong(blame.CUT)
    if isinstance(fields, dict) and is_error(fields):
        return blame.of_error(fields)
    if aborts and isinstance(fields, dict) and not FAILURES.isdisjoint(reasons_of(fields).values()):
        return blame.wrong(blame.ABORTED)
    if not member or (isinstance(fields, dict) and member in fields):
        return None
    is_there = fields is None and b'"%b"' % member.encode() in body
    return None if is_there else blame.wrong(blame.FOREIGN)


def status_of(body: bytes) -> int:
    """The status that an answer with status 200 should have had: 200, unless it tells an error."""
    if len(body) > MAX_PARSED_BYTES or not any(name in body for name in _OF_ERRORS):
        return 200
    fields: Any = None
    with suppress(ValueError):
        fields = parsed(body)
    if not isinstance(fields, dict) or not is_error(fields):
        return 200
    return blame.status_in(fields) or 400
