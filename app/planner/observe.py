"""The planner's observation of a fleet: workers, their loads, and recent decisions."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean
from typing import NamedTuple

from app.core.chains import positions
from app.core.errors import NamespaceMissing
from app.core.keys import Keyspace
from app.core.loads import Load
from app.core.outcomes import Ending
from app.core.roles import Role
from app.core.settings.router import RouterSettings
from app.core.types import SequenceHash, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, Speed, WorkerInfo
from app.planner.rules.policies import Held, unique_values
from app.planner.rules.replay import recorded_request
from app.planner.rules.state import (
    USUAL_STARTUP_S,
    FleetState,
    Latencies,
    PastRequest,
    Phase,
    Proposal,
    Rules,
    WorkerLoad,
    WorkerState,
)
from app.policy.record import DecisionRecord
from app.policy.workers import Measurement
from app.router.fleet import Fleet
from app.simulation.profiles import USUAL, profile_of
from app.state import decisions, reservations
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import ScriptRunner
from app.state.waiting import flows

MOST_DECISIONS = 4096
BLOCKS_A_PROMPT = 128
"""Blocks that prompts are replayed in, at most and on average: a play takes as long as it has
blocks. In blocks of a fixed size short prompts would have none."""
USUAL_BLOCK_SIZE = 16
"""Tokens per block of a fleet without workers."""
TOLD_LATE_MS = 1000
"""Difference that clients' clocks may have to that of Redis."""
TIMEOUT_S = 2.0
WAKES_AFTER_S = 2.0
"""Wait of a request that wakes a fleet: a client that hangs up at once does not."""


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


class _RankSample(NamedTuple):
    info: WorkerInfo
    load: WorkerLoad | None
    speed: Speed
    drains: bool


class Observer:
    """`sample` often, then ask for the `state`."""

    def __init__(
        self, fleet: Fleet, redis: RedisClient, runner: ScriptRunner, keyspace: Keyspace
    ) -> None:
        self.workers_seen: dict[str, ObservedWorker] = {}
        """Registered workers by id."""
        self.is_new = False
        """Whether no worker has ever registered, or Redis has lost all: routers know nothing."""
        self.now_s = 0.0
        """Redis clock at the last look, in seconds since 1970."""
        self.somebody_waits = False
        """Whether a request waits at a router, for WAKES_AFTER_S if no worker is live."""
        self.unreplayable = 0
        """Number of recent decisions that no worker could have answered as recorded."""
        self.policy = RouterSettings().policy
        """Policy by which most of the recent decisions were made."""
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
            self.is_new, self.somebody_waits = True, False
            return
        self.is_new = False
        view = await self._fleet.view(snapshot)
        infos = dict(zip(view.incarnations, view.infos, strict=True)) | dict(view.paused)
        self.somebody_waits = snapshot.somebody_waits and (
            bool(infos)
            or any(f.oldest_s >= WAKES_AFTER_S for f in await flows(self._redis, self._keyspace))
        )
        ranks_of: defaultdict[str, list[_RankSample]] = defaultdict(list)
        for inc, info in infos.items():
            measured, marks = self._fleet.measured(inc), snapshot.marks[inc]
            load = snapshot.loads.get(inc) or (Load() if marks else None)
            is_stale = measured.is_stale(snapshot.now_ms, len(infos))
            sampled = None if load is None or is_stale else _load(load, measured, snapshot.now_ms)
            rank = _RankSample(info, sampled, measured.speed, marks.is_out)
            ranks_of[info.key.worker_id].append(rank)
        for name in self.workers_seen.keys() - ranks_of.keys():
            del self.workers_seen[name]
        for name, ranks in ranks_of.items():
            keys = sorted(rank.info.key for rank in ranks)
            seen = self.workers_seen.get(name) or ObservedWorker(
                keys, ranks[0].info, snapshot.now_ms / 1000
            )
            self.workers_seen[name] = seen
            seen.keys, seen.info, seen.speed = keys, ranks[0].info, ranks[0].speed
            seen.drains = all(rank.drains for rank in ranks)
            loads = [rank.load for rank in ranks if rank.load is not None]
            if len(loads) < len(ranks):
                seen.loads.clear()
            else:
                seen.loads.append(_mean(loads))

    def forget_samples(self) -> None:
        for seen in self.workers_seen.values():
            seen.loads.clear()

    def _workers(self, values: Mapping[str, float], block_size: int) -> list[WorkerState]:
        return [
            WorkerState(
                name,
                Phase.DRAINING if seen.drains else Phase.LIVE,
                seen.since_s,
                _mean(seen.loads) if seen.loads else None,
                unique_value_s=values.get(name, 0.0),
                speed=seen.speed,
                profile=profile_of(seen.speed, max(block_size, pool_tokens(seen.info))),
                role=seen.info.role,
            )
            for name, seen in self.workers_seen.items()
        ]

    @property
    def host_pool_tokens(self) -> int:
        """Tokens of a worker's host tier, on average."""
        infos = [worker.info for worker in self.workers_seen.values()]
        tokens = sum(info.host_total_blocks * info.block_size for info in infos)
        return tokens // max(1, len(infos))

    @property
    def kv_transfer(self) -> str:
        """Protocol by which KV travels between workers; "": none."""
        protocols = (worker.info.kv_transfer for worker in self.workers_seen.values())
        return next(filter(None, protocols), "")

    async def state(
        self,
        rules: Rules,
        pending: Sequence[tuple[Role, float]] = (),
        proposals: Sequence[Proposal] = (),
        startup_s: float = USUAL_STARTUP_S,
    ) -> FleetState:
        """Returns what a proposal is made from. pending: role of each worker that has not
        registered yet, and when it was asked for. Raises RedisUnavailable."""
        recent, block_size = await self.recent(rules)
        values = await asyncio.to_thread(self._values, recent, block_size, rules)
        coming = (
            WorkerState(f"pending-{n}", Phase.PENDING, at_s, role=role)
            for n, (role, at_s) in enumerate(pending)
        )
        workers = [*self._workers(values, block_size), *coming]
        return FleetState(self.now_s, workers, recent, proposals, block_size, startup_s)

    async def recent(self, rules: Rules) -> tuple[list[PastRequest], int]:
        """Returns the decisions that a proposal may count, the oldest first, and the tokens of each
        of their blocks. Raises RedisUnavailable."""
        block_size = self.block_size
        if block_size is None:
            return [], USUAL_BLOCK_SIZE
        past_s = [rules.window_s + rules.lead_s, 2 * rules.half_life_s, rules.attained_s]
        if not rules.min_workers:
            past_s.append(rules.idle_s)
        since_s = self.now_s - max(past_s)
        ended: dict[str, Ending | None] = {
            **await decisions.read_endings(
                self._redis, self._keyspace, round(1000 * since_s), MOST_DECISIONS
            )
        }
        infos = [worker.info for worker in self.workers_seen.values()]
        most_tokens = max(info.most_tokens for info in infos)
        records: list[DecisionRecord] = []
        self.unreplayable = 0
        async for record in decisions.read(self._redis, self._keyspace):
            if record.at_ms / 1000 < since_s or len(records) == MOST_DECISIONS:
                break
            ending = ended.setdefault(record.request_id, record.ending)
            tokens = record.isl_tokens + (ending.output_tokens if ending else 1)
            is_whole = len(record.blocks) == len(positions(record.isl_tokens // block_size))
            if is_whole and tokens <= most_tokens and record.at_ms / 1000 <= self.now_s + 1:
                records.append(record)
            else:
                self.unreplayable += 1
        if records:
            self.policy = Counter(record.policy for record in records).most_common(1)[0][0]
        merged = _merged([record.isl_tokens for record in records], block_size)
        recent = [
            self._asked(record, block_size, merged, most_tokens, ended.get(record.request_id))
            for record in records
        ]
        return sorted(recent, key=lambda asked: asked.at_s), merged * block_size

    def _asked(
        self,
        record: DecisionRecord,
        block_size: int,
        merged: int,
        most_tokens: int,
        ending: Ending | None,
    ) -> PastRequest:
        name = record.worker.rpartition(":")[0]
        worker = self.workers_seen.get(name)
        output_tokens = (worker.speed if worker else DEFAULT_SPEED).mean_output_tokens
        came: Latencies | None = None
        if ending is not None:
            output_tokens = ending.output_tokens
            took_ms = ending.ended_ms - record.at_ms
            # It cannot have been more, whoever said so.
            if ending.ttft_ms is not None and ending.ttft_ms <= took_ms + TOLD_LATE_MS:
                rest_s = max(0, took_ms - ending.ttft_ms) / 1000
                came = Latencies(ending.ttft_ms / 1000, rest_s / max(1, output_tokens - 1))
        request = recorded_request(
            record.request_id,
            record.blocks,
            prompt_tokens=record.isl_tokens,
            output_tokens=max(1, round(min(output_tokens, most_tokens - record.isl_tokens))),
            block_size=block_size,
            merged=merged,
        )
        source = record.source.rpartition(" ")[2].rpartition(":")[0]
        best_blocks = record.best.blocks // merged
        return PastRequest(record.at_ms / 1000, name, request, best_blocks, came, source)

    def _values(self, recent: list[PastRequest], block_size: int, rules: Rules) -> dict[str, float]:
        """Returns the seconds of prefill that losing each worker would cost."""
        if not recent:
            return {}
        names = self.workers_seen.keys()
        return unique_values(
            recent,
            [*held(recent, names)],
            now_s=self.now_s,
            half_life_s=rules.half_life_s,
            block_size=block_size,
            speed=mean_speed(seen.speed for seen in self.workers_seen.values()),
        )


def _merged(prompts: Sequence[int], block_size: int) -> int:
    """Returns the number of blocks that are replayed as one. prompts: tokens of each."""
    merged = 1
    while merged * block_size * BLOCKS_A_PROMPT * len(prompts) < sum(prompts):
        merged *= 2
    return merged


def held(recent: Iterable[PastRequest], live: Iterable[str]) -> Iterable[Held]:
    """Yields for each prompt the leading blocks that each live worker was asked for lately, and
    holds unless it has evicted them."""
    holders: dict[SequenceHash, set[str]] = {}
    asked_for = [*recent]
    for asked in asked_for:
        for block in asked.request.blocks:
            holders.setdefault(block, set()).update(asked.holders)
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


def pool_tokens(info: WorkerInfo) -> int:
    """Returns the tokens that a worker's device holds, or the usual number if it does not say."""
    return info.kv_total_blocks * info.block_size or USUAL.kv_pool_tokens


def mean_speed(speeds: Iterable[Speed]) -> Speed:
    known = [astuple(speed) for speed in speeds] or [astuple(DEFAULT_SPEED)]
    return Speed(*map(fmean, zip(*known, strict=True)))


def _load(load: Load, measured: Measurement, now_ms: int) -> WorkerLoad:
    prefilling = load.requests - load.decoding
    return WorkerLoad(
        prefill_queue=max(0.0, prefilling - 1.0),
        queue_s=load.queue_s(now_ms),
        kv_usage=measured.metrics.gpu_cache_usage_perc,
        waiting=measured.metrics.num_requests_waiting,
        requests=load.requests,
    )


def _mean(loads: list[WorkerLoad]) -> WorkerLoad:
    return WorkerLoad(*map(fmean, zip(*map(astuple, loads), strict=True)))
