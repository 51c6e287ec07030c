"""Curves of the last hour and day, and the heat map of queues."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from app.console.answers import Heat, HistoryShown
from app.console.kept import CachedAnswer
from app.console.sampler import means, short
from app.core.keys import Keyspace
from app.state import replicas
from app.state.client import RedisClient

FOLLOW_S = 1.0
HOUR_S = 3600
HEAT_COLUMNS = 60
HEAT_WORKERS = 100
Sample = tuple[int, dict[str, Any]]
"""A step's beginning, in ms, and its values."""


class Curves:
    """Samples of one history, each read from Redis once."""

    def __init__(self, redis: RedisClient, keyspace: Keyspace, *, minute: bool) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self._minute = minute
        self._samples: deque[Sample] = deque(
            maxlen=replicas.MINUTES_KEPT if minute else replicas.KEPT
        )
        self._followed = CachedAnswer(self._follow, FOLLOW_S)

    async def _follow(self) -> None:
        last_ms = self._samples[-1][0] if self._samples else 0
        self._samples.extend(
            await replicas.history(self._redis, self._keyspace, last_ms, minute=self._minute)
        )

    async def since(self, at_ms: int) -> list[Sample]:
        """Returns the samples that are not older. Raises RedisUnavailable."""
        await self._followed.now()
        return [sample for sample in self._samples if sample[0] >= at_ms]


def shown(samples: Sequence[Sample], step_s: int) -> HistoryShown:
    """Returns a column for each series, with None where a value is not known."""
    names = list(dict.fromkeys(name for _, values in samples for name in values))
    return {
        "step_s": step_s,
        "at_s": [at_ms // 1000 for at_ms, _ in samples],
        "series": {
            name: [_number(values.get(name)) for _, values in samples]
            for name in names
            if name != "queues"
        },
    }


def heat(samples: Sequence[Sample]) -> Heat:
    """Returns the mean seconds of queue by worker and time: at most HEAT_COLUMNS times, and the
    HEAT_WORKERS with the longest queues."""
    size = max(1, math.ceil(len(samples) / HEAT_COLUMNS))
    groups = [samples[at : at + size] for at in range(0, len(samples), size)]
    columns = [means(_queues(values) for _, values in group) for group in groups]
    totals: dict[str, float] = {}
    for column in columns:
        for worker, queue_s in column.items():
            totals[worker] = totals.get(worker, 0.0) + (queue_s or 0.0)
    longest = sorted(totals, key=lambda worker: (-totals[worker], worker))[:HEAT_WORKERS]
    return {
        "at_s": [group[0][0] // 1000 for group in groups],
        "workers": {
            worker: [column.get(worker) for column in columns] for worker in sorted(longest)
        },
    }


def of_worker(samples: Iterable[Sample], worker: str) -> dict[str, list[float | None]]:
    """Returns the queue of one worker over time."""
    points = [(at_ms // 1000, _queues(values).get(worker)) for at_ms, values in samples]
    return {"at_s": [at for at, _ in points], "queue_s": [_number(value) for _, value in points]}


def _queues(values: dict[str, Any]) -> dict[str, Any]:
    queues = values.get("queues")
    return queues if isinstance(queues, dict) else {}


def _number(value: Any) -> float | None:
    return short(value) if isinstance(value, int | float) else None
