"""The live workers as decisions see them: one column of Candidates for each, filled by name."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.core.loads import (
    ROUND,
    Load,
    Reservation,
    Snapshot,
    fading,
)
from app.core.overlaps import Overlaps
from app.core.trust import Rung, Trust, lowest
from app.core.types import Incarnation, TierOverlap
from app.core.verdicts import CALLER, LACKS, LATE, Mark, Verdict
from app.core.worker_report import (
    WorkerInfo,
)
from app.policy import reported
from app.policy.cost import Candidates, Floats
from app.policy.workers import (
    DECODING,
    MOST_REQUESTS,
    OTHERS,
    OVERLAP_ROWS,
    QUEUE,
    REQUESTS,
    RESERVED,
    ROUTED,
    TOTAL,
    Workers,
    beyond_least,
    load_rows,
    others_rows,
    rows_of,
)


class View:
    """The live workers at one moment, in a fixed order; decisions add what they reserve."""

    def __init__(
        self,
        snapshot: Snapshot,
        workers: Workers,
        paused: Mapping[Incarnation, WorkerInfo] = MappingProxyType({}),
        lapsed: Mapping[Incarnation, WorkerInfo] = MappingProxyType({}),
    ) -> None:
        """paused: workers that are there, but get no requests. lapsed: workers that are not heard
        of."""
        self.now_ms = snapshot.now_ms
        self.rounds = snapshot.rounds
        self.marks = snapshot.marks
        self.paused, self.lapsed = paused, lapsed
        self.suspected: Counter[tuple[str, Incarnation]] = Counter()
        """Tries that this replica has yet to have judged, by mark and worker."""
        self.away = snapshot.away if snapshot.marks else {}
        self.trusts = self._trusts_of(workers)
        """Trust in the workers that are not exact."""
        self.guessed = frozenset(
            inc for inc, trust in self.trusts.items() if trust is Trust.APPROXIMATE
        )
        """Workers of which nobody tells what they cache: what is routed there counts."""
        self.somebody_waits, self.mixed_ms = snapshot.somebody_waits, snapshot.mixed_ms
        self.incarnations = workers.incarnations
        self.infos = workers.infos
        self.block_size = workers.infos[0].block_size if workers.infos else None
        """Tokens per block, which all workers of a namespace share; None without workers."""
        self.measured = workers.measured
        self.everybody = workers.everybody
        self.contexts = workers.contexts
        self.roles = workers.roles
        self.late_s = workers.late_s
        self._loads = snapshot.loads
        self._workers = workers
        self.failed_shares: Floats | None = None
        """Share of each worker's tries that failed lately, (workers,); None: none failed."""
        self._on_trial: NDArray[np.bool_] | None = None
        self._left_alone: defaultdict[str, dict[Incarnation, Mark]] = defaultdict(dict)
        if self.marks:
            self._heed_marks()
        has_any = self.failed_shares is not None or self._on_trial is not None
        self.knows_failures = has_any or bool(self._left_alone)
        """Whether any worker is known to have failed lately."""
        self._rows = rows_of(self._loads, self.now_ms, workers.max_requests, self.rounds)
        self._others = self._others_of(workers)
        """Rows to be added to `_rows`, of what no router reserved; None: there is nothing."""
        if self._others is not None:
            self._rows += self._others

    def _trusts_of(self, workers: Workers) -> Mapping[Incarnation, Trust]:
        if not self.away:
            return workers.trusts
        known = workers.trusts
        away = {i: lowest(known.get(i, Trust.EXACT), Trust.APPROXIMATE) for i in self.away}
        return {**known, **away}

    def _others_of(self, workers: Workers) -> Floats | None:
        if not workers.may_have_others:
            return None
        columns, block_size = self._loads.columns, workers.infos[0].block_size
        return others_rows(reported.others_of(workers.reports, columns, self.now_ms, block_size))

    def _heed_marks(self) -> None:
        """Workers on trial keep their usual price, so that they get a request."""
        shares, on_trial = np.zeros(len(self.infos)), np.zeros(len(self.infos), np.bool_)
        for inc, marks in self.marks.items():
            position = self.position(inc)
            if position is None:
                continue
            on_trial[position] = marks.is_on_trial
            if not marks.is_on_trial:
                shares[position] = marks.failed.share_at(self.now_ms)
            for name, mark in marks.items():
                if name.startswith((LACKS, CALLER)):
                    self._left_alone[name][inc] = mark
        if any(LATE in marks for marks in self.marks.values()):
            own = 0.0 if self.late_s is None else self.late_s
            self.late_s = beyond_least(own + self._first_tokens_late_s())
        self.failed_shares = shares if shares.any() else None
        self._on_trial = on_trial if on_trial.any() else None

    def _first_tokens_late_s(self) -> Floats:
        """Returns how much later than predicted first tokens come, (workers,).

        The figure fades, so that each worker is tried again; while that try is overdue, too, it
        stays.
        """
        late_s, columns = np.zeros(len(self.infos)), self._loads.columns
        for inc, marks in self.marks.items():
            mark, at = marks.get(LATE), self.position(inc)
            if mark is not None and at is not None:
                late_s[at] = mark.late_s(self.now_ms)
                if columns[RESERVED, at] > columns[DECODING, at]:
                    overdue_s = self._loads.at(at).overdue_s(self.now_ms)
                    late_s[at] = max(late_s[at], min(overdue_s, mark.late_ms / 1000))
        return late_s

    def rung(self, inc: Incarnation, info: WorkerInfo) -> Rung:
        trust = self.trusts.get(inc, Trust.EXACT)
        return Rung(trust, info.trust_cause if trust is info.trust else "its agent is away")

    @property
    def away_s(self) -> list[float | None]:
        """Seconds for which each worker's agent has been away; None: it is not."""
        since = map(self.away.get, self.incarnations)
        return [None if ms is None else max(0, self.now_ms - ms) / 1000 for ms in since]

    @cached_property
    def away_ones(self) -> NDArray[np.bool_] | None:
        """Mask of agents that are away, (workers,); None: no agent, or all: what befalls all tells
        none apart."""
        if not self.away:
            return None
        ones = np.array([inc in self.away for inc in self.incarnations])
        return ones if ones.any() and not ones.all() else None

    def verdict(self, inc: Incarnation) -> Verdict:
        return self.marks[inc].verdict(self.now_ms, has_lease=self.position(inc) is not None)

    def marked(self, name: str) -> Mapping[Incarnation, Mark]:
        """Returns the workers that this model, path or caller found failing lately, whether they
        are left alone for it or to be tried again."""
        return self._left_alone.get(name, {})

    def tried(self) -> NDArray[np.bool_] | None:
        """Returns which workers on trial have their one request, (workers,); None: none is on
        trial."""
        if self._on_trial is None:
            return None
        columns = self._loads.columns
        tried: NDArray[np.bool_] = self._on_trial & (columns[RESERVED] > columns[DECODING])
        return tried

    def left_alone(self, names: Iterable[str]) -> NDArray[np.bool_] | None:
        """Returns which workers are left alone for one of these marks, (workers,); None: none.
        After the pause for it, each gets one request at a time until it answers one."""
        if not self._left_alone and not self.suspected:
            return None
        alone, columns = np.zeros(len(self.infos), np.bool_), self._loads.columns
        asked = frozenset(names)
        for name in asked & self._left_alone.keys():
            for inc, mark in self._left_alone[name].items():
                at = self.position(inc)
                if at is not None and mark.until_ms:
                    is_tried = columns[RESERVED, at] > columns[DECODING, at]
                    alone[at] |= mark.until_ms > self.now_ms or is_tried
        for name, inc in self.suspected:
            if name in asked and (at := self.position(inc)) is not None:
                alone[at] = True
        return alone

    @property
    def loads(self) -> list[Load]:
        """Copy of each worker's load."""
        return list(map(self._loads.at, range(len(self.incarnations))))

    @property
    def others_requests(self) -> list[float]:
        """Requests in each worker's engine, beyond those that routers reserved."""
        others: list[float] = self._rows[OTHERS].tolist()
        return others

    def total(self, position: int) -> int:
        """Returns the number of reservations ever made on the worker at `position`."""
        return int(self._loads.columns[TOTAL, position])

    @property
    def shortest_queue_s(self) -> float:
        """Predicted prefill still to do on the worker with the least; 0 without workers."""
        return float(self._rows[QUEUE].min()) if self.infos else 0.0

    def openings(self, max_queue_s: float) -> int:
        """Returns how many requests workers with a queue of at most `max_queue_s` take at once.

        If that is finite, any request may be the last that its worker takes, so each worker counts
        once.
        """
        free = self._rows[MOST_REQUESTS] - self._rows[REQUESTS]
        free = free[(free > 0) & (self._rows[QUEUE] <= max_queue_s)]
        return int(free.sum()) if math.isinf(max_queue_s) else free.size

    def all_hold(self, num_blocks: int, context_tokens: int = 0) -> bool:
        """Whether no worker reports fewer KV blocks than this in total, or a shorter context."""
        totals = self._workers.kv_total_blocks
        is_too_small = bool(((totals > 0) & (totals < num_blocks)).any())
        return not is_too_small and context_tokens <= self.contexts.least

    def candidates(self, overlaps: Overlaps) -> Candidates:
        """Returns the workers as a cost function sees them, for a prompt with these overlaps."""
        # A copy, as overlaps are this prompt's own and later decisions add to the loads.
        device, host, disk, *loads = self._rows.copy()
        for members, overlap in overlaps.shared:
            rows = self._workers.places_of(members)
            device[rows], host[rows], disk[rows] = overlap.device, overlap.host, overlap.disk
        for inc, overlap in overlaps.own.items():
            position = self.position(inc)
            if position is not None:
                device[position] = overlap.device
                host[position] = overlap.host
                disk[position] = overlap.disk
        return Candidates(device, host, disk, *loads, *self._workers.reported)

    def reusable(self, overlaps: Overlaps, isl_tokens: int) -> Overlaps:
        """Returns what the engines would reuse of `overlaps`, for a prompt of `isl_tokens`."""
        # The last token is always computed, and with it the block that it is in.
        most = (isl_tokens - 1) // (self.block_size or 1)
        reused: dict[Incarnation, TierOverlap] = {}
        for inc, rule in self._workers.reuse_less.items():
            if inc in overlaps:
                held = overlaps[inc]
                reused[inc] = held.first(rule.reusable(held, most))
        for inc, resume in overlaps.resumes.items():
            # Where more is predicted than held, what its engine will hold is not known so well.
            if inc in overlaps and overlaps[inc].total == resume.held:
                reused[inc] = overlaps[inc].first(resume.reused(most))
        if not reused:
            return overlaps
        return Overlaps({inc: o for inc, o in (overlaps.flat() | reused).items() if o.total})

    def position(self, inc: Incarnation) -> int | None:
        """Returns the index of an incarnation in this view; None: it is not routed to."""
        return self._workers.position.get(inc)

    def add(self, position: int, reservation: Reservation) -> None:
        """Count a reservation made, or about to be made, on the worker at `position`."""
        load = self._loads.at(position)
        share = ROUND // len(self.infos)
        self.rounds += share
        load.add(reservation, self.now_ms, self.rounds)
        self._loads.put(position, load)
        self._rows[ROUTED] *= fading(share)
        max_requests = self.infos[position].max_requests
        rows = load_rows(load, self.now_ms, max_requests, self.rounds)
        self._rows[len(OVERLAP_ROWS) :, position] = rows
        if self._others is not None:
            self._rows[:, position] += self._others[:, position]


def load_statistics(view: View) -> tuple[float, float]:
    """Returns mean and sample standard deviation of the used fraction of KV blocks, over workers
    that are not stale; 0 if there are too few."""
    used = [
        m.metrics.kv_active_blocks / m.metrics.kv_total_blocks
        for m in view.measured
        if m.metrics.kv_total_blocks and not m.is_stale(view.now_ms, len(view.infos))
    ]
    return (
        float(np.mean(used)) if used else 0.0,
        float(np.std(used, ddof=1)) if len(used) > 1 else 0.0,
    )
