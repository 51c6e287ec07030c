"""What engines refuse requests with, in the form that clients of the path expect. No I/O."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from app.core.errors import cut
from app.core.worker_report import WorkerInfo
from app.edge.errors import Meaning, body_of, dialect_of, kind_of

MAX_MESSAGE = 2000
"""Characters. Engines may repeat the whole request."""
_NO_PATH = (404, 405)
_LOCATION = re.compile(r"'loc': [(\[]([^)\]]*)")
_SAYS = re.compile(r"'msg': (?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")")
_NAME = re.compile(r"'([^']*)'")
_TOO_LONG = re.compile(r"(?i)maximum context length|context_length_exceeded|prompt_too_large")


class _Cause(NamedTuple):
    message: str
    field: str | None = None
    code: str = ""


def told(status: int, body: bytes, path: str, worker: WorkerInfo) -> tuple[int, bytes]:
    """Status and body of the answer, where an engine has answered with an error.

    Of a path that the engine lacks it is 400: by a 404, balancers of clients take it that there is
    nothing at all. A client has no part in the key that a router has.
    """
    cause = _cause(body)
    if status in _NO_PATH and _is_path_missing(body):
        engine = worker.engine or "an unknown engine"
        message = f"The model's engine ({engine}, worker {worker.key}) has no {path}."
        status, cause = 400, _Cause(message, code="path_not_supported")
    elif status == 401:
        cause = _Cause(f"Worker {worker.key} does not take this router's key: see --worker-key.")
        status, cause = 502, cause._replace(code="worker_failed")
    elif cause is None:
        cause = _Cause(body.decode(errors="replace").strip() or f"the engine answered {status}")
    if status == 422:
        status = 400
    code = cause.code
    if _TOO_LONG.search(f"{code} {cause.message}"):
        code = "context_length_exceeded"
    meaning = Meaning(status, code, kind_of(status))
    return status, body_of(meaning, cause.message[:MAX_MESSAGE], cause.field, dialect_of(path))


def _is_path_missing(body: bytes) -> bool:
    with suppress(orjson.JSONDecodeError):
        answer = orjson.loads(body)
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict):
            return error.get("code") in ("not_found", "method_not_allowed")
        return not isinstance(answer, dict) or isinstance(answer.get("detail"), str)
    return True


def _cause(body: bytes) -> _Cause | None:
    """What is wrong, in whichever form engines say that; None: it is in no known one."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error", answer.get("detail", answer))
    if isinstance(error, list):  # as FastAPI lists what is invalid
        return _invalid(str(error[:1]))
    if isinstance(error, str):
        return _Cause(error)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return _Cause(
        _plain(error["message"]).message,
        _text(error.get("param") or error.get("field")) or _plain(error["message"]).field,
        _text(error.get("code")) or "",
    )


def _text(value: Any) -> str | None:
    return cut(value) if isinstance(value, str) else None


def _plain(message: str) -> _Cause:
    """Of a message that lists what is invalid as FastAPI does, the first."""
    return _invalid(message) if _LOCATION.search(message) else _Cause(message)


def _invalid(listed: str) -> _Cause:
    says, location = _SAYS.search(listed), _LOCATION.search(listed)
    message = (says[1] or says[2] or "") if says else listed
    names = _NAME.findall(location[1]) if location else []
    field = next((name for name in names if name != "body"), None)
    return _Cause(f"{field}: {message}" if field else message, field)
