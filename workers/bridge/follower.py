"""Follows an engine through its restarts: each of its ranks is a worker while the engine serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import aiohttp
import zmq.asyncio

from app.core.errors import EngineUnavailable, EngineUnfit, RedisUnavailable
from app.core.keys import Keyspace
from app.core.loads import Load
from app.core.settings.agent import EngineAgentSettings
from app.core.worker_report import UNKNOWN
from app.http.supervisor import supervised
from app.simulation.profiles import PROFILES
from app.state import leases
from app.state.scripts import ScriptRunner
from workers.agent.agent import AgentSettings
from workers.bridge.health import EngineHealth, Life, Probe
from workers.bridge.http.discovery import discover
from workers.bridge.http.engine import EngineHttp, models_of, tokenizer_hash
from workers.bridge.http.facts import EngineFacts, EngineReading
from workers.bridge.http.load import LoadReader
from workers.bridge.kv_lease import ANSWER_S, LEAST_S, cleanse, disagreement, keeps_kv, settle_lease
from workers.bridge.rank import IDLE, Rank
from workers.bridge.registration import fingerprint, kv_hosts, registration
from workers.bridge.speed import EngineSpeed
from workers.tasks import FAILURES, until_it_works

log = logging.getLogger(__name__)

POLL_S = 0.75
READ_S = 5.0
LOOK_AGAIN_S = 10.0
"""Seconds between two looks at the engine's models, and at its adapters while it has none."""
ASKED_AGAIN = 6
"""Tries before one of several engines behind one address is taken to be gone."""
UNFIT_S = 30.0
"""Longest pause until an engine that cannot be followed is looked at again."""
CAPACITY_WORKERS = 16
USUAL_CAPACITY_TOKENS = 1 << 20
"""Capacity to lay out a new index by, if the engine does not say its own."""
# SGLang's /health generates a token, and so may that of others.
HEALTH_PATHS = {"vllm": "/health", "sglang": "/ready", "openai": "/v1/models"}

State = Literal["unavailable", "unfit", "refused", "asleep", "serving", "ill", "draining"]
"""unavailable: the engine does not answer. unfit: it cannot be followed as it is. refused: Redis
does not take it. ill: it is there, and does not work."""
STATES: tuple[State, ...] = get_args(State)


class EngineFollower:
    """Follower of one engine: `run` until cancelled.

    session: to ask the engine. context: to hear its events; may be shared by many followers, as
    each context has two threads. memory: folder of the files that outlive the agent.
    """

    def __init__(
        self,
        settings: EngineAgentSettings,
        keyspace: Keyspace,
        runner: ScriptRunner,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        memory: Path,
    ) -> None:
        self.facts: EngineFacts | None = None
        self.is_away = False
        """Whether the engine was followed, and nobody has answered at its address since."""
        self.ranks: list[Rank] = []
        self.speeds: dict[int, EngineSpeed] = {}
        """Speeds by rank. They outlive the engine, which as a rule comes back as it was."""
        self.findings: Callable[[], tuple[str, ...]] = tuple
        self._state: State = "unavailable"
        self._unfit = ""
        """Why the engine cannot be followed by what it says now; "": it can."""
        self._lease_finding = ""
        self._settings = settings
        self._keyspace = keyspace
        self._runner = runner
        self._session = session
        self._context = context
        self._engine = EngineHttp(session, settings.engine_url, READ_S)
        self._memory = memory
        self._profile = PROFILES[settings.profile] if settings.profile else None
        self._is_kept = False

    @property
    def worker_id(self) -> str:
        return self._settings.resolved_id()

    @property
    def state(self) -> State:
        if self._state != "serving":
            return self._state
        if any(rank.agent.refused for rank in self.ranks):
            return "refused"
        return "ill" if any(rank.agent.ill or rank.agent.same for rank in self.ranks) else "serving"

    @property
    def why(self) -> str:
        """Returns what is wrong with the engine; "": nothing that is known."""
        agents = [rank.agent for rank in self.ranks]
        said = [told for one in agents for told in (one.refused, one.ill, one.same) if told]
        return said[0] if said else self._unfit

    async def run(self) -> None:
        while True:
            facts, block_size = await until_it_works(
                self._fit, EngineUnfit, "the engine is not followed", 0.5, UNFIT_S
            )
            reader = LoadReader(self._engine, facts.kind)
            reading = await self._while_it_sleeps(facts, reader)
            self.ranks = await self._new_ranks(facts, block_size, reading)
            self._state = "serving"
            try:
                await self._serve(facts, reader)
            finally:
                self._state = "unavailable"
                keeps = self._is_kept
                await asyncio.gather(*(rank.leave(keeps_engine=keeps) for rank in self.ranks))
                self.ranks = []

    async def stop(self) -> None:
        """Takes the engine out of service, once it has no request left; with --keep-engine it
        stays. Call while `run` runs, before it is cancelled."""
        self._is_kept = self._settings.keep_engine and self._state == "serving"
        if not self._is_kept:
            await self.drain(self._settings.drain_s)

    async def drain(self, timeout_s: float) -> None:
        """Has nothing routed to the engine any more, and waits until it has no request left,
        whoever sent it, for at most timeout_s. Call while `run` runs."""
        if self._state != "serving":
            return
        self._state = "draining"

        def is_idle(rank: Rank) -> bool:
            return rank.load.running == rank.load.waiting == 0 or self._state != "draining"

        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                tasks.create_task(rank.agent.drain(timeout_s, partial(is_idle, rank)))

    async def _fit(self) -> tuple[EngineFacts, int]:
        """Returns what the engine is, and tokens per block of the index. Raises EngineUnfit."""
        try:
            self.facts = await until_it_works(
                self._discovered, EngineUnavailable, "waiting for the engine", wait_s=0.25
            )
            block_size = await self._block_size(self.facts)
            self.facts = self.facts.beside(block_size)
        except EngineUnfit as error:
            self._state, self._unfit = "unfit", str(error)
            raise
        self._state, self._unfit, self.is_away = "unavailable", "", False
        log.info("%s %s: %s", self.facts.kind, self.facts.version, self.facts)
        return self.facts, block_size

    async def _while_it_sleeps(self, facts: EngineFacts, reader: LoadReader) -> EngineReading:
        """Waits while the engine sleeps: it has dropped all blocks, and would serve nobody."""
        while True:
            with suppress(EngineUnavailable, EngineUnfit):
                outcome = await self._engine.probe(HEALTH_PATHS[facts.kind])
                reading = await reader.read()
                sleeps = any(load.sleeps for load in reading.loads.values())
                if outcome in (Probe.ANSWERED, Probe.DENIED) and not sleeps:
                    return reading
                self._state = "asleep" if sleeps else "unavailable"
            await asyncio.sleep(POLL_S)

    async def _serve(self, facts: EngineFacts, reader: LoadReader) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(rank.run()) for rank in self.ranks]
            adapting = _begun(tasks, "adapters", self._follow_adapters)
            cleansing = _begun(tasks, "taints", partial(cleanse, self._engine, self.ranks))
            leasing = _begun(tasks, "lease", partial(self._settle_lease, facts.models[0]))
            probing = _begun(tasks, "health", partial(self._probe, HEALTH_PATHS[facts.kind]))
            ending = [
                probing,
                _begun(tasks, "facts", partial(self._look_for_changes, facts)),
                _begun(tasks, "load", partial(self._watch, facts, reader)),
            ]
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            self.is_away = probing.done()
            for task in (*running, adapting, cleansing, leasing, *ending):
                task.cancel()

    async def _probe(self, path: str) -> None:
        clock = asyncio.get_running_loop().time
        while not self._is_gone():
            await asyncio.sleep(POLL_S)
            for rank in self.ranks:
                rank.health.asked(clock())
            outcome = await self._engine.probe(path)
            for rank in self.ranks:
                rank.health.probed(outcome, clock())

    def _is_gone(self) -> bool:
        lives = [rank.judge() for rank in self.ranks]
        return all(life is Life.GONE for life in lives)

    async def _watch(self, facts: EngineFacts, reader: LoadReader) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if not reader.tells:
                continue
            try:
                # Not together: a `gather` that is cancelled may raise what one of them raises.
                before = await self._reserved_now()
                reading = await reader.read()
            except (EngineUnavailable, EngineUnfit) as error:
                log.debug("load not read: %s", error)
                continue
            after = await self._reserved_now()
            for rank, *reserved in zip(self.ranks, before, after, strict=True):
                rank.reserved = reserved
                rank.note(reading.loads.get(rank.info.key.dp_rank, IDLE), reading.asked_s)
                rank.judge()
            is_other = reading.started_s not in (None, facts.started_s)
            if is_other and not await self._answers_still(facts):
                log.warning("the engine was started again")
                return
            if any(load.sleeps for load in reading.loads.values()):
                log.warning("the engine sleeps: it has dropped what it held, and is not routed to")
                for rank in self.ranks:
                    rank.clear()
                return

    async def _reserved_now(self) -> list[Load | None]:
        return await asyncio.gather(*(rank.agent.reserved() for rank in self.ranks))

    async def _discovered(self) -> EngineFacts:
        async with aiohttp.ClientSession(headers=self._session.headers) as session:
            return await discover(session, self._engine.url, self._settings)

    async def _answers_still(self, facts: EngineFacts) -> bool:
        """Whether the process that `facts` are of answers still, beside another at its address."""
        for _ in range(ASKED_AGAIN if facts.started_s is not None else 0):
            with suppress(EngineUnavailable, EngineUnfit):
                if (await self._discovered()).started_s == facts.started_s:
                    for rank in self.ranks:
                        rank.is_shared = True
                    return True
        return False

    async def _tells_more(self, facts: EngineFacts) -> bool:
        for rank in self.ranks:
            told = rank.info.kv_fingerprint
            if any(one.endswith(f"={UNKNOWN}") for one in told):
                number = rank.info.key.dp_rank
                if await fingerprint(self._settings, self._context, facts, number) != told:
                    return True
        return False

    async def _look_for_changes(self, facts: EngineFacts) -> None:
        """Returns once the engine is another, or has other models, for longer than a moment."""
        changed: EngineFacts | None = None
        while True:
            await asyncio.sleep(LOOK_AGAIN_S if changed is None else POLL_S)
            if await self._tells_more(facts):
                log.info("the engine tells more of its KV: it registers anew")
                return
            block_size = self.ranks[0].info.block_size
            is_refused = any(rank.agent.refused for rank in self.ranks)
            if is_refused and await self._block_size(facts) != block_size:
                log.info("another worker has laid the namespace out: the engine registers anew")
                return
            before, changed = changed, None
            try:
                latest = (await self._discovered()).beside(block_size)
            except EngineUnavailable:
                continue
            except EngineUnfit as error:
                if self._unfit != str(error):
                    log.warning("the engine is followed by what it said before: %s", error)
                self._unfit = str(error)
                continue
            self._unfit = ""
            if replace(latest, adapters=facts.adapters, folders=facts.folders) != facts:
                if latest.started_s != facts.started_s and await self._answers_still(facts):
                    continue
                changed = latest
                if changed == before:
                    log.info("the engine has changed: it registers anew")
                    return

    async def _settle_lease(self, model: str) -> None:
        self._lease_finding = ""
        if keeps_kv(self._settings, (rank.load for rank in self.ranks)):
            engine = EngineHttp(self._session, self._engine.url, ANSWER_S)
            lease_s = await settle_lease(engine, model, self.ranks)
            self._lease_finding = disagreement(self._settings.kv_lease_s, lease_s)

    def _all_findings(self) -> tuple[str, ...]:
        own = self.facts.findings if self.facts else ()
        return (*self.findings(), *own, *filter(None, [self._lease_finding]))

    async def _follow_adapters(self) -> None:
        while True:
            has_some = any(rank.agent.info.adapters for rank in self.ranks)
            await asyncio.sleep(POLL_S if has_some else LOOK_AGAIN_S)
            with suppress(EngineUnavailable, EngineUnfit):
                models = await models_of(self._engine, self._settings)
                for rank in self.ranks:
                    rank.agent.info = replace(rank.agent.info, adapters=models.adapters)
                    rank.load_adapters(dict(models.folders))

    async def _new_ranks(
        self, facts: EngineFacts, block_size: int, reading: EngineReading
    ) -> list[Rank]:
        settings = self._settings
        agent_settings = AgentSettings(
            settings.lease_ttl_s,
            settings.index_blocks
            or CAPACITY_WORKERS * (facts.capacity_tokens or USUAL_CAPACITY_TOKENS) // block_size,
            settings.index_shards,
        )
        probed = ""
        with suppress(EngineUnavailable, EngineUnfit):
            probed = await tokenizer_hash(self._engine, facts.models[0])
        hosts = await kv_hosts(settings)
        now, ranks = asyncio.get_running_loop().time(), list[Rank]()
        waits = bool(settings.kv_transfer)
        for source in facts.sources:
            speed = self.speeds.setdefault(
                source.rank, EngineSpeed(facts.capacity_tokens, self._profile)
            )
            info = await registration(
                settings, self._context, facts, source, block_size, probed, hosts
            )
            if keeps_kv(settings, reading.loads.values()):
                info = replace(info, kv_lease_s=LEAST_S)
            file = f"{settings.namespace}-{info.key.worker_id}-{source.rank}.blocks"
            rank = Rank(
                *(self._context, source, facts, info, agent_settings),
                *(self._runner, self._keyspace, speed),
                EngineHealth(now, stall_s=settings.stall_s, waits_for_others=waits),
                self._memory / file,
                reading.loads.get(source.rank, IDLE),
                reading.asked_s,
            )
            rank.agent.findings = self._all_findings
            ranks.append(rank)
        return ranks

    async def _block_size(self, facts: EngineFacts) -> int:
        if self._settings.block_size is not None:
            return self._settings.block_size
        ask = partial(self._runner.one, leases.block_size_of(self._keyspace))
        known = await until_it_works(ask, RedisUnavailable, f"{self._settings.namespace}: read")
        return known or facts.block_size


def _begun(
    tasks: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    return tasks.create_task(supervised(name, run, FAILURES))
