"""An engine's agent: registers, renews the lease, publishes ownership and metrics.

Each incarnation has one writer, and its batches are numbered. Whatever goes wrong between agent
and Redis (a lapsed lease, an emptied or failed-over Redis, a lost batch) shows up as a refusal, and
the response is always the same: a new incarnation, everything published under it, then one switch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, TypeVar

import stamina
import stamina.instrumentation

from app.core import worker_report
from app.core.chains import bucket_bits_for
from app.core.errors import (
    IncarnationLost,
    NamespaceMismatch,
    RedisFull,
    RedisUnavailable,
    WorkerReplaced,
)
from app.core.events import CacheEvent
from app.core.keys import METRICS_MAXLEN, Keyspace, metrics_interval_s
from app.core.types import Incarnation, SequenceHash, WorkerInfo
from app.core.worker_report import NO_READINGS, ForwardPassMetrics, GpuReadings, Speed
from app.state import index, leases
from app.state.connect import deadline
from app.state.index import Change
from app.state.scripts import Call, ScriptRunner
from workers.agent.ownership import Ownership

T = TypeVar("T")
log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
"""Changes per script run: under a millisecond of Redis's time."""
BATCHES_IN_FLIGHT = 8
"""At most, and the fewer the longer Redis takes: agents that all republish at once would else keep
routers waiting for seconds, and each other's renewals."""
BUSY_S = 0.02
"""A round trip that takes longer means that Redis is busy."""
BUSY_PAUSES = 2
"""How many times as long an agent then waits before it sends more, for MAX_PAUSE_S at most."""
MAX_PAUSE_S = 1.0
DRAIN_BLOCKS = 8192
"""Changes put in order at once: tens of milliseconds, where a million would outlast the lease."""
METRICS_TIMEOUT_S = 1.0
MAX_RENEWAL_S = 2.0
"""A worker whose lease is made to lapse, as a request says that it failed, is retired after five
seconds without a renewal, however long the lease."""
RECOUNT_BEATS, RECOUNT_WORKERS = 3, 256
"""Every third renewal has Redis count the worker's load as well, which costs it ten times as much
with 50 requests; fewer do where there are more workers than that."""
FULL_PAUSE_S = 0.25
"""Between two attempts to store blocks in a Redis that is full. Removals wait as long."""
AUDIT_INTERVAL_S = 2.0
AUDIT_BLOCKS = 256
"""Checked every AUDIT_INTERVAL_S, for half a millisecond of Redis's time: a pool of 25,000 blocks
every 200 s, so that damage done in Redis does not persist."""
AUDIT_WORKERS = 64
"""More workers than this audit less often, so that all audits together take Redis a twentieth of
its time, where those of 1,000 workers would take all of it."""
AUDIT_BUCKETS = 128
"""Just as often, this many buckets of each shard are searched for blocks that the worker does not
hold: 131,072 buckets, a million blocks, every 34 minutes; a large one, 1,000 blocks at a time."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """lease_ttl_s: how long the worker is routed to after its last sign of life.

    index_blocks: unique blocks that the namespace is laid out for; shards: of its index. Both count
    only if the namespace is new.
    """

    lease_ttl_s: float
    index_blocks: int
    shards: int = 1


class Agent:
    """start, run, stop. Every 100 ms, less often in a fleet of more than 256 workers, `measure` and
    `read_gpu` are asked for what to publish."""

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        info: WorkerInfo,
        settings: AgentSettings,
        measure: Callable[[], tuple[ForwardPassMetrics, Speed]],
        read_gpu: Callable[[], GpuReadings] = lambda: NO_READINGS,
    ) -> None:
        self.info = info
        self.incarnation: Incarnation | None = None
        self.resyncs = 0
        self.num_leases = 1
        """How many incarnations of workers there were at the last renewal."""
        self._runner = runner
        self._keyspace = keyspace
        self._ttl_ms = round(settings.lease_ttl_s * 1000)
        self._index_blocks = settings.index_blocks
        self._shards = settings.shards
        self._measure = measure
        self._read_gpu = read_gpu
        self._nonce = secrets.token_hex(4)
        self._ownership = Ownership()
        self._seqs: list[int] = []
        """Number of the last batch sent to each shard."""
        self._search_from: list[index.Place] = []
        """For each shard, where the search for wrongly shown blocks resumes."""
        self._staged: Incarnation | None = None
        self._lost = False
        self._to_audit: dict[int, list[SequenceHash]] = {}
        """The blocks to look for in each shard that is due for an audit."""
        self._telling: dict[int, asyncio.Task[None]] = {}
        self._full = set[int]()
        """Shards that had no memory left for the last blocks to be stored."""
        self._unreachable = set[int]()
        """Shards that wait for an answer that did not come in time."""
        self._wake = asyncio.Event()
        self._notified = 0
        """How often `notify` was called; `_told`: how many of these calls each shard has had."""
        self._told: list[int] = []
        self._in_flight = 1
        """Batches to send together next time."""
        self._told_more = asyncio.Event()
        """Set, and replaced, when `_told` or `_unreachable` changes."""

    def notify(self, events: Iterable[CacheEvent]) -> None:
        """Take in what the engine did; never blocks. See Ownership for what bounds the backlog."""
        self._ownership.apply(events)
        self._notified += 1
        if self._ownership.any_pending:
            self._wake.set()

    async def settled(self) -> bool:
        """Wait until Redis shows no block that `notify` was told is gone.

        False: a shard that cannot be reached may show such a block until it is back.
        """
        notified = self._notified
        while self.incarnation is not None:
            behind = {shard for shard, told in enumerate(self._told) if told < notified}
            if behind <= self._unreachable:
                return not behind
            self._wake.set()
            await self._told_more.wait()
        return True

    async def start(self) -> None:
        """Register: from here on the worker is routed to, and its previous life's blocks are void.

        Waits for Redis as long as it takes. Raises NamespaceMismatch.
        """
        activated = False
        while not activated:
            self.incarnation = (await self._register()).incarnation
            activated = await self._insist(self._activate(self.incarnation))
        log.info("%s registered as incarnation %d", self.info.key, self.incarnation)

    async def run(self) -> None:
        """Run until cancelled.

        Raises WorkerReplaced, in a group, once another process has the key, and NamespaceMismatch
        if the namespace has come to have another block size.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease())
            tasks.create_task(self._publish())
            tasks.create_task(self._audit())
            tasks.create_task(self._publish_metrics())
            tasks.create_task(self._runner.redis.follow())

    async def stop(self) -> None:
        """Retire, so that nobody is routed here for the rest of the lease."""
        held = [inc for inc in (self.incarnation, self._staged) if inc is not None]
        if not held:
            return
        try:
            await self._runner.run([self._retire(inc) for inc in held])
            self.incarnation = self._staged = None
        except RedisUnavailable as error:
            self._unreachable.update(range(len(self._told)))
            log.warning("%s could not retire (its lease will lapse): %s", self.info.key, error)
        self._notice()

    async def _register(self, held: Incarnation | None = None) -> leases.Registration:
        """A new incarnation, which may publish in every shard and has published nothing.

        held: this process's previous incarnation. Raises WorkerReplaced if another process has the
        key, and still renews its lease; NamespaceMismatch.
        """
        call = leases.register(
            self._keyspace,
            self.info,
            self._nonce,
            ttl_ms=self._ttl_ms,
            shards=self._shards,
            held=held,
        )
        waited = False
        while True:
            try:
                registration = await self._insist(call)
            except (NamespaceMismatch, WorkerReplaced):
                if waited or held is None:
                    raise
                # A Redis that lost data may show the process before this one, which has ended: then
                # nobody renews its lease. And a wrong block size is corrected by others' renewals.
                waited = True
                await asyncio.sleep(self._ttl_ms / 1000)
                continue
            shards = registration.shards
            bits = bucket_bits_for(self._index_blocks // shards)
            opened = await self._insist_all(
                [
                    index.open_shard(
                        self._keyspace.of_shard(n), registration.incarnation, self._nonce, bits
                    )
                    for n in range(shards)
                ]
            )
            if all(opened):
                self._seqs, self._told = [0] * shards, [0] * shards
                self._search_from = [index.FIRST_PLACE] * shards
                self._full.clear()
                self._unreachable.clear()
                self._ownership.forget(shards)
                return registration
            log.warning(
                "%s: incarnation number %d is taken; registering again",
                self.info.key,
                registration.incarnation,
            )
            await self._insist(self._retire(registration.incarnation))

    async def _insist(self, call: Call[T]) -> T:
        """The answer to a call that may safely run twice, however long Redis takes."""
        answer: T = (await self._insist_all([call]))[0]
        return answer

    async def _insist_all(
        self, calls: Sequence[Call[Any]], *, shard: int | None = None, unless_full: bool = False
    ) -> list[Any]:
        """shard: the one that waits for the answer; None: all do.

        unless_full: RedisFull counts as an answer too.
        """
        waiting = range(len(self._told)) if shard is None else (shard,)
        final = RedisFull if unless_full else ()
        async for attempt in stamina.retry_context(
            on=RedisUnavailable, attempts=None, timeout=None, wait_initial=0.05, wait_max=1.0
        ):
            with attempt:
                replies = await self._runner.run_each(calls)
                for reply in replies:
                    if isinstance(reply, RedisUnavailable) and not isinstance(reply, final):
                        self._unreachable.update(waiting)
                        self._notice()
                        # Ever more rarely, as Redis may be gone for hours.
                        if attempt.num.bit_count() == 1:
                            log.warning(
                                "%s: attempt %d failed, retrying: %s",
                                self.info.key,
                                attempt.num,
                                reply,
                            )
                        raise reply
                self._unreachable.difference_update(waiting)
                return replies
        raise AssertionError("stamina retries without end")

    async def _keep_lease(self) -> None:
        """Renew three times per lease and every MAX_RENEWAL_S, for the staged incarnation as well.

        If an attempt took longer than the interval, renew at once: with a pause on top, an agent
        that missed one answer would lose its lease though Redis is back in time.
        """
        loop = asyncio.get_running_loop()
        interval_s = min(self._ttl_ms / 3000, MAX_RENEWAL_S)
        due = loop.time()
        beats = 0
        while True:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            held = [inc for inc in (self.incarnation, self._staged) if inc is not None]
            beats += 1
            thorough = beats >= RECOUNT_BEATS * max(1.0, self.num_leases / RECOUNT_WORKERS)
            if thorough:
                beats = 0
            try:
                renewed = await self._runner.run([self._renew(inc, thorough) for inc in held])
            except RedisUnavailable as error:
                log.warning("%s: lease not renewed: %s", self.info.key, error)
                continue
            self.num_leases = max(*renewed, 1)
            if self.incarnation == held[0] and not renewed[0]:
                log.warning("%s: incarnation %d lapsed", self.info.key, held[0])
                self._lost = True
                self._wake.set()

    def _renew(self, inc: Incarnation, thorough: bool) -> Call[int]:
        return leases.renew(
            self._keyspace,
            self.info,
            inc,
            self._nonce,
            ttl_ms=self._ttl_ms,
            shards=len(self._seqs),
            staged=inc == self._staged,
            thorough=thorough,
        )

    def _retire(self, inc: Incarnation) -> Call[bool]:
        return leases.retire(self._keyspace, self.info.key, inc, self._nonce)

    def _activate(self, inc: Incarnation, held: Incarnation | None = None) -> Call[bool]:
        return leases.activate(self._keyspace, self.info.key, inc, self._nonce, held=held)

    async def _audit(self) -> None:
        """Have shards audited, each once it has been sent all pending changes."""
        while True:
            await asyncio.sleep(AUDIT_INTERVAL_S * max(1.0, self.num_leases / AUDIT_WORKERS))
            self._to_audit = dict(enumerate(self._ownership.next_to_audit(AUDIT_BLOCKS)))
            self._wake.set()

    async def _publish(self) -> None:
        """One task per shard, so that an unreachable shard does not hold up the others."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._lost:
                    await self._stop_telling()
                    try:
                        await self._resync()
                    except IncarnationLost as error:
                        self._is_lost(error)
                elif self.incarnation is not None:
                    for shard in set(range(len(self._seqs))) - self._telling.keys():
                        self._tell_if_due(tasks, shard, self.incarnation)

    def _tell_if_due(self, tasks: asyncio.TaskGroup, shard: int, incarnation: Incarnation) -> None:
        to_audit = self._to_audit.pop(shard, None)
        if self._ownership.is_pending(shard) or to_audit is not None:
            telling = self._tell(shard, incarnation, to_audit)
            self._telling[shard] = tasks.create_task(telling)
        else:
            self._has_told(shard, self._notified)

    async def _tell(
        self, shard: int, incarnation: Incarnation, to_audit: Iterable[SequenceHash] | None
    ) -> None:
        """Send a shard its changes, and audit what it shows unless `to_audit` is None."""
        notified = self._notified
        try:
            if not await self._send(shard, incarnation):
                raise IncarnationLost(f"incarnation {incarnation}: a batch was refused")
            self._has_told(shard, notified)
            if to_audit is not None:
                await self._compare(shard, incarnation, self._ownership.as_told(shard, to_audit))
            if shard in self._full:
                await asyncio.sleep(FULL_PAUSE_S)
        except IncarnationLost as error:
            self._is_lost(error)
        finally:
            del self._telling[shard]
            self._wake.set()

    async def _stop_telling(self) -> None:
        """Cancel the tasks: what they were sending is void, and everything is sent again."""
        telling = list(self._telling.values())
        for task in telling:
            task.cancel()
        if telling:
            await asyncio.wait(telling)
        # Tasks that had not started have not removed themselves.
        self._telling.clear()

    def _has_told(self, shard: int, notified: int) -> None:
        if self._told[shard] < notified:
            self._told[shard] = notified
            self._notice()

    def _notice(self) -> None:
        told, self._told_more = self._told_more, asyncio.Event()
        told.set()

    def _is_lost(self, error: IncarnationLost) -> None:
        log.warning("%s: %s; resyncing", self.info.key, error)
        self._lost = True
        self._wake.set()

    async def _resync(self) -> None:
        """A new incarnation, everything under it, one switch. See lua/register.lua."""
        self.resyncs += 1
        registration = await self._register(self.incarnation)
        new = registration.incarnation
        self._staged = new
        try:
            if registration.predecessor_lives:
                async with asyncio.TaskGroup() as tasks:
                    sent = [
                        tasks.create_task(self._send(shard, new))
                        for shard in range(registration.shards)
                    ]
                if not all(task.result() for task in sent):
                    raise IncarnationLost(f"incarnation {new}: a batch was refused")
            if not await self._insist(self._activate(new, self.incarnation)):
                raise IncarnationLost(f"staged incarnation {new} was lost")
        except IncarnationLost:
            self._staged = None
            raise
        # Not sooner: if cancelled before this, the worker may be routed to as either, and `stop`
        # ends both.
        self.incarnation, self._staged = new, None
        self._lost = False
        self._wake.set()
        log.info("%s resynced as incarnation %d", self.info.key, new)

    async def _send(self, shard: int, incarnation: Incarnation) -> bool:
        """Apply what has changed. False: a batch was refused, and the rest not sent.

        Blocks that Redis has no memory for are left for later.
        """
        reply: bool | RedisFull = True
        is_more = True
        while is_more and reply is True:
            changes = self._ownership.drain(shard, DRAIN_BLOCKS)
            is_more = len(changes) >= DRAIN_BLOCKS
            reply = await self._apply(shard, incarnation, changes)
        if reply is False:
            return False
        self._note_full(shard, isinstance(reply, RedisFull))
        return True

    async def _apply(
        self, shard: int, incarnation: Incarnation, changes: Sequence[Change]
    ) -> bool | RedisFull:
        """Apply a drain's changes in numbered batches, a few per round trip.

        A round trip that failed half-way is sent again as a whole: batches already applied are
        recognised by their numbers. Returns the first reply that is not True, if there is one.
        """
        keyspace = self._keyspace.of_shard(shard)
        essential = list(takewhile(lambda c: not self._ownership.adds(shard, c), changes))
        batches = [(True, batch) for batch in _batched(essential, BATCH_BLOCKS)]
        batches += [(False, batch) for batch in _batched(changes[len(essential) :], BATCH_BLOCKS)]
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(batches):
            calls = [
                index.apply(keyspace, incarnation, self._nonce, seq, batch, essential=essential)
                for seq, (essential, batch) in enumerate(
                    batches[at : at + self._in_flight], self._seqs[shard] + 1
                )
            ]
            sent_s = loop.time()
            replies = await self._insist_all(calls, shard=shard, unless_full=True)
            took_s = loop.time() - sent_s
            applied = len(list(takewhile(lambda reply: reply is True, replies)))
            self._seqs[shard] += applied
            at += applied
            if applied == len(calls):
                await self._yield_to_others(took_s, is_more=at < len(batches))
                continue
            reply: bool | RedisFull = replies[applied]
            if reply is not False:
                for _, batch in batches[at:]:
                    self._ownership.untell(shard, batch)
            return reply
        return True

    async def _yield_to_others(self, took_s: float, *, is_more: bool) -> None:
        """Adapt to how busy Redis was in the last round trip."""
        if took_s <= BUSY_S:
            self._in_flight = min(2 * self._in_flight, BATCHES_IN_FLIGHT)
        else:
            self._in_flight = 1
            if is_more:
                await asyncio.sleep(min(BUSY_PAUSES * took_s, MAX_PAUSE_S))

    def _note_full(self, shard: int, is_full: bool) -> None:
        was_full = bool(self._full)
        (self._full.add if is_full else self._full.discard)(shard)
        if self._full and not was_full:
            log.error("%s: Redis is full: new blocks are not published", self.info.key)
        elif was_full and not self._full:
            log.warning("%s: Redis has memory again: all blocks are published", self.info.key)

    async def _compare(
        self, shard: int, incarnation: Incarnation, entries: Sequence[Change]
    ) -> None:
        """Check that a shard shows what was published. Raises IncarnationLost if it does not."""
        keyspace = self._keyspace.of_shard(shard)
        first = self._search_from[shard]
        missing, found = await self._insist_all(
            [
                index.audit(keyspace, incarnation, self._nonce, self._seqs[shard], entries),
                index.claims(keyspace, incarnation, first, AUDIT_BUCKETS),
            ],
            shard=shard,
        )
        if missing < 0:
            raise IncarnationLost(f"incarnation {incarnation}: lost to shard {shard}")
        if missing:
            raise IncarnationLost(
                f"incarnation {incarnation}: blocks missing in shard {shard}: {missing}"
            )
        if found is None or not self._ownership.shows(shard, found):
            raise IncarnationLost(
                f"incarnation {incarnation}: shard {shard} does not match what was published"
            )
        self._search_from[shard] = found.following

    async def _publish_metrics(self) -> None:
        """Publish only the latest value: a tick that Redis does not take is not retried."""
        while True:
            await asyncio.sleep(metrics_interval_s(self.num_leases))
            entry: dict[Any, Any] = {
                "worker": str(self.info.key),
                "incarnation": str(self.incarnation),
                **worker_report.encode(*self._measure(), self._read_gpu()),
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


# Stamina's own log line does not show what failed.
stamina.instrumentation.set_on_retry_hooks(())


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """itertools.batched, which Python 3.11 lacks."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
