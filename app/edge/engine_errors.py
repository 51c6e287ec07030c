"""What engines refuse requests with, in the form that clients of the path expect. No I/O."""

from __future__ import annotations

import re

from app.core.worker_report import WorkerInfo
from app.door.blame import is_path_missing
from app.door.engine_words import Cause, cause_in
from app.edge.errors import dialect_of
from app.http.errors import TAKES_NO_KEY, Meaning, body_of, kind_of

_TAKES_NO_KEY = f"{TAKES_NO_KEY}: see --worker-key, or --engine-api-key of `kvroute up`"
_OF_WORKER = {
    401: _TAKES_NO_KEY,
    403: _TAKES_NO_KEY,
    404: "no longer has the model that it announced",
    407: _TAKES_NO_KEY,
}
MAX_MESSAGE = 2000
"""Characters. Engines may repeat the whole request."""
_TOO_LONG = re.compile(r"(?i)maximum context length|context_length_exceeded|prompt_too_large")


def told(status: int, body: bytes, path: str, worker: WorkerInfo) -> tuple[int, bytes]:
    """Status and body of the answer, where an engine has answered with an error.

    Of a path that the engine lacks it is 400: by a 404, balancers of clients take it that there is
    nothing at all. A client has no part in the key that a router has, nor in what a worker has
    announced.
    """
    cause = cause_in(body)
    if is_path_missing(status, body):
        engine = worker.engine or "an unknown engine"
        message = f"The model's engine ({engine}, worker {worker.key}) has no {path}."
        status, cause = 400, Cause(message, code="path_not_supported")
    elif (of_worker := _OF_WORKER.get(status)) is not None:
        status, cause = 502, Cause(f"Worker {worker.key} {of_worker}.", code="worker_failed")
    elif cause is None:
        text = body.decode(errors="replace").strip()
        # What stands before an engine answers with pages.
        is_told = text and not text.startswith("<")
        cause = Cause(text if is_told else f"the engine answered {status}")
    if status == 422:
        status = 400
    code = cause.code
    if _TOO_LONG.search(f"{code} {cause.message}"):
        code = "context_length_exceeded"
    meaning = Meaning(status, code, kind_of(status))
    return status, body_of(meaning, cause.message[:MAX_MESSAGE], cause.field, dialect_of(path))
