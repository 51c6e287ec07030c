"""The rows of Candidates, and which loads and measurements they show."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from app.core.loads import LOAD_FIELDS, MEMORY_ROUNDS, ROUND, Load, Loads
from app.core.worker_report import ForwardPassMetrics, Speed
from app.policy.cost import Candidates, Floats
from app.policy.reported import Others

OVERLAP_ROWS = ("overlap_device", "overlap_host", "overlap_disk")
LOAD_ROWS = (
    "prefill_tokens",
    "prefill_s",
    "active_blocks",
    "active_requests",
    "decoding_requests",
    "max_requests",
    "routed_s",
    "sending_s",
    "receiving_s",
    "others_requests",
)
PREFILL_TOKENS, QUEUE, BLOCKS, REQUESTS, DECODES, MOST_REQUESTS, ROUTED, *_, OTHERS = range(
    len(OVERLAP_ROWS), len(OVERLAP_ROWS) + len(LOAD_ROWS)
)
METRICS_ROWS = {
    "kv_active_blocks": "kv_active_blocks",
    "kv_total_blocks": "kv_total_blocks",
    "num_requests_waiting": "num_requests_waiting",
    "gpu_cache_usage": "gpu_cache_usage_perc",
    "request_active_slots": "request_active_slots",
    "request_total_slots": "request_total_slots",
    "kv_idle_before_evict_s": "kv_idle_before_evict_s",
}
"""Rows of Candidates, and the fields of ForwardPassMetrics that they show."""
TOTAL, RESERVED, DECODING = map(LOAD_FIELDS.index, ("total", "requests", "decoding"))
_HEAD_US, _HEAD_SINCE_MS, _ROUTED_AT = map(
    LOAD_FIELDS.index, ("head_us", "head_since_ms", "routed_at")
)
_LINKS = slice(ROUTED + 1, OTHERS)
_PLACES = np.array(
    [
        LOAD_FIELDS.index(name)
        for name in (
            *("total", "total", "total", "prefill_tokens", "prefill_us", "blocks", "requests"),
            *("decoding", "total", "routed_us", "sending_until_ms", "receiving_until_ms", "total"),
        )
    ]
)
"""The load's field that each row is made from; `total` where a row is made from none."""
KV_TOTAL = list(METRICS_ROWS).index("kv_total_blocks")
SPEED_ROWS = tuple(f.name for f in fields(Speed))

_of_metrics = attrgetter(*METRICS_ROWS.values())
_of_speed = attrgetter(*SPEED_ROWS)

ROWS = (*OVERLAP_ROWS, *LOAD_ROWS, *METRICS_ROWS, *SPEED_ROWS)
if tuple(f.name for f in fields(Candidates)) != ROWS:
    raise TypeError(f"the rows of a view are not the fields of Candidates: {ROWS}")


def load_rows(load: Load, now_ms: int, max_requests: int, rounds: int) -> tuple[float, ...]:
    """Returns the LOAD_ROWS of one worker that nobody else uses. rounds: see Snapshot."""
    return (
        load.prefill_tokens,
        load.queue_s(now_ms),
        load.blocks,
        load.requests,
        load.decoding,
        max_requests,
        load.routed_s(rounds),
        load.sending_s(now_ms),
        load.receiving_s(now_ms),
        0.0,
    )


def rows_of(loads: Loads, now_ms: int, max_requests: Floats, rounds: int) -> Floats:
    """Returns OVERLAP_ROWS, which are 0, and LOAD_ROWS of all workers. rounds: see Snapshot."""
    load = loads.columns
    rows: Floats = load[_PLACES]
    rows[: len(OVERLAP_ROWS)] = rows[OTHERS] = 0.0
    drained_us = np.minimum((now_ms - load[_HEAD_SINCE_MS]) * 1000.0, load[_HEAD_US])
    rows[QUEUE] = (rows[QUEUE] - np.maximum(drained_us, 0.0)) / 1e6
    rows[MOST_REQUESTS] = max_requests
    past = np.maximum(rounds - load[_ROUTED_AT], 0.0)
    rows[ROUTED] *= np.exp(past / -(MEMORY_ROUNDS * ROUND)) / 1e6
    links = rows[_LINKS]
    links -= now_ms
    rows[_LINKS] = np.maximum(links, 0.0) / 1000.0
    return rows


def measured_rows(metrics: ForwardPassMetrics, speed: Speed) -> tuple[float, ...]:
    return (*_of_metrics(metrics), *_of_speed(speed))


def others_rows(others: Others) -> Floats:
    """Returns what to add to the rows of a view. Only reservations make a worker full: requests of
    others make it dear, and refuse nobody."""
    rows = np.zeros((len(OVERLAP_ROWS) + len(LOAD_ROWS), others.running.size))
    rows[PREFILL_TOKENS], rows[QUEUE] = others.prefill_tokens, others.prefill_s
    rows[BLOCKS], rows[DECODES] = others.blocks, others.running
    rows[[REQUESTS, MOST_REQUESTS, OTHERS]] = others.requests
    return rows


def matrix(columns: list[tuple[float, ...]], height: int) -> NDArray[np.float64]:
    """Returns one row for each of `height` values, also if there are no columns."""
    return np.array(columns, dtype=np.float64).reshape(len(columns), height).T.copy()
