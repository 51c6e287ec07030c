"""Answers below /console/api/, in the form in which they are made and sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


def _told(description: str) -> Any:
    return Field(description=description)


class Rows(TypedDict):
    """A table whose rows are lists, so that a thousand of them stay small."""

    columns: Sequence[str]
    rows: Annotated[list[list[Any]], _told("in the order of `columns`; null: not known")]


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Rows:
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


class FindingShown(TypedDict):
    name: str
    ok: bool | None
    detail: str
    remedy: Annotated[str, _told('what to do; "" if nothing is wrong')]
    level: Annotated[str, _told("bad, warn (an alert's condition), unknown or ok")]


class RedisState(TypedDict):
    version: str
    used_bytes: int | None
    max_bytes: Annotated[int | None, _told("0: no limit")]
    rtt_s: Annotated[float, _told("one round trip from the replica that answers")]


class Overview(TypedDict):
    namespace: str
    version: str
    window_s: Annotated[float, _told("rates and percentiles are of so many last seconds")]
    tiles: Annotated[
        dict[str, float | None],
        _told(
            "of all replicas together; `cached_share`, what engines reported of requests that were "
            "answered, and `predicted_share` are of the last minute"
        ),
    ]
    replicas: Rows
    redis: RedisState
    models: Annotated[Rows, _told("how requests of the last minute ended, by model")]
    errors: Annotated[Rows, _told("what requests failed of, the latest first")]
    localities: Annotated[
        dict[str, int], _told("routed requests by what became of the longest overlap")
    ]
    localities_window_s: float
    findings: Annotated[list[FindingShown], _told("what is wrong first")]


class WorkerShown(TypedDict):
    worker: Annotated[dict[str, Any], _told("its row, and more")]
    series: Annotated[dict[str, list[float | None]], _told("`at_s` and `queue_s`")]
    prefixes: Annotated[Rows, _told("the most frequent of the prompts it was sent")]
    decisions: Rows
    reserved: Annotated[int, _told("requests that are reserved on it")]
    errors: Annotated[Rows, _told("what its requests failed of, the latest first")]


class DecisionsShown(Rows):
    last: Annotated[str, _told("id of the newest decision there is")]
    missed: Annotated[bool, _told("there may have been more after `after` than are kept here")]


class Heat(TypedDict):
    at_s: list[int]
    workers: Annotated[dict[str, list[float | None]], _told("seconds of queue")]


class HistoryShown(TypedDict):
    step_s: int
    at_s: Annotated[list[int], _told("seconds since 1970, by the Redis clock")]
    series: dict[str, list[float | None]]
    heat: Annotated[NotRequired[Heat], _told("of the last hour only")]


class EventShown(TypedDict):
    id: str
    at_ms: int
    kind: Annotated[
        str,
        _told(
            "joined, resynced, left, lost, away, back, ill, suspended, drain, undrain, proposal, "
            "replica_joined, replica_left, replica_lost, redis_away"
        ),
    ]
    subject: Annotated[str, _told("a worker's key, a replica, or planner")]
    text: str
    level: Annotated[str, _told("info, warn or bad")]


class EventsShown(TypedDict):
    last: str
    events: Annotated[list[EventShown], _told("newest first")]


class WaitingShown(TypedDict):
    flows: Annotated[Rows, _told("who waits for a worker, in the order of turns")]
    limits: Annotated[Rows, _told("how much of its limits each key uses")]


class Drained(TypedDict):
    worker: str
    draining: bool
    left: Annotated[int, _told("requests that are still on it")]
