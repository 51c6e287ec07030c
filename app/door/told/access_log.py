"""A line of JSON for each request that has ended. FIELDS is also where its page is made from."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from app.core.errors import cut
from app.core.pace import Paces
from app.door.record import STAGES, RequestRecord, Stage
from app.output import OUT

log = logging.getLogger(__name__)

REFUSED_PER_S = 10
"""Lines for each cause of requests that were refused before anything was done for them."""
WARNINGS_PER_S = 0.1
"""Warnings for each such cause, in the log of the process."""


class Field(NamedTuple):
    """help: what it says, for the page. read: null in the line if it returns None."""

    help: str
    read: Callable[[RequestRecord], object]


def _time(record: RequestRecord) -> str:
    return record.came_at.isoformat(timespec="milliseconds")


def _model(record: RequestRecord) -> str | None:
    if record.model_name:
        return record.model_name
    asked = record.asked.model if record.asked else None
    return cut(asked) if isinstance(asked, str) else None


def _alias(record: RequestRecord) -> str | None:
    asked = record.asked.model if record.asked else None
    is_other = isinstance(asked, str) and record.model_name not in ("", asked)
    return cut(str(asked)) if is_other else None


def _prompt_tokens(record: RequestRecord) -> int | None:
    if record.usage is not None:
        return record.usage.prompt
    return record.ids.num_tokens if record.ids else None


def _since_began(record: RequestRecord, at_s: float) -> float | None:
    return round(at_s - record.began_s, 4) if at_s else None


def _stage(stage: Stage) -> Field:
    def read(record: RequestRecord) -> float | None:
        return round(record.spent_s[stage], 4) if stage in record.spent_s else None

    return Field(f"Of these seconds: {STAGES[stage]}.", read)


FIELDS: Mapping[str, Field] = {
    "time": Field("When the request came, in UTC.", _time),
    "request_id": Field(
        "Its id, which the answer has as `x-request-id`.", lambda r: r.request_id or None
    ),
    "path": Field("The path that was asked, cut to 80 characters.", lambda r: r.path),
    "stream": Field(
        "Whether the answer was to be streamed.", lambda r: r.asked.streams if r.asked else None
    ),
    "client": Field("The address it came from: the balancer's, behind one.", lambda r: r.client),
    "forwarded_for": Field(
        "`X-Forwarded-For`, cut to 80 characters; anybody can send it.",
        lambda r: r.forwarded_for or None,
    ),
    "key": Field("The name of its key, never the key.", lambda r: r.key_name or None),
    "tenant": Field("Its tenant.", lambda r: (r.request.tenant if r.request else "") or None),
    "session": Field(
        "Its session; a hash with `--log-identities hash`.",
        lambda r: (r.request.session if r.request else "") or None,
    ),
    "user": Field(
        "`safety_identifier`, `user` or `metadata.user_id` of its body, cut to 80 characters; a "
        "hash with `--log-identities hash`.",
        lambda r: (r.asked.user if r.asked else "") or None,
    ),
    "model": Field("The model that it asked for.", _model),
    "alias": Field("The alias by which it asked for that; null: by none.", _alias),
    "namespace": Field("That model's namespace.", lambda r: r.model.namespace if r.model else None),
    "worker": Field(
        "The last worker that it was given to.",
        lambda r: r.worker or None,
    ),
    "tries": Field("Decisions that were made for it.", lambda r: r.tries),
    "source": Field(
        "The worker that computed the prompt for that one, or handed on a part of it.",
        lambda r: str(r.decision.source.worker.key) if r.decision and r.decision.source else None,
    ),
    "failed": Field(
        "The workers that failed it, or were full.", lambda r: [one.worker for one in r.failures]
    ),
    "causes": Field(
        "Why, of each of these: see [failures.md](failures.md#workers-that-fail-requests).",
        lambda r: [one.cause for one in r.failures],
    ),
    "migrations": Field(
        "How often another worker went on with its answer.", lambda r: r.migrations
    ),
    "tokens_from": Field(
        "Who knew the ids of its prompt: see [tokenization.md](tokenization.md).",
        lambda r: r.ids.tokens_from if r.ids else None,
    ),
    "prompt_tokens": Field(
        "Tokens of its prompt, as the engine counted them, or else as routed.", _prompt_tokens
    ),
    "predicted_cached_tokens": Field(
        "Those of them that the worker was predicted to have cached.", lambda r: r.predicted_cached
    ),
    "cached_tokens": Field(
        "Those that it had cached, as the engine says; as was predicted, if the router counted.",
        lambda r: r.usage.cached if r.usage else None,
    ),
    "output_tokens": Field(
        "Tokens of its answer, as the engine counted them, or the router.",
        lambda r: r.usage.output if r.usage else None,
    ),
    "counted_by": Field(
        "Who counted these: `engine`; or `router`, where the engine did not tell of all that the "
        "client got, as when the client left: then by what was passed on, which may be less.",
        lambda r: ("router" if r.usage.by_router else "engine") if r.usage else None,
    ),
    "ttft_s": Field(
        "Seconds until its first token; null where nobody saw or told that.",
        lambda r: _since_began(r, r.first_token_s),
    ),
    "duration_s": Field("Seconds until its end.", lambda r: _since_began(r, r.ended_s)),
    **{f"{stage}_s": _stage(stage) for stage in Stage},
    "status": Field(
        "The status that it was answered with; 499: the client had gone.", lambda r: r.status
    ),
    "outcome": Field("`ok`, or what it ended by: the code of an error.", lambda r: r.outcome),
    "ended_by": Field("Who ended it: client, worker or router.", lambda r: r.ended_by or None),
    "error": Field(
        "What was wrong, in the engine's own words if it said so, and without what the client "
        "sent.",
        lambda r: r.error or None,
    ),
}
LEFT_OUT = "left_out"
LINE_FIELDS = {
    "replica": "Host name of the replica, and its `--port`.",
    LEFT_OUT: "Only where there were some: refused requests with the same outcome that have no "
    f"line, since the last that has one. They have {REFUSED_PER_S} a second.",
}
"""Further fields, and what they say."""
_IDENTITIES = ("session", "user")


class AccessLog:
    """Writes to standard output; and in the log of the process, seldom, why requests are refused.

    on: whether there are lines. hashes: whether they have identities as hashes.
    """

    def __init__(self, *, on: bool, hashes: bool, replica: str) -> None:
        self._on = on
        self._hashes = hashes
        self._replica = replica
        self._lines = Paces(REFUSED_PER_S)
        self._warnings = Paces(WARNINGS_PER_S)

    def ended(self, record: RequestRecord) -> None:
        """Writes one request."""
        left_out: int | None = 0
        if record.ids is None and record.outcome != "ok":
            now_s = time.monotonic()
            if record.ended_by == "router":
                self._warn(record, now_s)
            left_out = self._lines.allows(record.outcome, now_s)
        if self._on and left_out is not None:
            more = {LEFT_OUT: left_out} if left_out else {}
            OUT.write(orjson.dumps(self._line(record) | more).decode())

    def _line(self, record: RequestRecord) -> dict[str, object]:
        """Returns the fields of a line, which never has the prompt."""
        line = {name: field.read(record) for name, field in FIELDS.items()}
        if self._hashes:
            line |= {name: _hashed(line[name]) for name in _IDENTITIES if line[name]}
        return line | {"replica": self._replica}

    def _warn(self, record: RequestRecord, now_s: float) -> None:
        more = self._warnings.allows(record.outcome, now_s)
        if more is None:
            return
        log.warning(
            # As literals: a path, or the name of a bad member, may have newlines.
            "refused %r for %s (%d %s): %r; %d more since this was last said",
            *(record.path, record.client, record.status, record.outcome, record.error, more),
        )


def _hashed(name: object) -> str:
    return hashlib.blake2b(str(name).encode(), digest_size=8).hexdigest()
