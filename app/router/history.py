"""Records of where requests went: blocks to come, sessions, and decisions.

Written after decisions, never before their answers. Redis loses what it does not accept in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from app.core.chains import marks_of, shard_of
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.outcomes import Ending
from app.core.pace import Pace
from app.core.types import Incarnation, SequenceHash, request_id_of
from app.http.supervisor import supervised
from app.policy.cost import IN_FLIGHT_TOKENS
from app.policy.decision import Query, RouteRequest, alike_of
from app.policy.plan import Plan
from app.policy.record import record_of
from app.router.replica import Replica
from app.state import decisions, in_flight, predictions, sessions
from app.state.scripts import Call

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 1024
"""Records of each kind that may wait; beyond that the oldest are lost."""
RECORD_PAUSE_S = 0.05
MAX_PREDICTIONS = 262_144
"""Routed blocks recorded in each shard; beyond, the oldest fifth is dropped."""
SESSION_TTL_S = 600.0
"""How long the worker is remembered to which a session last went."""


class History:
    """Reads and writes predictions and sessions, and writes decisions, as the settings say."""

    def __init__(self, replica: Replica) -> None:
        settings = replica.settings
        self.predictions = predictions.PredictionSettings(
            settings.prediction_ttl_s, MAX_PREDICTIONS
        )
        self._replica = replica
        self._reservation_ttl_ms = round(settings.reservation_ttl_s * 1000)
        self._session_affinity = settings.session_affinity
        self._unwritten: deque[Call[int]] = deque(maxlen=MAX_UNWRITTEN)
        self._has_unwritten = asyncio.Event()
        self._decisions_kept = settings.decisions_kept
        self._details = Pace(settings.details_per_s)
        self._unrecorded: deque[Plan] = deque(maxlen=MAX_UNWRITTEN)
        self._ended: dict[str, Ending] = {}
        """Endings by reservation, since decisions were recorded last."""
        self._has_unrecorded = asyncio.Event()

    @property
    def predicts(self) -> bool:
        """Whether predictions are kept of any worker now, beyond first tokens."""
        return bool(self._replica.fleet.guessed)

    def recall(self, queries: Sequence[Query]) -> list[Call[list[sessions.Visit | None]]]:
        """Returns at most one call, which returns where what the queries follow last went."""
        names = [name for query in queries for name in self._followed(query.request)]
        return [sessions.recall(self._replica.keyspace, names)] if names else []

    def follow(
        self, queries: Sequence[Query], visits: list[sessions.Visit | None], now_ms: int
    ) -> None:
        """Set where the first of what each query follows is, if that visit was recent enough.
        visits: as `recall` returns them."""
        came = iter(visits)
        oldest_ms = now_ms - round(1000 * SESSION_TTL_S)
        for query in queries:
            request = query.request
            names = self._followed(request)
            of_session = len(names) - len(request.trail) if request.is_blind else 1
            for place, visit in enumerate(islice(came, len(names))):
                if query.session_at is None and visit is not None and visit.at_ms > oldest_ms:
                    query.session_at = visit.incarnation
                    if request.is_blind:
                        query.followed = 1.0 - max(0, place - of_session) / len(names)

    def _followed(self, request: RouteRequest) -> list[str]:
        """Returns what may tell where a request's cache is, the best first: its session, and if it
        is blind, where texts went that begin alike."""
        if not request.is_blind:
            return [request.session] if self._session_affinity and request.session else []
        return [*([request.session] if request.session else ()), *request.trail]

    def predicted(
        self, queries: Sequence[Query], shards: int
    ) -> dict[int, Call[dict[Incarnation, int]]]:
        """Returns calls for queries by their place: for the leading blocks that workers which
        publish nothing will hold. None while all workers publish."""
        if not self.predicts:
            return {}
        chains = [query.request.chain for query in queries]
        return {
            place: predictions.predicted(self._shard_of(chain, shards), chain, self.predictions)
            for place, chain in enumerate(chains)
        }

    def computing(self, queries: Sequence[Query]) -> dict[int, Call[dict[bytes, bytes]]]:
        """Returns calls for long prompts by their place: for what is in flight and begins alike."""
        calls = {}
        for place, query in enumerate(queries):
            query.alike = ""
            if query.is_long and self._long_blocks:
                query.alike = in_flight.alike(query.request.chain, self._long_blocks)
            if query.alike:
                calls[place] = in_flight.computing(self._replica.keyspace, query.alike)
        return calls

    def note_computing(
        self, query: Query, fields: dict[bytes, bytes], now_ms: int
    ) -> dict[Incarnation, int]:
        """Returns the leading blocks of the prompt that each incarnation computes. fields: what
        `computing` read."""
        found = in_flight.parsed(fields, query.request.chain, self._long_blocks, now_ms)
        if found.over:
            self._write(in_flight.computed(self._replica.keyspace, query.alike, found.over))
        if found.num >= in_flight.MOST:
            query.alike = ""
        return found.blocks

    @property
    def _long_blocks(self) -> int:
        return IN_FLIGHT_TOKENS // (self._replica.fleet.block_size or IN_FLIGHT_TOKENS + 1)

    def add(self, plan: Plan, shards: int) -> None:
        """Write down that a request was routed as planned."""
        request, incarnation = plan.query.request, plan.reservation.incarnation
        guessed = plan.view.guessed
        # Of a split, events tell once it has arrived; without them, nothing else tells.
        holder = incarnation if incarnation in guessed else plan.holder
        attempt, keyspace = plan.reservation.attempt, self._replica.keyspace
        if request.chain and holder in guessed:
            shard, ttl_ms = self._shard_of(request.chain, shards), self._reservation_ttl_ms
            self._write(
                predictions.predict(shard, holder, request.chain, self.predictions, attempt, ttl_ms)
            )
        elif (alike := alike_of(attempt)) and plan.lacking_tokens >= IN_FLIGHT_TOKENS:
            ttl_ms = round(1000 * self.predictions.lifetime_s)
            about = (holder, request.chain, self._long_blocks, plan.view.now_ms + ttl_ms, ttl_ms)
            for call in in_flight.compute(keyspace, alike, attempt, *about):
                self._write(call)
        ttl_ms = round(1000 * SESSION_TTL_S)
        names = [request.session] if request.session else []
        if request.is_blind:
            names += marks_of(request.trail)
        elif not (self._session_affinity or request.keeps_session):
            names = []
        for name in names:
            self._write(sessions.remember(keyspace, name, incarnation, ttl_ms))

    def confirm(self, attempt: str) -> None:
        """Write down that the first token of a request is out: what was predicted is held now.
        Where workers publish what they hold, that says more than what is in flight."""
        if self.predicts:
            for shard in self._shards:
                self._write(predictions.confirm_predicted(shard, attempt, self.predictions))
        self._take_back(attempt)

    def withdraw(self, attempt: str) -> None:
        """Take back what was predicted for a request that ended before its first token."""
        if self.predicts:
            for shard in self._shards:
                self._write(predictions.withdraw_predicted(shard, attempt))
        self._take_back(attempt)

    def _take_back(self, attempt: str) -> None:
        if alike := alike_of(attempt):
            self._write(in_flight.computed(self._replica.keyspace, alike, [attempt]))

    def record(self, plan: Plan) -> None:
        if self._decisions_kept:
            self._unrecorded.append(plan)
            self._has_unrecorded.set()

    def end(self, reservation_id: str, ending: Ending) -> None:
        """Record what came of a decision."""
        if self._decisions_kept and len(self._ended) < MAX_UNWRITTEN:
            now_ms = self._replica.fleet.redis_now_ms or 0
            self._ended[reservation_id] = replace(ending, ended_ms=now_ms)
            self._has_unrecorded.set()

    async def run(self) -> None:
        """Write what was added, until cancelled; all that is pending goes together."""
        async with asyncio.TaskGroup() as tasks:
            failures = self._replica.telemetry.task_failures
            tasks.create_task(supervised("predictions", self._write_forever, failures))
            tasks.create_task(supervised("records", self._record_forever, failures))

    def _write(self, call: Call[int]) -> None:
        self._unwritten.append(call)
        self._has_unwritten.set()

    async def _write_forever(self) -> None:
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            calls = list(self._unwritten)
            self._unwritten.clear()
            try:
                await self._replica.runner.run(calls)
            except RedisUnavailable as error:
                log.debug("%d predictions and sessions lost: %s", len(calls), error)

    async def _record_forever(self) -> None:
        while True:
            await self._has_unrecorded.wait()
            # A short request's decision and its end are one entry.
            await asyncio.sleep(RECORD_PAUSE_S)
            await self.finish()

    async def finish(self) -> None:
        """Record what is left."""
        self._has_unrecorded.clear()
        now_s = time.monotonic()
        ended, self._ended = self._ended, {}
        records = [
            record_of(plan, self._details, now_s, ended.pop(plan.decision.reservation_id, None))
            for plan in self._unrecorded
        ]
        self._unrecorded.clear()
        keyspace, kept = self._replica.keyspace, self._decisions_kept
        calls: list[Call[bytes]] = [decisions.record(keyspace, one, kept) for one in records]
        calls += [
            decisions.record_ending(keyspace, request_id_of(name), how, kept)
            for name, how in ended.items()
        ]
        for at in range(0, len(calls), decisions.MAX_WRITTEN):
            try:
                await self._replica.runner.run(calls[at : at + decisions.MAX_WRITTEN])
            except RedisUnavailable as error:
                log.debug("decisions not recorded: %s", error)

    @property
    def _shards(self) -> list[Keyspace]:
        """Every shard: an attempt does not say in which one its chain lies."""
        replica = self._replica
        return [replica.keyspace.of_shard(n) for n in range(replica.fleet.shards or 1)]

    def _shard_of(self, chain: list[SequenceHash], shards: int) -> Keyspace:
        shard = shard_of(chain[0], shards) if chain else 0
        return self._replica.keyspace.of_shard(shard)
