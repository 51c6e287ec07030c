"""What the planner knows of a fleet: workers and their loads, and the decisions of late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from app.core.chains import positions
from app.core.errors import NamespaceMissing
from app.core.keys import Keyspace
from app.core.loads import Load, Snapshot
from app.core.types import SequenceHash, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, Speed, WorkerInfo
from app.planner.rules.replay import recorded_request
from app.planner.rules.state import Came, PastRequest, Phase, Rules, WorkerLoad, WorkerState
from app.planner.rules.victims import Held, unique_values
from app.policy.record import DecisionRecord
from app.policy.view import Measured
from app.router.fleet import Fleet
from app.simulation.profiles import profile_of
from app.state import decisions, endings, reservations
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.endings import Ending
from app.state.scripts import ScriptRunner

MOST_DECISIONS = 4096
TIMEOUT_S = 2.0


@dataclass(slots=True)
class ObservedWorker:
    """One worker: all ranks of one process."""

    keys: list[WorkerKey]
    info: WorkerInfo
    since_s: float
    drains: bool = False
    speed: Speed = DEFAULT_SPEED
    loads: list[WorkerLoad] = field(default_factory=list)
    """Samples since the last proposal; empty: its load is not known."""


class Observer:
    """`sample` often, then ask for `workers` and `recent`."""

    def __init__(
        self, fleet: Fleet, redis: RedisClient, runner: ScriptRunner, keyspace: Keyspace
    ) -> None:
        self.workers_seen: dict[str, ObservedWorker] = {}
        """By worker id; those that are registered now."""
        self.now_s = 0.0
        """When it last looked, by the Redis clock, by which decisions are dated; seconds since
        1970."""
        self._fleet, self._redis, self._runner = fleet, redis, runner
        self._keyspace = keyspace

    @property
    def block_size(self) -> int | None:
        return next((seen.info.block_size for seen in self.workers_seen.values()), None)

    async def sample(self) -> None:
        """Look once. Raises RedisUnavailable."""
        async with deadline(TIMEOUT_S):
            seconds, micros = await self._redis.time()
        self.now_s = seconds + micros / 1e6
        try:
            snapshot = await self._runner.one(reservations.loads(self._keyspace))
        except NamespaceMissing:
            self.workers_seen.clear()
            return
        view = await self._fleet.view(snapshot)
        infos = dict(zip(view.incarnations, view.infos, strict=True)) | dict(view.paused)
        found: dict[str, list[tuple[WorkerInfo, Load | None, Measured, bool]]] = {}
        for inc, info in infos.items():
            measured = self._fleet.measured(inc)
            failing = snapshot.failing.get(inc)
            load = snapshot.loads.get(inc) or (Load() if failing else None)
            if measured.is_stale(snapshot.now_ms, len(infos)):
                load = None
            drains = failing is not None and failing.drains
            found.setdefault(info.key.worker_id, []).append((info, load, measured, drains))
        for name in self.workers_seen.keys() - found.keys():
            del self.workers_seen[name]
        for name, ranks in found.items():
            self._take(name, ranks, snapshot)

    def _take(
        self,
        name: str,
        ranks: list[tuple[WorkerInfo, Load | None, Measured, bool]],
        snapshot: Snapshot,
    ) -> None:
        keys, info = sorted(info.key for info, *_ in ranks), ranks[0][0]
        seen = self.workers_seen.get(name)
        if seen is None:
            seen = self.workers_seen[name] = ObservedWorker(keys, info, snapshot.now_ms / 1000)
        seen.keys, seen.info = keys, info
        seen.drains = all(drains for *_, drains in ranks)
        seen.speed = ranks[0][2].speed
        loads = [_load(load, m, snapshot.now_ms) for _, load, m, _ in ranks if load is not None]
        if len(loads) < len(ranks):
            seen.loads.clear()
        else:
            seen.loads.append(_mean(loads))

    def forget_samples(self) -> None:
        for seen in self.workers_seen.values():
            seen.loads.clear()

    def workers(self, values: Mapping[str, float]) -> list[WorkerState]:
        """The registered ones, with the means of their samples."""
        return [
            WorkerState(
                name,
                Phase.DRAINING if seen.drains else Phase.LIVE,
                seen.since_s,
                _mean(seen.loads) if seen.loads else None,
                unique_value_s=values.get(name, 0.0),
                speed=seen.speed,
                profile=profile_of(seen.speed, seen.info.kv_total_blocks * seen.info.block_size),
            )
            for name, seen in self.workers_seen.items()
        ]

    async def recent(self, rules: Rules) -> list[PastRequest]:
        """The decisions that a proposal may count, the oldest first. Raises RedisUnavailable."""
        block_size = self.block_size
        if block_size is None:
            return []
        past_s = (rules.window_s + rules.lead_s, 2 * rules.half_life_s, rules.attained_s)
        since_s = self.now_s - max(past_s)
        ended = await endings.read(
            self._redis, self._keyspace, round(1000 * since_s), MOST_DECISIONS
        )
        asked: list[PastRequest] = []
        async for record in decisions.read(self._redis, self._keyspace):
            if record.at_ms / 1000 < since_s or len(asked) == MOST_DECISIONS:
                break
            if len(record.blocks) == len(positions(record.isl_tokens // block_size)):
                asked.append(self._asked(record, block_size, ended.get(record.request_id)))
        asked.reverse()
        return asked

    def _asked(
        self, record: DecisionRecord, block_size: int, ended: tuple[int, Ending] | None
    ) -> PastRequest:
        worker = record.worker.rpartition(":")[0]
        seen = self.workers_seen.get(worker)
        output_tokens = (seen.speed if seen else DEFAULT_SPEED).mean_output_tokens
        came: Came | None = None
        if ended is not None:
            ended_ms, ending = ended
            output_tokens = ending.output_tokens
            if ending.ttft_ms is not None:
                rest_s = max(0, ended_ms - record.at_ms - ending.ttft_ms) / 1000
                came = Came(ending.ttft_ms / 1000, rest_s / max(1, output_tokens - 1))
        request = recorded_request(
            record.request_id,
            record.blocks,
            prompt_tokens=record.isl_tokens,
            output_tokens=max(1, round(output_tokens)),
            block_size=block_size,
        )
        return PastRequest(record.at_ms / 1000, worker, request, record.best.blocks, came)

    def values(self, recent: list[PastRequest], rules: Rules) -> dict[str, float]:
        """Seconds of prefill that losing each worker would cost; see app.planner.rules.victims."""
        if not recent or self.block_size is None:
            return {}
        names = self.workers_seen.keys()
        return unique_values(
            recent,
            [*held(recent, names)],
            now_s=self.now_s,
            half_life_s=rules.half_life_s,
            block_size=self.block_size,
            speed=mean_speed(seen.speed for seen in self.workers_seen.values()),
        )


def held(recent: Iterable[PastRequest], live: Iterable[str]) -> Iterable[Held]:
    """How many leading blocks of each prompt were asked for at each live worker of late, at any
    time: these it holds, unless it has evicted them since."""
    holders: dict[SequenceHash, set[str]] = {}
    asked_for = [*recent]
    for asked in asked_for:
        for block in asked.request.blocks:
            holders.setdefault(block, set()).add(asked.worker)
    alive = set(live)
    for asked in asked_for:
        blocks: dict[str, int] = {}
        left = alive
        for depth, block in enumerate(asked.request.blocks):
            left = left & holders[block]
            if not left:
                break
            blocks.update(dict.fromkeys(left, depth + 1))
        yield blocks


def mean_speed(speeds: Iterable[Speed]) -> Speed:
    known = [*speeds]
    return replace(
        DEFAULT_SPEED,
        **{
            name: fmean(getattr(speed, name) for speed in known)
            for name in Speed.__dataclass_fields__
        },
    )


def _load(load: Load, measured: Measured, now_ms: int) -> WorkerLoad:
    prefilling = load.requests - load.decoding
    return WorkerLoad(
        prefill_queue=max(0.0, prefilling - 1.0),
        queue_s=load.queue_s(now_ms),
        kv_usage=measured.metrics.gpu_cache_usage_perc,
        waiting=measured.metrics.num_requests_waiting,
        requests=load.requests,
    )


def _mean(loads: list[WorkerLoad]) -> WorkerLoad:
    def of(get: Callable[[WorkerLoad], float]) -> float:
        return fmean(map(get, loads))

    return WorkerLoad(
        prefill_queue=of(lambda load: load.prefill_queue),
        queue_s=of(lambda load: load.queue_s),
        kv_usage=of(lambda load: load.kv_usage),
        waiting=of(lambda load: load.waiting),
        requests=of(lambda load: load.requests),
    )
