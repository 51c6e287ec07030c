"""The agent beside an engine: registers, renews the lease, publishes ownership and metrics.

One incarnation has one writer, and its batches are numbered. Whatever goes wrong between agent
and Redis (a lapsed lease, an emptied or failed-over Redis, a batch that got lost) shows as a
refusal, and the answer to it is always the same: a new incarnation, everything published under
it, then one switch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import stamina

from app.core import index, leases, metrics
from app.core.errors import IncarnationLost, RedisUnavailable
from app.core.events import CacheEvent
from app.core.index import Change
from app.core.keys import METRICS_INTERVAL_S, METRICS_MAXLEN, Keyspace
from app.core.metrics import ForwardPassMetrics, Speed
from app.core.redis import deadline
from app.core.scripts import Call, ScriptRunner
from app.core.types import Incarnation, WorkerInfo
from workers.ownership import Ownership

T = TypeVar("T")
log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
"""Changes per script run: under a millisecond of Redis's time."""
BATCHES_IN_FLIGHT = 8
METRICS_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """lease_ttl_s: the worker is routed to for so long after its last sign of life."""

    lease_ttl_s: float
    bucket_bits: int


class Agent:
    """start, run, stop. `measure` is asked for the engine's metrics every 100 ms."""

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        info: WorkerInfo,
        settings: AgentSettings,
        measure: Callable[[], tuple[ForwardPassMetrics, Speed]],
    ) -> None:
        self.info = info
        self.incarnation: Incarnation | None = None
        self.resyncs = 0
        self._runner = runner
        self._keyspace = keyspace
        self._ttl_ms = round(settings.lease_ttl_s * 1000)
        self._bucket_bits = settings.bucket_bits
        self._measure = measure
        self._nonce = secrets.token_hex(4)
        self._ownership = Ownership()
        self._seq = 0
        self._staged: Incarnation | None = None
        self._lost = False
        self._wake = asyncio.Event()

    def notify(self, events: Iterable[CacheEvent]) -> None:
        """Take in what the engine did; never blocks. See Ownership for what bounds the backlog."""
        self._ownership.apply(events)
        if self._ownership.num_pending:
            self._wake.set()

    async def start(self) -> None:
        """Register: from here on the worker is routed to, and its last life's blocks are void.

        Waits for Redis as long as it takes. Raises NamespaceMismatch.
        """
        registration = await self._insist(self._register(resync=False))
        self.incarnation = registration.incarnation
        log.info("%s registered as incarnation %d", self.info.key, self.incarnation)

    async def run(self) -> None:
        """Until cancelled. Raises WorkerReplaced, in a group, once another process has the key."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease())
            tasks.create_task(self._publish())
            tasks.create_task(self._publish_metrics())

    async def stop(self) -> None:
        """Retire, so that nobody is routed here while the lease would still run."""
        if self.incarnation is None:
            return
        try:
            await self._runner.one(
                leases.retire(self._keyspace, self.info.key, self.incarnation, self._nonce)
            )
        except RedisUnavailable as error:
            log.warning("%s could not retire (its lease will lapse): %s", self.info.key, error)

    def _register(self, *, resync: bool) -> Call[leases.Registration]:
        return leases.register(
            self._keyspace,
            self.info,
            self._nonce,
            ttl_ms=self._ttl_ms,
            bucket_bits=self._bucket_bits,
            resync=resync,
        )

    async def _insist(self, call: Call[T]) -> T:
        """The answer to a call that may safely run twice, however long Redis takes."""
        answer: T = (await self._insist_all([call]))[0]
        return answer

    async def _insist_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        async for attempt in stamina.retry_context(
            on=RedisUnavailable, attempts=None, timeout=None, wait_initial=0.05, wait_max=1.0
        ):
            with attempt:
                return await self._runner.run(calls)
        raise AssertionError("stamina retries without end")

    async def _keep_lease(self) -> None:
        """Renew three times per lease, for the staged incarnation as for the current one.

        At once after an attempt that took as long as that: pausing as well, an agent that missed
        one answer would lose the lease of a Redis that is back in time.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._ttl_ms / 3000, loop.time())
            await asyncio.sleep(due - loop.time())
            held = [inc for inc in (self.incarnation, self._staged) if inc is not None]
            try:
                renewed = await self._runner.run(
                    [leases.renew(self._keyspace, i, self._nonce, self._ttl_ms) for i in held]
                )
            except RedisUnavailable as error:
                log.warning("%s: lease not renewed: %s", self.info.key, error)
                continue
            if self.incarnation == held[0] and not renewed[0]:
                log.warning("%s: incarnation %d lapsed", self.info.key, held[0])
                self._lost = True
                self._wake.set()

    async def _publish(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if self._lost:
                    await self._resync()
                elif self.incarnation is not None:
                    await self._send(self.incarnation, self._ownership.drain())
            except IncarnationLost as error:
                log.warning("%s: %s; resyncing", self.info.key, error)
                self._lost = True
                self._wake.set()

    async def _resync(self) -> None:
        """A new incarnation, everything under it, one switch. See lua/register.lua."""
        self.resyncs += 1
        registration = await self._insist(self._register(resync=True))
        new = registration.incarnation
        self._seq = 0
        self._ownership.forget()
        if not registration.staged:
            self.incarnation = new
            await self._send(new, self._ownership.drain())
        else:
            self._staged = new
            try:
                await self._send(new, self._ownership.drain())
                call = leases.activate(self._keyspace, self.info.key, new, self._nonce)
                if not await self._insist(call):
                    raise IncarnationLost(f"staged incarnation {new} is lost")
            finally:
                self._staged = None
            self.incarnation = new
        self._lost = False
        log.info("%s resynced as incarnation %d", self.info.key, new)

    async def _send(self, incarnation: Incarnation, changes: list[Change]) -> None:
        """Apply `changes` in numbered batches, a few per round trip.

        A round trip that failed half-way is sent again whole: what was applied is recognised by
        its number. Raises IncarnationLost when a batch is refused.
        """
        for group in _batched(_batched(changes, BATCH_BLOCKS), BATCHES_IN_FLIGHT):
            first = self._seq + 1
            calls = [
                index.apply(self._keyspace, incarnation, self._nonce, seq, batch)
                for seq, batch in enumerate(group, first)
            ]
            if not all(await self._insist_all(calls)):
                raise IncarnationLost(
                    f"incarnation {incarnation}: a batch from {first} was refused"
                )
            self._seq += len(calls)

    async def _publish_metrics(self) -> None:
        """The latest value only: a tick that Redis does not take is not made up for."""
        while True:
            await asyncio.sleep(METRICS_INTERVAL_S)
            measured, speed = self._measure()
            entry: dict[Any, Any] = {
                "worker": str(self.info.key),
                "incarnation": str(self.incarnation),
                **metrics.encode(measured, speed),
            }
            try:
                async with deadline(METRICS_TIMEOUT_S):
                    await self._runner.redis.xadd(
                        self._keyspace["metrics"],
                        entry,
                        maxlen=METRICS_MAXLEN,
                        approximate=True,
                    )
            except RedisUnavailable as error:
                log.debug("%s: metrics not published: %s", self.info.key, error)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """itertools.batched, which Python 3.11 lacks."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
