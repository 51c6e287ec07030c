"""One worker in virtual time: an engine, and what the routers see of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from app.core.loads import Load
from app.core.roles import Role
from app.core.types import SequenceHash
from app.core.worker_report import ForwardPassMetrics
from app.policy.workers import load_rows, measured_rows
from app.simulation.books import Holdings
from app.simulation.engine import SimEngine
from app.simulation.profiles import Profile, Sending
from app.simulation.setting import Setting
from app.simulation.speed import SpeedLearner

SPEED_INTERVAL_S = 5.0
"""Seconds between publications of a worker's speed. A live worker does so with its metrics, but the
values hardly change."""


class Status(StrEnum):
    """State of a worker. One that drains gets no new requests, and leaves once all are answered."""

    STARTING = "starting"
    LIVE = "live"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Quiet:
    """Steps under way that only decode."""

    since_s: float
    num_steps: int


class SimWorker:
    """One engine, and what the routers see of it."""

    def __init__(
        self,
        setting: Setting,
        place: int,
        profile: Profile,
        now: Callable[[], float],
        asked_s: float,
        role: Role | None = None,
    ) -> None:
        """role: None: as the setting has them, in turn."""
        self.role = role or setting.roles[place % len(setting.roles)]
        self.engine = SimEngine(
            profile,
            block_size=setting.block_size,
            now=now,
            host_pool_tokens=setting.host_pool_tokens,
        )
        self.learner = SpeedLearner(profile.max_batch_tokens)
        self.holdings = Holdings(setting.event_delay_s)
        self.metrics: ForwardPassMetrics = self.engine.metrics()
        self.status = Status.STARTING
        self.asked_s = asked_s
        """Time when it was asked for: from then on it has its hardware."""
        self.live_s = math.inf
        self.gone_s = math.inf
        self.num_requests = 0
        self.is_stepping = False
        self.quiet: Quiet | None = None
        self.coming: dict[SequenceHash, float] = {}
        """Blocks of prefixes that it fetches, and when they will have come."""
        self.sending = None if setting.link is None else Sending(setting.link, profile)
        self._idle_reported = setting.idle_reported
        self._interval_s = setting.metrics_interval_s
        self._due_s = 0.0
        self._speed_due_s = 0.0
        self.publish_metrics(asked_s)

    def publish_metrics(self, now_s: float) -> None:
        """Publish, before every change, and so as often as anyone could notice."""
        if now_s < self._due_s:
            return
        self._due_s = (now_s // self._interval_s + 1) * self._interval_s
        self.metrics = self.engine.metrics()
        if not self._idle_reported:
            self.metrics = replace(self.metrics, kv_idle_before_evict_s=0.0)
        if now_s >= self._speed_due_s:
            self._speed_due_s = now_s + SPEED_INTERVAL_S
            self.speed = self.learner.speed()
            if self.sending is not None:
                self.speed = replace(self.speed, **self.sending.speed)

    def column(
        self,
        load: Load,
        rounds: int,
        chain: Sequence[SequenceHash],
        now_s: float,
        ahead: int = 0,
    ) -> tuple[float, ...]:
        """Returns this worker's values, in the order of Candidates.

        rounds: see `load_rows`. ahead: see `Holdings.overlap`.
        """
        self.publish_metrics(now_s)
        metrics = self.metrics
        return (
            *self.holdings.overlap(chain, now_s, ahead),
            0.0,
            *load_rows(load, round(now_s * 1000), metrics.request_total_slots, rounds),
            *measured_rows(metrics, self.speed),
        )

    def has_come_s(self, chain: Sequence[SequenceHash], now_s: float) -> float:
        """Returns when the leading blocks of a chain will have come that are on their way; now, if
        none is."""
        lacking = chain[self.engine.pool.match(chain) :]
        of_some = takewhile(lambda when_s: when_s is not None, map(self.coming.get, lacking))
        return max((when_s for when_s in of_some if when_s is not None), default=now_s)

    def step_under_way(self, quiet: Quiet, now_s: float) -> int:
        """Returns which of the quiet steps ends next, counted from 1."""
        return 1 + bisect_left(
            range(1, quiet.num_steps), now_s - quiet.since_s, key=self.engine.decode_s
        )

    def held_s(self, until_s: float) -> float:
        """Returns seconds for which it has had its hardware."""
        return max(0.0, min(self.gone_s, until_s) - self.asked_s)
