"""A replica's sign of life, and the history that all replicas share: curves and the heat map."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from app.console.answers import Heat, HistoryShown
from app.console.kept import CachedAnswer
from app.console.roster import Roster, short
from app.core.errors import KvrouteError, RedisUnavailable
from app.core.keys import Keyspace
from app.ops.figures import CountWindow, Together, count_transfers, gauge_each, read
from app.policy.view import View
from app.router.router import Router
from app.state import events, replicas
from app.state.client import RedisClient
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

BEAT_S = 1.0
TIMEOUT_S = 2.0
HOUR_MS = 3_600_000
CHANGES = ("joined", "left", "lost", "ill")
MAX_QUEUES = 200
"""Workers whose queues a sample has, those with the longest."""


class Sampler:
    """Beats while `run` runs.

    replica: a name that no other one has. namespace_weights: returns the setting as it is now.
    apart: returns for each model whether its tokenizer differs from its engines'.
    """

    def __init__(
        self,
        router: Router,
        replica: str,
        address: str,
        version: str,
        namespace_weights: Callable[[], str] = str,
        apart: Callable[[], Mapping[str, bool]] = dict,
    ) -> None:
        self._router = router
        self._runner = ScriptRunner(router.redis, TIMEOUT_S)
        self._keyspace = Keyspace(router.namespace)
        self._replica = replica
        self._apart = apart
        self._about = {"address": address, "version": version}
        self._namespace_weights = namespace_weights
        self._started_s = time.monotonic()
        self._window = CountWindow()
        self._step = 0
        self._away_s: float | None = None
        self.roster = Roster()
        self._changed = deque[events.NamespaceEvent]()
        self._last_event = ""

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._beat()
                    await self._note_return()
                except RedisUnavailable as error:
                    log.debug("no beat: %s", error)
                    if self._away_s is None:
                        self._away_s = time.monotonic()
                except Exception:
                    # What only shows a replica must not end it, whatever is in Redis.
                    log.exception("a beat failed")
                await asyncio.sleep(BEAT_S)
        finally:
            with suppress(KvrouteError):
                await self._runner.one(replicas.beat(self._keyspace, self._replica, None))

    async def _note_return(self) -> None:
        """Record that Redis was away, which only now can be recorded."""
        if self._away_s is not None:
            text = f"for {time.monotonic() - self._away_s:.0f} s or more"
            await self._runner.one(events.record(self._keyspace, "redis_away", self._replica, text))
            self._away_s = None

    async def _beat(self) -> None:
        now_s = time.monotonic()
        view = self._router.fleet.last_view
        reading = read(self._router.telemetry.registry)
        if view is not None:
            self.roster.see(view)
            count_transfers(reading, view)
        changes = self._router.telemetry.changes = await self._changes()
        gauge_each(reading, view, changes, str(self._about["address"]))
        reading.gauges["tokenizer_apart"] = float(sum(self._apart().values()))
        self._window.add(reading, now_s)
        said = {
            **self._about,
            "namespace_weights": self._namespace_weights(),
            "uptime_s": round(now_s - self._started_s),
            "reuse": self._router.telemetry.reuse.lately(now_s),
            **self._window.figures(),
        }
        now_ms = await self._runner.one(replicas.beat(self._keyspace, self._replica, said))
        if now_ms is None:
            return
        step = now_ms // replicas.STEP_MS
        if step != self._step:
            self._step = step
            await self._sample()

    async def _changes(self) -> dict[str, int]:
        now_ms = self._router.fleet.redis_now_ms or 0
        after = self._last_event or f"{max(0, now_ms - HOUR_MS)}-0"
        page = await events.read(self._router.redis, self._keyspace, after, events.KEPT)
        self._last_event = page[0].id if page else after
        self._changed.extend(event for event in reversed(page) if event.kind in CHANGES)
        while self._changed and self._changed[0].at_ms < now_ms - HOUR_MS:
            self._changed.popleft()
        return Counter(event.subject for event in self._changed)

    async def _sample(self) -> None:
        said = await replicas.present(self._router.redis, self._keyspace)
        values = sampled(Together(said.values()), self._router.fleet.last_view)
        at_ms = await self._runner.one(replicas.sample(self._keyspace, values))
        if at_ms and at_ms % replicas.MINUTE_MS == 0:
            recent = await replicas.history(
                self._router.redis, self._keyspace, at_ms - replicas.MINUTE_MS
            )
            mean = means(values for _, values in recent)
            await self._runner.one(replicas.sample(self._keyspace, mean, minute=True))


def sampled(together: Together, view: View | None) -> dict[str, Any]:
    """Returns a sample of the history, with the seconds of prefill of each worker as `queues`."""
    queues = {}
    if view is not None:
        queues = {
            str(info.key): round(load.queue_s(view.now_ms), 2)
            for info, load in zip(view.infos, view.loads, strict=True)
        }
    series = together.series() | {
        "workers": float(len(queues)),
        "queue_s": sum(queues.values()) / len(queues) if queues else None,
    }
    longest = sorted(queues, key=lambda name: -queues[name])[:MAX_QUEUES]
    return {name: short(value) for name, value in series.items()} | {
        "queues": {name: queues[name] for name in longest}
    }


def means(samples: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the mean of each series where it is known; queues are left out."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            column = values.setdefault(name, []) if name != "queues" else []
            if isinstance(value, int | float):
                column.append(value)
    return {
        name: short(sum(column) / len(column)) if column else None
        for name, column in values.items()
    }


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
    points = [(at_ms // 1000, _queues(values).get(worker)) for at_ms, values in samples]
    return {"at_s": [at for at, _ in points], "queue_s": [_number(value) for _, value in points]}


def _queues(values: dict[str, Any]) -> dict[str, Any]:
    queues = values.get("queues")
    return queues if isinstance(queues, dict) else {}


def _number(value: Any) -> float | None:
    return short(value) if isinstance(value, int | float) else None
