"""One data-parallel rank of an engine as a worker: its events become what its agent publishes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import zmq.asyncio

from app.core.errors import InvalidRequest
from app.core.events import CacheEvent, Cleared
from app.core.keys import Keyspace
from app.core.loads import Load
from app.core.trust import TOP, Rung, Trust
from app.core.worker_report import METRICS, ForwardPassMetrics, Speed, WorkerInfo
from app.state.scripts import ScriptRunner
from workers.agent.agent import Agent, AgentSettings
from workers.bridge.events import saved
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import AllBlocksCleared
from workers.bridge.events.saved import SavedIndex
from workers.bridge.events.stream import EventStream, Fresh, Resumption
from workers.bridge.events.vllm import Batch
from workers.bridge.health import EngineHealth, Life, Silence
from workers.bridge.http.facts import EngineFacts, EngineLoad, EventSource
from workers.bridge.speed import EngineSpeed

log = logging.getLogger(__name__)

LEAK = 1.1
"""Multiple of the engine's blocks. Where so many seem to be held, some were announced more often
than removed, as for a request with kv_cache_report_mode `full`. The capacity that it says is no
such number: with windows, that is how many tokens long prompts may have."""
CATCH_UP_S = 2.0
"""Longest wait, before the worker registers, for its agent to read what was published."""
BATCHES_AT_ONCE = 16
IDLE = EngineLoad()
PUBLISHED = [item for item in METRICS if item.name in {f.name for f in fields(EngineLoad)}]
"""Figures of an engine's load that are published as the engine tells them."""
SAVE_S = 30.0
SAVE_SHARE = 0.01
"""Share of the time that snapshots may take, as they hold up events."""


@dataclass(slots=True)
class Losses:
    """Counts of why what was known of the engine's cache became void."""

    streams: int = 0
    broken_events: int = 0
    missing_parents: int = 0
    leaks: int = 0


class Rank:
    """A worker of one rank: `run` until cancelled, then `leave`.

    path: file that outlives the agent; None: nothing is kept. load, read_s: the engine's load, and
    when it was asked for.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: EventSource,
        facts: EngineFacts,
        info: WorkerInfo,
        settings: AgentSettings,
        runner: ScriptRunner,
        keyspace: Keyspace,
        speed: EngineSpeed,
        health: EngineHealth,
        path: Path | None,
        load: EngineLoad = IDLE,
        read_s: float = 0.0,
    ) -> None:
        self.info = info
        self.speed, self.health = speed, health
        self.load, self.read_s = load, read_s
        self.reserved: list[Load | None] = [None]
        """Capacity that routers had reserved before `load` was asked for, and after."""
        self.losses = Losses()
        self.joined_late = False
        self.is_shared = False
        self.silence = Silence(facts.block_size)
        self._source = source
        self._facts = facts
        self._room = facts.pool_blocks * max(1, facts.block_size // info.block_size)
        """Blocks of the index that can lie on its device at most; 0: not known."""
        self._path = path
        self._form = [
            "4",
            facts.kind,
            source.endpoint,
            str(info.block_size),
            str(facts.block_size),
            str(facts.announces_copies),
        ]
        self._folders = dict(facts.folders)
        self._known = self._load()
        self._last = self._known.position if self._known else None
        self.stream = EventStream(context, source, self._last) if source.endpoint else None
        """Events of the engine; None: it publishes nothing."""
        self.blocks = self._new_blocks(joined_late=False)
        self.agent = Agent(
            *(runner, keyspace, info, settings), measure=self._measure, judge=lambda: self.rung
        )

    @property
    def late_s(self) -> float:
        """Returns the seconds that the engine keeps others waiting now, beyond what is usual."""
        return self.health.verdict(asyncio.get_running_loop().time()).late_s

    @property
    def unknown_share(self) -> float:
        """Returns the share of the engine's cache, 0-1, that may hold blocks nobody knows of."""
        if not self.joined_late:
            return 0.0
        room = self._room or self.info.kv_total_blocks
        return max(0.0, 1 - self.blocks.num_held / max(1, room))

    @property
    def rung(self) -> Rung:
        """Returns how much of what the engine caches is known now."""
        if self.is_shared:
            cause = "several engines answer at one address: give each an agent and an address"
            return Rung(Trust.APPROXIMATE, cause)
        if self.stream is None:
            return self._facts.rung
        events, replay = self._source.endpoint, self._source.replay
        if not self.stream.is_current and replay is not None:
            cause = f"{replay} has not told what was published: can the agent reach it?"
        elif not self.stream.is_current or self.silence.since_s is not None:
            cause = f"nothing is heard from {events}: does the engine publish there?"
        elif self.unknown_share:
            cause = "it may hold what was published before its agent came: it goes as it is evicted"
            return Rung(Trust.BOUND, cause)
        else:
            return TOP
        return Rung(Trust.APPROXIMATE, cause)

    async def run(self) -> None:
        """Raises what Agent.start and Agent.run raise."""
        async with asyncio.TaskGroup() as tasks:
            with self.stream or nullcontext():
                tasks.create_task(self._keep())
                following = tasks.create_task(self._follow())
                try:
                    if self.stream is not None:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(CATCH_UP_S):
                                await self.stream.began.wait()
                    await self.agent.start()
                    await self.agent.run()
                finally:
                    # Before the sockets are closed.
                    following.cancel()
                    await asyncio.wait([following])

    def note(self, load: EngineLoad, read_s: float) -> None:
        """Learns from a reading. read_s: when it was asked for, by the event loop's clock."""
        now = asyncio.get_running_loop().time()
        self.load, self.read_s = load, read_s
        self.speed.observe(load, now)
        if self.stream is not None:
            self.silence.observe(load, self.stream.counters.batches, now)
        speed, tokens = self.speed.speed(), self.info.most_tokens
        per_pair_s = speed.prefill_s_per_token2 * tokens / 2
        self.health.read(load, now, tokens * (speed.prefill_s_per_token + per_pair_s))

    def judge(self) -> Life:
        """Returns whether the engine is well, by all that is known of it, and tells its agent."""
        now = asyncio.get_running_loop().time()
        self.health.heard(self.stream.counters.heard if self.stream else 0, now)
        verdict = self.health.verdict(now)
        if verdict.why != self.agent.ill:
            told = f"the engine {verdict.why}" if verdict.why else "the engine is well again"
            level = logging.WARNING if verdict.why else logging.INFO
            log.log(level, "%s: %s", self.info.key, told)
        self.agent.ill = verdict.why
        return verdict.life

    def _measure(self) -> tuple[ForwardPassMetrics, Speed]:
        info, load = self.info, self.load
        steps = load.steps if load.kv_leases_ended is not None else None
        published = {
            item.name: item.kind(value)
            for item in PUBLISHED
            if (value := getattr(load, item.name)) is not None
        }
        metrics = ForwardPassMetrics(
            request_active_slots=load.running,
            request_total_slots=info.max_requests,
            kv_active_blocks=round(load.kv_usage * info.kv_total_blocks),
            kv_total_blocks=info.kv_total_blocks,
            num_requests_waiting=load.waiting,
            gpu_cache_usage_perc=load.kv_usage,
            gpu_prefix_cache_hit_rate=load.hit_rate or 0.0,
            late_s=self.late_s,
            read_s_ago=asyncio.get_running_loop().time() - self.read_s,
            mean_prefill_tokens=self.speed.mean_prefill_tokens,
            engine_steps=int(steps) if steps is not None else None,
            **published,
        )
        return metrics.beside(*self.reserved), self.speed.speed()

    async def leave(self, *, keeps_engine: bool) -> None:
        """Takes the worker out of service unless the engine is to be kept, and saves what is known.
        Call once `run` is cancelled."""
        if not keeps_engine:
            await self.agent.stop()
        await self._save()

    async def _follow(self) -> None:
        if self.stream is None:
            return
        async for item in self.stream.follow():
            match item:
                case Fresh():
                    # The first is no loss.
                    self.losses.streams += self.stream.counters.batches > 0
                    self._forget(joined_late=item.joined_late)
                case Resumption():
                    assert self._known is not None
                    self.joined_late = self._known.joined_late
                    self.blocks = self._new_blocks(joined_late=self.joined_late)
                    self.blocks.restore(self._known.snapshot)
                    self._known = None
                    self._show(self.blocks.held())
                    log.info("%s: %d blocks known from before", self.info.key, self.blocks.num_held)
                case Batch():
                    self._note_life(self.stream)
                    self._take(item)
                    if self.stream.counters.batches % BATCHES_AT_ONCE == 0:
                        # A long replay must not keep the lease from being renewed.
                        await asyncio.sleep(0)

    def _note_life(self, stream: EventStream) -> None:
        """Begins another life of an engine that does not tell when it started, if its events have
        begun anew."""
        last, self._last = self._last, stream.position
        if self._facts.started_s is not None or last is None or self._last is None:
            return
        if self._last.seq <= last.seq and self._last.ts > last.ts:
            life = f"events-{self._last.ts:.3f}"
            self.agent.info = replace(self.agent.info, engine_life=life)

    def _take(self, batch: Batch) -> None:
        changes: list[CacheEvent] = []
        try:
            for event in batch.events:
                changes += self.blocks.take(event)
                self.joined_late &= not isinstance(event, AllBlocksCleared)
        except InvalidRequest as error:
            log.warning("%s: an event that cannot be: %s", self.info.key, error)
            self.losses.broken_events += 1
            self._forget(joined_late=True)
            return
        if changes:
            self._show(changes)
        if batch.num_broken:
            self.losses.broken_events += 1
        elif self.blocks.is_blind:
            self.losses.missing_parents += 1
        elif 0 < LEAK * self._room < self.blocks.num_held:
            self.losses.leaks += 1
        else:
            return
        log.warning("%s: events are missing or contradict each other; starting anew", self.info.key)
        self._forget(joined_late=True)

    def _show(self, changes: Iterable[CacheEvent]) -> None:
        info = self.agent.info
        if self.blocks.chunk_blocks > info.chunk_blocks:
            self.agent.info = replace(info, chunk_blocks=self.blocks.chunk_blocks)
        self.agent.notify(changes)

    def _forget(self, *, joined_late: bool) -> None:
        self.joined_late = joined_late
        self.blocks = self._new_blocks(joined_late=joined_late)
        self.agent.notify([Cleared()])

    def clear(self) -> None:
        """Forgets all blocks: the engine has dropped them and will say so later, if at all."""
        self._forget(joined_late=True)
        self.joined_late = False

    def load_adapters(self, folders: Mapping[str, str]) -> None:
        self._folders = dict(folders)
        changes = self.blocks.load_adapters(self._folders)
        if changes:
            log.info("%s: an adapter is loaded from another folder", self.info.key)
            self.agent.notify(changes)

    def _new_blocks(self, *, joined_late: bool) -> EngineBlocks:
        blocks = EngineBlocks(
            self.info.block_size,
            joined_late=joined_late,
            announces_copies=self._facts.announces_copies,
            recomputed_blocks=self.info.recomputed_blocks,
            lookahead_blocks=self.info.lookahead_blocks,
        )
        blocks.load_adapters(self._folders)
        return blocks

    async def _keep(self) -> None:
        pause_s = SAVE_S
        while self._path is not None:
            await asyncio.sleep(pause_s)
            begin = time.monotonic()
            await self._save()
            pause_s = max(SAVE_S, (time.monotonic() - begin) / SAVE_SHARE)

    def _load(self) -> SavedIndex | None:
        if self._path is None:
            return None
        try:
            return saved.load(self._path, self._form)
        except OSError as error:
            log.warning("%s: what was known before cannot be read: %s", self.info.key, error)
            return None

    async def _save(self) -> None:
        position = None if self.stream is None else self.stream.position
        if self._path is None or position is None:
            return
        snapshot = self.blocks.snapshot()
        if snapshot is None:
            return
        try:
            known = SavedIndex(self._form, position, snapshot, self.joined_late)
            await asyncio.to_thread(saved.save, self._path, known)
        except OSError as error:
            log.warning("%s: what is known cannot be kept: %s", self.info.key, error)
