"""Agent of an engine: registers, renews the lease, publishes metrics, and has ownership published.

Each incarnation has one writer. Whatever goes wrong between agent and Redis (a lapsed lease, an
emptied or failed-over Redis, a lost batch) shows up as a refusal, and the response is always the
same: a new incarnation, everything published under it, then one switch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from app.core import registration
from app.core.errors import IncarnationLost, NamespaceMismatch, RedisUnavailable, WorkerReplaced
from app.core.events import CacheEvent
from app.core.keys import METRICS_MAXLEN, Keyspace, metrics_interval_s
from app.core.loads import Load
from app.core.registration import fitting
from app.core.trust import TOP, Rung, Trust
from app.core.types import Incarnation, Tier
from app.core.worker_report import NO_READINGS, ForwardPassMetrics, GpuReadings, Speed, WorkerInfo
from app.http.supervisor import supervised
from app.state import leases, models, reservations
from app.state.connect import deadline
from app.state.scripts import Call, ScriptRunner
from workers.agent.publish import Publisher
from workers.tasks import FAILURES, until_it_works

log = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 1.0
MAX_RENEWAL_S = 2.0
"""Longest pause between renewals: a worker whose lease is made to lapse, as a request says that it
failed, is retired after five seconds without one, however long the lease."""
RECOUNT_BEATS, RECOUNT_WORKERS = 3, 256
"""Renewals until one has Redis count the worker's load as well, which costs it ten times as much
with 50 requests; more where there are more workers."""
AUDIT_INTERVAL_S = 2.0
"""Pause between checks of some blocks and buckets, so that damage done in Redis does not persist: a
pool of 25,000 blocks every 200 s, the 131,072 buckets of a million blocks every 34 minutes."""
ANNOUNCE_INTERVAL_S = 10.0
DRAIN_POLL_S = 0.05
REFUSALS = (NamespaceMismatch, WorkerReplaced)
"""Reasons for which a worker is not registered; they may pass, whatever this process does."""
REGISTER_AGAIN_S = 10.0
AUDIT_WORKERS = 64
"""Workers above which each audits less often, so that all audits together take Redis a twentieth of
its time."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of a worker's agent. lease_ttl_s: how long the worker is routed to after its last
    sign of life.

    index_blocks: unique blocks that the namespace is laid out for; shards: of its index. Both count
    only if the namespace is new.
    """

    lease_ttl_s: float
    index_blocks: int
    shards: int = 1


class Agent:
    """Agent of one worker: start, run, stop. info, ill: may be replaced, and routers know a
    heartbeat later.

    Every 100 ms, less often in a fleet of more than 256 workers, `measure` and `read_gpu` return
    what to publish, and at each renewal `judge` how much of what the engine holds is known. What
    routers have reserved is asked of Redis, unless `measure` says it.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        info: WorkerInfo,
        settings: AgentSettings,
        measure: Callable[[], tuple[ForwardPassMetrics, Speed]],
        read_gpu: Callable[[], GpuReadings] = lambda: NO_READINGS,
        judge: Callable[[], Rung] = lambda: TOP,
    ) -> None:
        self.info = info
        self.ill = ""
        """Why its engine is to get no requests if others can take them; "": it is well."""
        self.findings: Callable[[], tuple[str, ...]] = tuple
        self.same = ""
        """Finding that another worker has its engine, and gets the requests; "": none has."""
        self.refused = ""
        """Why the worker is not registered; "": it is, or it is about to be."""
        self.incarnation: Incarnation | None = None
        self.num_leases = 1
        self._runner = runner
        self._keyspace = keyspace
        self._ttl_ms = round(settings.lease_ttl_s * 1000)
        self._shards = settings.shards
        self._measure = measure
        self._read_gpu = read_gpu
        self._nonce = secrets.token_hex(4)
        self._staged: Incarnation | None = None
        """Incarnation that is registered, but not routed to yet."""
        self._drains = False
        self._is_lost = False
        self._tainted_in: str | None = None
        """Life of its engine in which Redis last said that it is tainted."""
        self._told_late: int | None = None
        self._judge = judge
        self._rung = TOP
        self._due: int | None = None
        """Notices after which Redis knows all that the engine holds."""
        self._publisher = Publisher(
            runner, keyspace, info.key, self._nonce, settings.index_blocks, info.reuse_rule
        )

    @property
    def is_tainted(self) -> bool:
        """Whether nothing is routed here before the engine has begun anew, or dropped what it
        holds."""
        return self._tainted_in == self.info.engine_life

    def notify(self, events: Iterable[CacheEvent]) -> None:
        self._publisher.notify(events)

    async def published(self) -> bool:
        return await self._publisher.published()

    async def start(self) -> None:
        """Registers: from here on the worker is routed to, and its previous life's blocks are void.
        Waits for Redis, and for a namespace that takes it, as long as it takes."""
        activated = False
        while not activated:
            self.incarnation = (await self._register()).incarnation
            activated = await self._publisher.insist(self._activate(self.incarnation))
        log.info("%s registered as incarnation %d", self.info.key, self.incarnation)

    async def run(self) -> None:
        """Runs until cancelled. If another process takes the key over, waits until that has
        ended."""
        async with asyncio.TaskGroup() as tasks:
            for task, run in {
                "lease": self._keep_lease,
                "blocks": self._publish,
                "audit": self._audit,
                "measurements": self._publish_metrics,
                "models": self._announce,
            }.items():
                tasks.create_task(supervised(task, run, FAILURES))

    async def drain(self, timeout_s: float, is_idle: Callable[[], bool] = lambda: True) -> bool:
        """Has nothing routed here from now on, and waits until no request is left. Returns False if
        some are left after timeout_s. Call while `run` runs. is_idle: whether the engine, which
        others may use as well, has none either. Where Redis has been away for as long as a lease,
        the engine alone says it."""
        call = leases.drain(self._keyspace, self.info.key)
        left: int | None = None
        told_s = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    # Each time, as Redis may have lost it.
                    with suppress(RedisUnavailable):
                        left = await self._runner.one(call)
                        told_s = time.monotonic()
                    is_away = time.monotonic() - told_s > self._ttl_ms / 1000
                    if (left == 0 or is_away) and is_idle():
                        return True
                    await asyncio.sleep(DRAIN_POLL_S)
        what = "the engine's own" if left == 0 else "an unknown number of" if left is None else left
        log.warning("%s: not drained after %g s: %s requests left", self.info.key, timeout_s, what)
        return False

    async def stop(self) -> None:
        """Retires, so that nothing is routed here for the rest of the lease. Call once `run` has
        ended, which would take that for a loss."""
        leased = [inc for inc in (self.incarnation, self._staged) if inc is not None]
        if not leased:
            return
        try:
            await self._runner.run([self._retire(inc) for inc in leased])
            self.incarnation = self._staged = None
        except RedisUnavailable as error:
            log.warning("%s could not retire (its lease will lapse): %s", self.info.key, error)
        self._publisher.stop(is_retired=self.incarnation is None)

    async def _register(self, previous: Incarnation | None = None) -> leases.Registration:
        """Returns a new incarnation, which may publish in every shard and has published nothing.
        previous: this process's last incarnation. Waits while another process has the key and
        renews its lease, and while the namespace is not one for this worker."""
        call = leases.register(
            self._keyspace,
            self._told(),
            self._nonce,
            ttl_ms=self._ttl_ms,
            shards=self._shards,
            previous=previous,
        )

        async def attempt() -> leases.Registration:
            try:
                registration = await self._publisher.insist(call)
            except REFUSALS as error:
                self.refused = str(error)
                raise
            self.refused = ""
            return registration

        what = f"{self.info.key} is not routed to"
        while True:
            registration = await until_it_works(
                attempt, REFUSALS, what, wait_s=0.5, wait_max_s=REGISTER_AGAIN_S
            )
            if await self._publisher.open(registration.incarnation, registration.shards):
                return registration
            log.warning(
                "%s: incarnation number %d is taken; registering again",
                self.info.key,
                registration.incarnation,
            )
            await self._publisher.insist(self._retire(registration.incarnation))

    async def _keep_lease(self) -> None:
        """Renews three times per lease and every MAX_RENEWAL_S, for the staged incarnation as well.
        If an attempt took longer than the interval, renews at once: with a pause on top, an agent
        that missed one answer would lose its lease though Redis is back in time."""
        loop = asyncio.get_running_loop()
        interval_s = min(self._ttl_ms / 3000, MAX_RENEWAL_S)
        due = loop.time()
        beats = 0
        while True:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            leased = [inc for inc in (self.incarnation, self._staged) if inc is not None]
            beats += 1
            thorough = beats >= RECOUNT_BEATS * max(1.0, self.num_leases / RECOUNT_WORKERS)
            if thorough:
                beats = 0
            life = self.info.engine_life
            try:
                renewed = await self._runner.run([self._renew(inc, thorough) for inc in leased])
            except RedisUnavailable as error:
                log.warning("%s: lease not renewed: %s", self.info.key, error)
                continue
            self.num_leases = max(1, *(one.num_leases for one in renewed))
            if self.incarnation != leased[0]:
                continue
            if renewed[0].num_leases:
                self._drains = renewed[0].drains
                if self.same != renewed[0].same:
                    self.same = renewed[0].same
                    log.error("%s %s", self.info.key, self.same or "has an engine of its own")
                self._tainted_in = life if renewed[0].tainted else None
            else:
                self._publisher.interrupt(IncarnationLost(f"incarnation {leased[0]} lapsed"))

    def _renew(self, inc: Incarnation, thorough: bool) -> Call[leases.Renewal]:
        return leases.renew(
            self._keyspace,
            self._told(),
            inc,
            self._nonce,
            ttl_ms=self._ttl_ms,
            shards=self._publisher.num_shards,
            staged=inc == self._staged,
            thorough=thorough,
            drains=self._drains and inc == self.incarnation,
            tainted=self.is_tainted,
        )

    def _told(self) -> WorkerInfo:
        rung = self._judge()
        if rung.trust is not Trust.EXACT:
            self._due = None
        elif self._due is None:
            self._due = self._publisher.num_notified
        if self._due is not None and not self._publisher.has_published(self._due):
            rung = Rung(Trust.BOUND, "Redis has yet to be told all that it holds")
        if rung != self._rung:
            log.warning("%s: %s: %s", self.info.key, rung.trust, rung.trust_cause or "all is known")
        self._rung = rung
        return replace(
            self.info, ill=self.ill or self.same, findings=self.findings(), **rung._asdict()
        )

    def _retire(self, inc: Incarnation) -> Call[bool]:
        return leases.retire(self._keyspace, self.info.key, inc, self._nonce)

    def _activate(self, inc: Incarnation, previous: Incarnation | None = None) -> Call[bool]:
        return leases.activate(
            self._keyspace,
            self.info.key,
            inc,
            self._nonce,
            previous=previous,
            drains=self._drains,
            tainted=self.is_tainted,
        )

    async def _audit(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_INTERVAL_S * max(1.0, self.num_leases / AUDIT_WORKERS))
            self._publisher.audit_soon()

    async def _publish(self) -> None:
        while True:
            try:
                if self._is_lost:
                    await self._resync()
                assert self.incarnation is not None
                await self._publisher.publish(self.incarnation)
            except IncarnationLost as loss:
                log.warning("%s: %s; resyncing", self.info.key, loss)
                self._is_lost = True
            except Exception:
                self._is_lost = True
                raise

    async def _resync(self) -> None:
        """Makes a new incarnation, publishes everything under it, and switches once. Raises
        IncarnationLost if the new one is lost as well."""
        registration = await self._register(self.incarnation)
        new = registration.incarnation
        self._staged = new
        try:
            if registration.predecessor_lives:
                await self._publisher.publish_all(new)
            else:
                self._due = None
                await self._publisher.insist(self._renew(new, thorough=False))
            if not await self._publisher.insist(self._activate(new, self.incarnation)):
                raise IncarnationLost(f"staged incarnation {new} was lost")
        except IncarnationLost:
            self._staged = None
            raise
        # Not sooner: if cancelled before this, the worker may be routed to as either, and `stop`
        # ends both.
        self.incarnation, self._staged = new, None
        log.info("%s resynced as incarnation %d", self.info.key, new)

    async def _announce(self) -> None:
        """Has the directory of models know which ones this worker serves."""
        refused: dict[str, str] = {}
        left_out: tuple[str, ...] = ()
        while True:
            fit, before = fitting(self.info), left_out
            names, left_out = (*fit.models, *fit.adapters), fit.findings
            for finding in left_out if left_out != before else ():
                log.warning("%s: %s", self.info.key, finding)
            call = models.announce(self._keyspace.namespace, names)
            try:
                was_refused, refused = refused, await self._runner.one(call)
                for name, holder in refused.items() - was_refused.items():
                    log.warning(
                        "%s: no request for model %s comes here: %s",
                        self.info.key,
                        name,
                        f"namespace {holder} has that name" if holder else "there are too many",
                    )
            except RedisUnavailable as error:
                log.debug("%s: models not announced: %s", self.info.key, error)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _measured(self) -> tuple[ForwardPassMetrics, Speed]:
        metrics, speed = self._measure()
        shown = self._publisher.num_wanted
        return (
            replace(
                metrics,
                device_blocks=shown[Tier.DEVICE],
                host_blocks=shown[Tier.HOST],
                disk_blocks=shown[Tier.DISK],
            ),
            speed,
        )

    async def reserved(self) -> Load | None:
        """Returns what routers have reserved on the worker now; None: Redis does not say."""
        if self.incarnation is None:
            return None
        with suppress(RedisUnavailable):
            return await self._runner.one(reservations.load_of(self._keyspace, self.incarnation))
        return None

    async def _tell_late(self, late: int | None) -> None:
        """Tells Redis of late fetches before anybody hears that the engine has counted none since.
        Raises RedisUnavailable."""
        if late and late != self._told_late:
            targets = await self._runner.one(leases.fetched_late(self._keyspace, self.info.key))
            log.error("%s: KV was fetched late, perhaps by %s", self.info.key, targets or "nobody")
        self._told_late = late

    async def _publish_metrics(self) -> None:
        """Publishes only the latest value: a tick that Redis does not take is not retried."""
        while True:
            await asyncio.sleep(metrics_interval_s(self.num_leases))
            metrics, speed = self._measured()
            if metrics.num_requests and metrics.reserved_requests is None:
                metrics = metrics.beside(await self.reserved())
            entry: dict[Any, Any] = {
                "worker": str(self.info.key),
                "incarnation": str(self.incarnation),
                **registration.encode_metrics(metrics, speed, self._read_gpu()),
            }
            try:
                await self._tell_late(metrics.kv_fetched_late)
                async with deadline(METRICS_TIMEOUT_S):
                    await self._runner.redis.xadd(
                        self._keyspace["metrics"], entry, maxlen=METRICS_MAXLEN, approximate=True
                    )
            except RedisUnavailable as error:
                log.debug("%s: metrics not published: %s", self.info.key, error)
