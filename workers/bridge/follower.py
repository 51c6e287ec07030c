"""Follows an engine through its restarts: each of its ranks is a worker while the engine serves."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import aiohttp
import zmq.asyncio

from app.core.agent_settings import EngineAgentSettings
from app.core.errors import ConfigError, EngineUnavailable, RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import WorkerKey
from app.core.worker_report import ForwardPassMetrics, Role, Speed, WorkerInfo
from app.simulation.profiles import PROFILES, Profile
from app.state import leases
from app.state.scripts import ScriptRunner
from workers.agent.agent import AgentSettings
from workers.bridge.discovery import discover
from workers.bridge.engine_http import EngineHttp
from workers.bridge.engine_models import models_of, tokenizer_hash
from workers.bridge.facts import EngineFacts, EngineLoad, EngineReading, EventSource, Overrides
from workers.bridge.load import LoadReader
from workers.bridge.rank import Rank
from workers.bridge.speed import EngineSpeed
from workers.retry import until_it_works

log = logging.getLogger(__name__)

POLL_S = 0.75
MAX_FAILURES = 2
"""An engine that has not answered so many times in a row is not routed to: after 3 s at most."""
LOOK_AGAIN_S = 10.0
"""How often it is asked for its models, and for its adapters while it has none."""
CAPACITY_WORKERS = 16

IDLE = EngineLoad(running=0, waiting=0, kv_usage=0.0)

State = Literal["unavailable", "asleep", "serving", "draining"]


class EngineFollower:
    """`run` until cancelled.

    session: for what is asked of the engine. memory: the folder of what outlives the agent.
    """

    def __init__(
        self,
        settings: EngineAgentSettings,
        keyspace: Keyspace,
        runner: ScriptRunner,
        session: aiohttp.ClientSession,
        overrides: Overrides,
        memory: Path,
    ) -> None:
        self.facts: EngineFacts | None = None
        self.state: State = "unavailable"
        self.ranks: list[Rank] = []
        self.loads: dict[int, EngineLoad] = {}
        self.speeds: dict[int, EngineSpeed] = {}
        """Outlive the engine, which as a rule comes back as it was."""
        self._settings = settings
        self._keyspace = keyspace
        self._runner = runner
        self._session = session
        self._engine = EngineHttp(session, settings.engine_url, POLL_S)
        self._overrides = overrides
        self._memory = memory
        self._profile = _profile_of(settings.profile)

    async def run(self) -> None:
        """Raises ConfigError if the engine cannot be followed, and what Agent.run raises."""
        with zmq.asyncio.Context() as context:
            while True:
                facts = await self._discovered()
                reader = LoadReader(self._engine, facts.kind)
                await self._awake(facts, reader)
                self.ranks = await self._new_ranks(context, facts)
                self.state = "serving"
                try:
                    await self._serve(facts, reader)
                finally:
                    self.state = "unavailable"
                    await asyncio.gather(*(rank.leave() for rank in self.ranks))
                    self.ranks = []

    async def drain(self, timeout_s: float) -> None:
        """While `run` runs: from now on nothing is routed to the engine; waits until it has no
        request left, whoever sent it, for at most timeout_s."""
        if self.state != "serving":
            return
        self.state = "draining"

        def is_idle(rank: int) -> bool:
            load = self.loads.get(rank, IDLE)
            return load.running == load.waiting == 0

        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                number = rank.info.key.dp_rank
                tasks.create_task(rank.agent.drain(timeout_s, partial(is_idle, number)))

    async def _discovered(self) -> EngineFacts:
        self.facts = await until_it_works(
            partial(discover, self._session, self._engine.url, self._overrides),
            EngineUnavailable,
            "waiting for the engine",
            wait_s=0.25,
        )
        log.info("%s %s: %s", self.facts.kind, self.facts.version, self.facts)
        return self.facts

    async def _awake(self, facts: EngineFacts, reader: LoadReader) -> None:
        """Wait while it sleeps: it has dropped all blocks, and would serve nobody."""
        while True:
            with suppress(EngineUnavailable):
                self.loads = (await self._read(facts, reader)).loads
                if not any(load.asleep for load in self.loads.values()):
                    return
                self.state = "asleep"
            await asyncio.sleep(POLL_S)

    async def _serve(self, facts: EngineFacts, reader: LoadReader) -> None:
        """Until the engine is gone, asleep or has other models."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(rank.run()) for rank in self.ranks]
            looking = tasks.create_task(self._look_for_changes(facts))
            adapting = tasks.create_task(self._follow_adapters())
            watching = tasks.create_task(self._watch(facts, reader))
            await asyncio.wait([looking, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, looking, adapting, watching):
                task.cancel()

    async def _watch(self, facts: EngineFacts, reader: LoadReader) -> None:
        """Read its load, until it does not answer or sleeps."""
        loop = asyncio.get_running_loop()
        failures = 0
        while failures < MAX_FAILURES:
            await asyncio.sleep(POLL_S)
            try:
                reading = await self._read(facts, reader)
            except EngineUnavailable as error:
                failures += 1
                log.warning("the engine fails: %s", error)
                continue
            failures = 0
            self.loads = reading.loads
            for number, load in self.loads.items():
                if number in self.speeds:
                    self.speeds[number].observe(load, loop.time())
            for rank in self.ranks:
                rank.compare(self.loads.get(rank.info.key.dp_rank, IDLE), loop.time())
            if reading.started_s is not None and reading.started_s != facts.started_s:
                log.warning("the engine was started again")
                return
            if any(load.asleep for load in self.loads.values()):
                log.warning("the engine sleeps: it has dropped what it held, and is not routed to")
                for rank in self.ranks:
                    rank.clear()
                return

    async def _read(self, facts: EngineFacts, reader: LoadReader) -> EngineReading:
        # SGLang's /health generates a token.
        await self._engine.get("/health" if facts.kind == "vllm" else "/ready")
        return await reader.read()

    async def _look_for_changes(self, facts: EngineFacts) -> None:
        """Until it has come to have other models, or is another."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            with suppress(EngineUnavailable):
                found = await discover(self._session, self._engine.url, self._overrides)
                if replace(found, adapters=facts.adapters, folders=facts.folders) != facts:
                    log.info("the engine has changed: it registers anew")
                    return

    async def _follow_adapters(self) -> None:
        """They come and go, also under a name that another had before."""
        while True:
            has_some = any(rank.agent.info.adapters for rank in self.ranks)
            await asyncio.sleep(POLL_S if has_some else LOOK_AGAIN_S)
            with suppress(EngineUnavailable):
                found = await models_of(self._engine, self._overrides)
                for rank in self.ranks:
                    rank.agent.info = replace(rank.agent.info, adapters=found.adapters)
                    rank.load_adapters(dict(found.folders))

    async def _new_ranks(self, context: zmq.asyncio.Context, facts: EngineFacts) -> list[Rank]:
        settings = self._settings
        block_size = await self._block_size(facts)
        agent_settings = AgentSettings(
            settings.lease_ttl_s,
            settings.index_blocks or CAPACITY_WORKERS * facts.capacity_tokens // block_size,
            settings.index_shards,
        )
        probed = ""
        with suppress(EngineUnavailable, ConfigError):
            probed = await tokenizer_hash(self._engine, facts.models[0])
        ranks = []
        for source in facts.sources:
            self.speeds.setdefault(source.rank, EngineSpeed(facts.capacity_tokens, self._profile))
            info = self._info(facts, source, block_size, probed)
            ranks.append(
                Rank(
                    context,
                    source,
                    facts,
                    info,
                    agent_settings,
                    self._runner,
                    self._keyspace,
                    lambda rank=source.rank: self._measure(rank),  # type: ignore[misc]
                    self._memory
                    / f"{settings.namespace}-{info.key.worker_id}-{source.rank}.blocks",
                )
            )
        return ranks

    def _info(
        self, facts: EngineFacts, source: EventSource, block_size: int, probed: str
    ) -> WorkerInfo:
        """What one of the engine's ranks registers. probed: the hash of its tokenizer."""
        settings = self._settings
        return WorkerInfo(
            key=WorkerKey(settings.resolved_id(), source.rank),
            address=settings.address or self._engine.url,
            block_size=block_size,
            kv_total_blocks=facts.capacity_tokens // block_size,
            max_requests=settings.max_requests,
            reuse_blocks=max(1, facts.reuse_tokens // block_size),
            recomputed_blocks=-(-facts.recomputed_tokens // block_size),
            accelerator="",
            engine=f"{facts.kind} {facts.version}",
            models=facts.models,
            adapters=facts.adapters,
            max_model_len=facts.max_model_len or 0,
            tokenizer=facts.tokenizer,
            tokenizer_hash=probed,
            event_addresses=tuple(filter(None, (source.endpoint, source.replay))),
            role=Role.parse(settings.role),
            kv_transfer=settings.kv_transfer,
            kv_lease_s=settings.kv_lease_s,
            bootstrap_port=settings.bootstrap_port if settings.kv_transfer == "sglang" else 0,
        )

    async def _block_size(self, facts: EngineFacts) -> int:
        """Of the index, in tokens. Raises ConfigError if it does not divide the engine's."""
        settings = self._settings
        block_size = settings.block_size or await self._namespace_block_size()
        block_size = block_size or facts.block_size
        if facts.block_size % block_size:
            raise ConfigError(
                f"the engine's blocks of {facts.block_size} tokens are not whole blocks of the "
                f"{block_size} that namespace {settings.namespace!r} has: start it with a multiple "
                "of them, or give it a namespace of its own (--namespace)"
            )
        return block_size

    async def _namespace_block_size(self) -> int | None:
        """None if the namespace is new; waits for Redis."""
        call = leases.block_size_of(self._keyspace)
        return await until_it_works(
            partial(self._runner.one, call), RedisUnavailable, f"{self._settings.namespace}: read"
        )

    def _measure(self, rank: int) -> tuple[ForwardPassMetrics, Speed]:
        load = self.loads.get(rank, IDLE)
        served = next(r for r in self.ranks if r.info.key.dp_rank == rank)
        now = asyncio.get_running_loop().time()
        total, silent_since = served.info.kv_total_blocks, served.silence.since_s
        metrics = ForwardPassMetrics(
            request_active_slots=load.running,
            request_total_slots=self._settings.max_requests,
            kv_active_blocks=round(load.kv_usage * total),
            kv_total_blocks=total,
            num_requests_waiting=load.waiting,
            gpu_cache_usage_perc=load.kv_usage,
            gpu_prefix_cache_hit_rate=load.hit_rate or 0.0,
            kv_idle_before_evict_s=load.idle_before_evict_s or 0.0,
            events_silent_s=None if silent_since is None else now - silent_since,
        )
        return metrics, self.speeds[rank].speed()


def _profile_of(name: str) -> Profile | None:
    if name and name not in PROFILES:
        raise ConfigError(f"profile: needs one of {', '.join(PROFILES)}, got {name!r}")
    return PROFILES.get(name)
