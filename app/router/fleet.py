"""Workers as a router knows them, of which it makes the views that decisions see.

Nothing here outlives a Redis answer except what is fixed for an incarnation (its WorkerInfo), what
follows the metrics stream, and the last view, which routing falls back on without Redis.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from redis.asyncio import Redis

from app.core import registration
from app.core.errors import (
    KvrouteError,
    NamespaceMissing,
    RedisRecovering,
    RedisUnavailable,
    WrongVersion,
)
from app.core.fetches import AHEAD_MS, Fetch
from app.core.keys import DATA_VERSION, Keyspace
from app.core.loads import Snapshot
from app.core.roles import Role
from app.core.types import Incarnation, WorkerKey
from app.core.verdicts import FAILED, Mark, Marks, MarksByWorker
from app.core.worker_report import WorkerInfo
from app.policy.kv_lease import (
    STALE_MS,
    LeaseBooks,
    began_anew,
    counts_leases,
    is_void,
)
from app.policy.view import View
from app.policy.workers import Measurement, Workers
from app.router.measurements import Measurements
from app.state.connect import deadline

log = logging.getLogger(__name__)

CLOCK_SET_BACK_MS = 1000.0
CLOCK_DRIFT_MS = 0.01
"""Drift between two answers of Redis, at most."""
TAKE_OVER_MS = 30_000
"""Time within which another planner follows one that is gone."""
UNHEARD = "may hold KV that is not its prompt's: the source that can tell is not heard of"
RECOVERY_S = 5.0
"""Recovery after Redis was unreachable or emptied takes no longer. Agents renew or register a third
of a lease after it is back, usually 1 s."""
KEPT_S = 86_400.0
"""The last view is kept so long while Redis has no such namespace: agents that are there register
in seconds, and engines may answer without."""


class Fleet:
    """Learns which incarnations there are, and follows what they measure."""

    def __init__(self, redis: Redis, keyspace: Keyspace, timeout_s: float) -> None:
        self.last_view: View | None = None
        self._keys: tuple[View | None, set[WorkerKey]] = None, set()
        self.wrong_version: WrongVersion | None = None
        """Why nothing may be written in the namespace; None: nothing speaks against it."""
        self.is_missing = False
        """Whether Redis had no such namespace when it was last asked."""
        self.strangers: dict[Incarnation, str] = {}
        """Incarnations of workers that another release runs, and what is wrong with each."""
        self.measurements = Measurements(
            *(redis, keyspace, timeout_s, lambda: self.redis_now_ms, lambda: self.last_view)
        )
        self.wakes_until_ms = 0
        self._redis = redis
        self._keyspace = keyspace
        self._timeout_s = timeout_s
        self._infos: dict[Incarnation, WorkerInfo] = {}
        self._texts: dict[Incarnation, int] = {}
        """Hash of the text that each was read from: texts are half of what would be kept."""
        self.seen_s = 0.0
        """Monotonic seconds when the last view was made."""
        self._workers: Workers | None = None
        """Workers of the last view, until anything new is learnt."""
        self._met: list[Incarnation] | None = None
        """Live incarnations of a snapshot, if all of them are known: usually those of the next,
        too."""
        self._changed: set[bytes] = set()
        """Incarnations whose load or registration has changed since the workers' entries were
        read."""
        self._workers_ms: int | None = None
        """`Snapshot.workers_ms` as of what is known about the incarnations."""
        self.shards: int | None = None
        """Number of the index's shards; None: not seen yet."""
        self._redis_ahead_ms: float | None = None
        """Redis clock minus our monotonic one."""
        self._missed: frozenset[WorkerKey] = frozenset()
        """Workers that were live when Redis became unreachable or was emptied."""
        self._is_emptied = False
        """Whether they have to register again."""
        self._rounds = 0
        """Rounds of the last snapshot: a namespace with fewer was lost by Redis."""
        self._recovers_until = 0.0
        self._failure = ""
        self.suspected: Counter[tuple[str, Incarnation]] = Counter()
        """Tries that are yet to be judged, by mark and worker, which is left alone until then."""
        self._fetches: Sequence[Fetch] = ()
        """Fetches whose lease may end before long, or has ended, as of `_fetches_ms`."""
        self._fetches_ms = 0

    @property
    def block_size(self) -> int | None:
        """Tokens per block, which all workers of a namespace share; None before the first."""
        return self.last_view.block_size if self.last_view else None

    @property
    def infos(self) -> tuple[WorkerInfo, ...]:
        """Workers that were alive when Redis was last asked, also those that get no requests."""
        view = self.last_view
        return (*view.infos, *view.paused.values()) if view else ()

    def has(self, key: WorkerKey) -> bool:
        """Whether a worker is one of `infos`, which are looked through once for many keys."""
        if self._keys[0] is not self.last_view:
            self._keys = self.last_view, {info.key for info in self.infos}
        return key in self._keys[1]

    def incarnation_of(self, key: WorkerKey) -> Incarnation | None:
        """Returns the incarnation of a worker that is routed to, or paused; None: there is none."""
        view = self.last_view
        live = (
            []
            if view is None
            else [*zip(view.incarnations, view.infos, strict=True), *view.paused.items()]
        )
        return next((inc for inc, info in live if info.key == key), None)

    def failed_shares(self, *names: str) -> dict[WorkerKey, float]:
        """Returns the share of tries that each worker failed lately, 0-1; 1 while it is paused, or
        left alone for one of the marks `names`. Others failed none."""
        view = self.last_view
        if view is None:
            return {}
        shares = {
            self._infos[inc].key: marks.failed.share_at(view.now_ms)
            for inc, marks in view.marks.items()
            if inc in self._infos
        }
        alone = view.left_alone(names)
        if alone is not None:
            shares |= {view.infos[place].key: 1.0 for place in alone.nonzero()[0]}
        return shares | {info.key: 1.0 for info in view.paused.values()}

    def marked(self, name: str) -> frozenset[WorkerKey]:
        """Returns the workers with this mark: see View.marked."""
        known = {} if self.last_view is None else self.last_view.marked(name)
        return frozenset(self._infos[inc].key for inc in known if inc in self._infos)

    def lease_books(self, key: WorkerKey) -> LeaseBooks | None:
        """Returns what a worker's engine has counted of leases on its KV; None: it does not say."""
        inc = self.incarnation_of(key)
        if inc is None:
            return None
        measured = self.measured(inc)
        said = measured.metrics
        if not counts_leases(said) or said.read_s_ago is None:
            return None
        counts = said.kv_leases_ended or 0, said.engine_steps or 0
        read_ms = measured.at_ms - 1000 * said.read_s_ago
        return LeaseBooks(self.engine_life(key) or "", *counts, read_ms)

    def knows_fetches(self, by_ms: int) -> bool:
        """Whether Redis has told of all fetches whose lease may have ended by then."""
        return by_ms <= self._fetches_ms + AHEAD_MS

    def late_fetches(self, target: WorkerKey, by_ms: int) -> list[Fetch]:
        """Returns the fetches that a worker may have begun late by then, as far as Redis has
        told."""
        life = self.engine_life(target) if self._fetches else None
        return [
            one
            for one in self._fetches
            if one.target == target
            and one.until_ms <= by_ms
            and not began_anew(one.target_life, life)
        ]

    def known(self, key: WorkerKey) -> WorkerInfo | None:
        """Returns that worker, live or not; None: it is gone."""
        return next((info for info in self._infos.values() if info.key == key), None)

    def engine_life(self, key: WorkerKey) -> str | None:
        """Returns the life that a worker registers for its engine; None: it is unknown."""
        inc = self.incarnation_of(key)
        info = None if inc is None else self._infos.get(inc)
        return (info and info.engine_life) or None

    def is_tainted(self, key: WorkerKey) -> bool:
        """Whether a worker's engine may hold KV of one prompt as another's."""
        marks = self.last_view.marks if self.last_view is not None else {}
        if not any("tainted" in one for one in marks.values()):
            return False
        inc = self.incarnation_of(key)
        return inc in marks and "tainted" in marks[inc]

    @property
    def has_looked(self) -> bool:
        """Whether Redis was ever asked for the workers, with an answer or without."""
        has_answer = self.last_view is not None or self.is_missing
        return has_answer or self.wrong_version is not None or bool(self._failure)

    @property
    def recovers(self) -> bool:
        """Whether Redis was away or emptied so recently that live workers may have yet to renew
        their leases, or to register again."""
        return time.monotonic() < self._recovers_until

    @property
    def wakes(self) -> bool:
        """Whether a planner starts a worker for requests that find none."""
        return (self.redis_now_ms or 0) < self.wakes_until_ms + TAKE_OVER_MS

    @property
    def sleeps(self) -> bool:
        """Whether no worker decoded when Redis was last asked, and one will come if a request
        waits."""
        if self.last_view is None or not self.wakes:
            return False
        return all(info.role is Role.PREFILL for info in self.last_view.infos)

    @property
    def redis_now_ms(self) -> int | None:
        """Redis clock, by what it was when Redis last answered; None before it ever did."""
        ahead_ms = self._redis_ahead_ms
        return None if ahead_ms is None else round(time.monotonic() * 1000 + ahead_ms)

    def _ahead_ms(self, latest: float) -> float:
        """Returns the Redis clock minus ours. Late answers make it look smaller, so the largest
        lately counts, unless the clock was set back."""
        known = self._redis_ahead_ms
        if known is None or known - latest > CLOCK_SET_BACK_MS:
            return latest
        return max(latest, known - CLOCK_DRIFT_MS)

    def note(self, error: KvrouteError) -> None:
        """Record that a query to Redis failed with `error`."""
        if isinstance(error, WrongVersion):
            if self.wrong_version is None:
                log.error("not ready: %s", error)
            # Nothing that was known of the namespace still holds.
            self.wrong_version, self.last_view, self.shards = error, None, None
            return
        self.is_missing = isinstance(error, NamespaceMissing) or (
            self.is_missing and isinstance(error, RedisUnavailable)
        )
        if isinstance(error, NamespaceMissing) and time.monotonic() - self.seen_s > KEPT_S:
            self.last_view = None
        is_emptied = isinstance(error, NamespaceMissing) and self.last_view is not None
        is_outage = isinstance(error, RedisUnavailable) and not isinstance(error, RedisRecovering)
        if is_emptied or is_outage:
            self._recover(str(error), is_emptied=is_emptied)

    def _recover(self, failure: str, *, is_emptied: bool) -> None:
        """Keep the last view until its workers are heard of again."""
        self._recovers_until = time.monotonic() + RECOVERY_S
        self._failure, self._is_emptied = failure, is_emptied or self._is_emptied
        if self.last_view is not None:
            self._missed = frozenset(info.key for info in self.last_view.infos)

    async def view(self, snapshot: Snapshot) -> View:
        """Returns `snapshot` with what is known about its incarnations. Asks Redis only about new
        ones.

        Raises RedisUnavailable, and RedisRecovering while the last view is the better one.
        """
        self._changed |= snapshot.changed
        snapshot.changed.clear()
        if snapshot.workers_ms is None and self.last_view is not None:
            # A reservation that is refused tells of loads alone.
            snapshot = replace(snapshot, marks=self.last_view.marks)
        else:
            self._fetches, self._fetches_ms = snapshot.fetches, snapshot.now_ms
        if 2 * snapshot.rounds < self._rounds:
            self._recover("Redis was emptied", is_emptied=True)
        self._rounds = snapshot.rounds
        self._redis_ahead_ms = self._ahead_ms(snapshot.now_ms - time.monotonic() * 1000)
        self.shards = snapshot.shards or self.shards
        await self._meet(snapshot)
        if self.recovers and (missed := self._still_missed(snapshot)):
            raise RedisRecovering(f"{missed} workers are yet to be heard of ({self._failure})")
        self._missed, self._is_emptied = frozenset(), False
        self.wrong_version, self.is_missing = None, False
        if snapshot.loads.incarnations is not self._met:
            snapshot = replace(snapshot, loads=snapshot.loads.of_those(self._infos))
        self.seen_s = time.monotonic()
        return self._show(snapshot)

    def _still_missed(self, snapshot: Snapshot) -> int:
        """Returns how many missed workers have no lease or, if Redis lost them, are not back
        yet."""
        there = snapshot.loads.incarnations if self._is_emptied else snapshot.lapsed
        keys = {self._infos[inc].key for inc in there if inc in self._infos}
        return len(self._missed - keys if self._is_emptied else self._missed & keys)

    def _show(self, snapshot: Snapshot) -> View:
        if self._fetches:
            snapshot = self._without_unheard(snapshot)
        loads = snapshot.loads
        if self._workers is None or not _same(self._workers.incarnations, loads.incarnations):
            self._workers = Workers(
                [(inc, self._infos[inc], self.measured(inc)) for inc in loads.incarnations]
            )
        elif self.measurements.unshown:
            self._workers = self._workers.with_measured(self.measurements.unshown)
        self.measurements.unshown = {}
        lapsed = {inc: self._infos[inc] for inc in snapshot.lapsed if inc in self._infos}
        paused = {inc: lapsed.pop(inc) for inc in snapshot.paused if inc in lapsed}
        self.last_view = View(snapshot, self._workers, paused, lapsed)
        self.last_view.suspected = self.suspected
        return self.last_view

    def _without_unheard(self, snapshot: Snapshot) -> Snapshot:
        """Returns `snapshot` without targets of late fetches whose sources are not heard of."""
        now_ms = snapshot.now_ms
        targets = {f.target for f in self._fetches if f.until_ms <= now_ms and self._is_unheard(f)}
        live = {inc: self._infos[inc].key for inc in snapshot.loads.incarnations}
        left_out = {inc for inc, key in live.items() if key in targets}
        if not left_out:
            return snapshot
        marks = Marks({FAILED: Mark(now_ms, now_ms + STALE_MS, UNHEARD)})
        return replace(
            snapshot,
            loads=snapshot.loads.of_those(live.keys() - left_out),
            marks=MarksByWorker(snapshot.marks | dict.fromkeys(left_out, marks)),
            lapsed=snapshot.lapsed | left_out,
        )

    def _is_unheard(self, fetch: Fetch) -> bool:
        if self.known(fetch.source) is None or not self.late_fetches(fetch.target, fetch.until_ms):
            return False
        books, now_ms = self.lease_books(fetch.source), self.redis_now_ms or 0
        is_heard = books is not None and books.read_ms > now_ms - STALE_MS
        return not is_heard and not (books is not None and is_void(fetch, books))

    async def _meet(self, snapshot: Snapshot) -> None:
        """Learn what is not known of the incarnations in a snapshot."""
        live = snapshot.loads.incarnations
        # The unreadable as well: theirs may be workers of another release, to be named.
        others = [*snapshot.lapsed, *snapshot.unreadable]
        if snapshot.workers_ms not in (None, self._workers_ms):
            changed, self._changed = self._changed, set()
            try:
                await self._learn([inc for inc in (*live, *others) if b"%d" % inc in changed])
            except BaseException:
                # Another view may have learnt, meanwhile, of all but these.
                self._changed |= changed
                self._workers_ms = None
                raise
            self.forget_except([*live, *others])
            self._workers_ms = snapshot.workers_ms
        new = others if live is self._met else [*live, *others]
        await self._learn([i for i in new if i not in self._infos and i not in self.strangers])
        if live is not self._met:
            self._met = live if all(inc in self._infos for inc in live) else None

    async def _learn(self, incarnations: list[Incarnation]) -> None:
        if not incarnations:
            return
        async with deadline(self._timeout_s):
            texts = await self._redis.hmget(
                self._keyspace["workers"], [str(inc) for inc in incarnations]
            )
        for inc, text in zip(incarnations, texts, strict=True):
            if text is None or hash(text) == self._texts.get(inc):
                continue
            try:
                info, version = registration.decode_info(text), registration.version_in(text)
            except ValueError as error:
                log.warning("ignoring the worker of incarnation %d: %s", inc, error)
                continue
            if version != DATA_VERSION:
                self._estrange(inc, info, version)
                continue
            self.strangers.pop(inc, None)
            if inc in self._infos and self._infos[inc].key != info.key:
                # The number is another worker's now, because Redis lost data.
                self.measurements.forget(inc)
            self._infos[inc], self._texts[inc] = info, hash(text)
            self._workers = None

    def _estrange(self, inc: Incarnation, info: WorkerInfo, version: int) -> None:
        what = f"worker {info.key} speaks version {version} of the data model, not {DATA_VERSION}"
        if self.strangers.get(inc) != what:
            log.error("nothing is routed to an incarnation, %d: %s", inc, what)
        self.strangers[inc] = what
        self._infos.pop(inc, None)
        self._texts.pop(inc, None)
        self._workers = self._met = None

    @property
    def away(self) -> Mapping[Incarnation, int]:
        """Incarnations whose agents were away when Redis was last asked, and since when, in ms."""
        return self.last_view.away if self.last_view else {}

    @property
    def guessed(self) -> frozenset[Incarnation]:
        """Incarnations of which nobody tells what they cache, as in the last view."""
        return self.last_view.guessed if self.last_view else frozenset()

    def info_of(self, incarnation: Incarnation) -> WorkerInfo | None:
        return self._infos.get(incarnation)

    def name_of(self, incarnation: Incarnation) -> str:
        """Returns the name of an incarnation's worker, for a log."""
        info = self._infos.get(incarnation)
        return f"worker {info.key}" if info else f"incarnation {incarnation}"

    def forget_except(self, live: Iterable[Incarnation]) -> None:
        """Drop what is known about incarnations that are not among `live`."""
        keep = set(live)
        self._infos = {inc: info for inc, info in self._infos.items() if inc in keep}
        self.strangers = {inc: what for inc, what in self.strangers.items() if inc in keep}
        self._texts = {inc: text for inc, text in self._texts.items() if inc in keep}
        self.measurements.forget_except(keep)

    def measured(self, incarnation: Incarnation) -> Measurement:
        return self.measurements.of(incarnation)


def _same(some: list[Incarnation], others: list[Incarnation]) -> bool:
    """Whether both are equal. They are mostly one list, and lists do not look for that."""
    return some is others or some == others
