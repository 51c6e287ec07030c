"""What Redis knows about a batch's prompts and about the workers, asked for together."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from app.core.config import RouterSettings
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import NO_OVERLAP, Incarnation
from app.policy.decision import Pending
from app.router.fleet import Fleet, View
from app.router.history import Routed
from app.router.metrics import Telemetry
from app.state import overlap, reservations
from app.state.overlap import Overlaps
from app.state.scripts import ScriptRunner


class LookUp:
    """Finds what a decision is made from, in at most two round trips."""

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        settings: RouterSettings,
        fleet: Fleet,
        telemetry: Telemetry,
        routed: Routed,
    ) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._kv_events = settings.kv_events
        self._fleet = fleet
        self._telemetry = telemetry
        self._routed = routed
        self._loads = reservations.loads(keyspace)
        self._boundaries = overlap.Boundaries()

    async def workers(self) -> View:
        """The workers as they are now. Raises RedisUnavailable, NamespaceMissing."""
        return await self._fleet.view(await self._runner.one(self._loads))

    async def batch(self, batch: list[Pending]) -> View:
        """The workers as they are now; sets `overlaps` and `session_at` of each request.

        Raises RedisUnavailable, NamespaceMissing.
        """
        chains = [pending.request.chain for pending in batch]
        sessions = [pending.request.session for pending in batch]
        while True:
            shards = self._fleet.shards or (await self._runner.one(self._loads)).shards or 1
            recall = self._routed.recall(sessions)
            foresee = self._routed.foresee(chains, shards)
            with self._telemetry.seconds_of("look_up").time():
                overlaps, (snapshot, *others) = await overlap.match(
                    self._runner,
                    self._keyspace,
                    chains if self._kv_events else [],
                    shards,
                    along=[self._loads, *recall, *foresee],
                    boundaries=self._boundaries,
                )
            recalled, foreseen = others[: len(recall)], others[len(recall) :]
            if isinstance(snapshot, RedisUnavailable):
                raise snapshot
            view = await self._fleet.view(snapshot)
            # Otherwise the namespace was recreated, and the blocks are elsewhere.
            if snapshot.shards == shards:
                break
        self._telemetry.blind.inc(overlaps.count(None))
        for pending, found, ahead in zip_longest(batch, overlaps, foreseen):
            known = ahead if isinstance(ahead, dict) else {}
            pending.overlaps = with_predicted(found or {}, known)
        for visits in recalled:
            if isinstance(visits, list):
                for pending, visit in zip(batch, visits, strict=True):
                    pending.session_at = self._routed.session_at(visit, snapshot.now_ms)
        return view


def with_predicted(overlaps: Overlaps, foreseen: dict[Incarnation, int]) -> Overlaps:
    """`overlaps`, longer on the device where more blocks are foreseen than published."""
    merged = dict(overlaps)
    for inc, blocks in foreseen.items():
        known = overlaps.get(inc, NO_OVERLAP)
        if blocks > known.total:
            merged[inc] = replace(known, device=known.device + blocks - known.total)
    return merged
