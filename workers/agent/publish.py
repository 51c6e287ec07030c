"""Publishes what an engine holds: in batches, repeated until acknowledged, and audited afterwards.

The batches of an incarnation are numbered in each shard. A shard refuses one that does not follow
the last, and an audit finds what Redis has lost of those that it took. Either way the incarnation
is lost: everything has to be published under a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, TypeVar

from app.core.chains import bucket_bits_for
from app.core.errors import IncarnationLost, KvrouteError, RedisFull, RedisUnavailable
from app.core.events import CacheEvent
from app.core.keys import Keyspace
from app.core.overlaps import EVERY_BLOCK, ReuseRule
from app.core.types import Incarnation, SequenceHash, Tier, WorkerKey
from app.state import index
from app.state.index import Change
from app.state.scripts import Call, ScriptRunner
from workers.agent.ownership import Ownership
from workers.tasks import until_it_works

T = TypeVar("T")
log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
"""Changes per script run: under a millisecond of Redis's time."""
BATCHES_IN_FLIGHT = 8
"""Most batches in flight; fewer the longer Redis takes: agents that all republish at once would
else keep routers waiting for seconds, and each other's renewals."""
BUSY_S = 0.02
BUSY_PAUSES = 2
"""Round trips for which an agent then waits before it sends more, MAX_PAUSE_S at most."""
MAX_PAUSE_S = 1.0
DRAIN_BLOCKS = 8192
"""Changes put in order at once: tens of milliseconds, where a million would outlast the lease."""
FULL_PAUSE_S = 0.25
"""Pause between two attempts to store blocks in a Redis that is full. Removals wait as long."""
AUDIT_BLOCKS = 256
AUDIT_BUCKETS = 128
"""Buckets of each shard that are searched as often for blocks that the worker does not hold; a
large one, 1,000 blocks at a time."""


@dataclass(slots=True, eq=False)
class _Shard:
    """Progress of publishing under the present incarnation in one shard of the index."""

    number: int
    keyspace: Keyspace
    seq: int = 0
    num_notified: int = 0
    """Calls of `notify` that it shows the effect of."""
    to_audit: list[SequenceHash] | None = None
    """Blocks to look for; None: no audit is due."""
    search_from: index.Place = index.FIRST_PLACE
    is_full: bool = False
    is_unreachable: bool = False
    task: asyncio.Task[None] | None = None


class Publisher:
    """Publisher of one worker's blocks: `open` an incarnation, then `publish` under it; `notify` it
    of what the engine does.

    nonce: of the process. index_blocks: unique blocks that a new index is laid out for. rule: as
    the worker registers it.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        worker: WorkerKey,
        nonce: str,
        index_blocks: int,
        rule: ReuseRule = EVERY_BLOCK,
    ) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._worker = worker
        self._nonce = nonce
        self._index_blocks = index_blocks
        self._ownership = Ownership(rule)
        self._shards: list[_Shard] = []
        self.num_notified = 0
        self._in_flight = 1
        self._loss: IncarnationLost | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        """Event that is set, and replaced, when a shard has come further, or has become
        unreachable."""

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def has_published(self, num_notified: int) -> bool:
        """Whether Redis shows what the engine held after so many calls of `notify`."""
        is_sent = all(shard.num_notified >= num_notified for shard in self._shards)
        return not any(self.num_wanted.values()) or (is_sent and bool(self._shards))

    @property
    def num_wanted(self) -> Mapping[Tier, int]:
        return self._ownership.num_wanted

    def notify(self, events: Iterable[CacheEvent]) -> None:
        """Takes in what the engine did; never blocks. Ownership bounds the backlog."""
        self._ownership.apply(events)
        self.num_notified += 1
        if self._ownership.any_pending:
            self._wake.set()

    async def published(self) -> bool:
        """Waits until Redis shows no block that `notify` was told is gone. Returns False if a shard
        that cannot be reached may show such a block until it is back."""
        notified = self.num_notified
        while behind := [shard for shard in self._shards if shard.num_notified < notified]:
            if all(shard.is_unreachable for shard in behind):
                return False
            self._wake.set()
            await self._progress.wait()
        return True

    def audit_soon(self) -> None:
        """Has the shards audited, each once it has been sent all pending changes."""
        by_shard = self._ownership.next_to_audit(AUDIT_BLOCKS)
        for shard, blocks in zip(self._shards, by_shard, strict=True):
            shard.to_audit = blocks
        self._wake.set()

    async def open(self, incarnation: Incarnation, num_shards: int) -> bool:
        """Lets a new incarnation publish, of which nothing is published yet. Returns False, having
        changed nothing here, if its number is taken in some shard."""
        shards = [_Shard(n, self._keyspace.of_shard(n)) for n in range(num_shards)]
        bits = bucket_bits_for(self._index_blocks // num_shards)
        calls = [
            index.open_shard(shard.keyspace, incarnation, self._nonce, bits) for shard in shards
        ]
        if not all(await self._insist_all(calls, self._shards)):
            return False
        self._shards = shards
        self._ownership.forget(num_shards)
        return True

    async def publish_all(self, incarnation: Incarnation) -> None:
        """Sends everything once. Raises IncarnationLost if a batch is refused."""
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._send(shard, incarnation)) for shard in self._shards]
        if not all(task.result() for task in sent):
            raise IncarnationLost(f"incarnation {incarnation}: a batch was refused")

    async def publish(self, incarnation: Incarnation) -> None:
        """Sends what changes, and audits when told to, until the incarnation is lost. Raises
        IncarnationLost: what was being sent is void."""
        self._loss = None
        self._wake.set()
        # One task per shard, so that an unreachable shard does not hold up the others.
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._loss is not None:
                    break
                for shard in self._shards:
                    if shard.task is None:
                        self._publish_if_due(tasks, shard, incarnation)
            await self._cancel_tasks()
        raise self._loss

    def interrupt(self, loss: IncarnationLost) -> None:
        """Has `publish` raise `loss`."""
        self._loss = loss
        self._wake.set()

    def stop(self, *, is_retired: bool) -> None:
        """Lets go of those that wait in `published`, as nothing is published any more. is_retired:
        Redis shows no block. If not, it may show removed ones until the lease lapses."""
        if is_retired:
            self._shards = []
        for shard in self._shards:
            shard.is_unreachable = True
        self._advance()

    async def insist(self, call: Call[T]) -> T:
        """Returns the answer to a call that may safely run twice, however long Redis takes.
        Meanwhile nobody waits in `published`."""
        answer: T = (await self._insist_all([call], self._shards))[0]
        return answer

    async def _insist_all(
        self, calls: Sequence[Call[Any]], shards: Sequence[_Shard], *, unless_full: bool = False
    ) -> list[Any]:
        """shards: those that wait for the answers. unless_full: RedisFull counts as an answer."""
        final = RedisFull if unless_full else ()

        async def attempt() -> list[Any]:
            replies = await self._runner.run_each(calls)
            failures = [r for r in replies if isinstance(r, KvrouteError)]
            failure = next((f for f in failures if not isinstance(f, final)), None)
            for shard in shards:
                shard.is_unreachable = isinstance(failure, RedisUnavailable)
            if failure is not None:
                self._advance()
                raise failure
            return replies

        return await until_it_works(attempt, RedisUnavailable, str(self._worker), wait_s=0.05)

    def _publish_if_due(
        self, tasks: asyncio.TaskGroup, shard: _Shard, incarnation: Incarnation
    ) -> None:
        to_audit, shard.to_audit = shard.to_audit, None
        if self._ownership.is_pending(shard.number) or to_audit is not None:
            shard.task = tasks.create_task(self._publish_to(shard, incarnation, to_audit))
        else:
            self._acknowledge(shard, self.num_notified)

    async def _publish_to(
        self, shard: _Shard, incarnation: Incarnation, to_audit: Iterable[SequenceHash] | None
    ) -> None:
        notified = self.num_notified
        try:
            if not await self._send(shard, incarnation):
                raise IncarnationLost(f"incarnation {incarnation}: a batch was refused")
            self._acknowledge(shard, notified)
            if to_audit is not None:
                await self._audit(shard, incarnation, to_audit)
            if shard.is_full:
                await asyncio.sleep(FULL_PAUSE_S)
        except IncarnationLost as loss:
            self.interrupt(loss)
        finally:
            shard.task = None
            self._wake.set()

    async def _cancel_tasks(self) -> None:
        tasks = [shard.task for shard in self._shards if shard.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # Tasks that had not started have not removed themselves.
        for shard in self._shards:
            shard.task = None

    def _acknowledge(self, shard: _Shard, notified: int) -> None:
        if shard.num_notified < notified:
            shard.num_notified = notified
            self._advance()

    def _advance(self) -> None:
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()

    async def _send(self, shard: _Shard, incarnation: Incarnation) -> bool:
        """Applies what has changed. Returns False if a batch was refused, and the rest not sent.
        Blocks that Redis has no memory for are left for later."""
        reply: bool | RedisFull = True
        is_more = True
        while is_more and reply is True:
            changes = self._ownership.drain(shard.number, DRAIN_BLOCKS)
            is_more = len(changes) >= DRAIN_BLOCKS
            reply = await self._apply(shard, incarnation, changes)
        if reply is False:
            return False
        self._note_full(shard, isinstance(reply, RedisFull))
        return True

    async def _apply(
        self, shard: _Shard, incarnation: Incarnation, changes: Sequence[Change]
    ) -> bool | RedisFull:
        """Applies a drain's changes in numbered batches, a few per round trip. Returns the first
        reply that is not True, if there is one. A round trip that failed half-way is sent again as
        a whole: batches already applied are recognised by their numbers."""
        essential = list(takewhile(lambda c: not self._ownership.adds(shard.number, c), changes))
        batches = [(True, batch) for batch in _batched(essential, BATCH_BLOCKS)]
        batches += [(False, batch) for batch in _batched(changes[len(essential) :], BATCH_BLOCKS)]
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(batches):
            calls = [
                index.apply(
                    shard.keyspace, incarnation, self._nonce, seq, batch, essential=essential
                )
                for seq, (essential, batch) in enumerate(
                    batches[at : at + self._in_flight], shard.seq + 1
                )
            ]
            sent_s = loop.time()
            replies = await self._insist_all(calls, [shard], unless_full=True)
            took_s = loop.time() - sent_s
            applied = len(list(takewhile(lambda reply: reply is True, replies)))
            shard.seq += applied
            at += applied
            if applied == len(calls):
                await self._yield_to_others(took_s, is_more=at < len(batches))
                continue
            reply: bool | RedisFull = replies[applied]
            if reply is not False:
                for _, batch in batches[at:]:
                    self._ownership.take_back(shard.number, batch)
            return reply
        return True

    async def _yield_to_others(self, took_s: float, *, is_more: bool) -> None:
        if took_s <= BUSY_S:
            self._in_flight = min(2 * self._in_flight, BATCHES_IN_FLIGHT)
        else:
            self._in_flight = 1
            if is_more:
                await asyncio.sleep(min(BUSY_PAUSES * took_s, MAX_PAUSE_S))

    def _note_full(self, shard: _Shard, is_full: bool) -> None:
        was_any_full = any(s.is_full for s in self._shards)
        shard.is_full = is_full
        is_any_full = any(s.is_full for s in self._shards)
        if is_any_full and not was_any_full:
            log.error("%s: Redis is full: new blocks are not published", self._worker)
        elif was_any_full and not is_any_full:
            log.warning("%s: Redis has memory again: all blocks are published", self._worker)

    async def _audit(
        self, shard: _Shard, incarnation: Incarnation, blocks: Iterable[SequenceHash]
    ) -> None:
        entries = self._ownership.as_published(shard.number, blocks)
        audit = index.audit(
            shard.keyspace,
            incarnation,
            self._nonce,
            shard.seq,
            entries,
            shard.search_from,
            AUDIT_BUCKETS,
        )
        (result,) = await self._insist_all([audit], [shard])
        if result is None:
            raise IncarnationLost(f"incarnation {incarnation}: lost to shard {shard.number}")
        if result.missing:
            raise IncarnationLost(
                f"incarnation {incarnation}: blocks missing in shard {shard.number}: "
                f"{result.missing}"
            )
        if not self._ownership.shows(shard.number, result):
            raise IncarnationLost(
                f"incarnation {incarnation}: shard {shard.number} does not match what was published"
            )
        shard.search_from = result.following


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
