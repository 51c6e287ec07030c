"""Health of an engine by what it does: answers, tokens and events. One late answer says little. No
I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from workers.bridge.http.facts import EngineLoad

PROBE_S = 5.0
LATE_S = 0.5
REFUSED_PROBES = 2
"""Probes in a row that nobody listens to until an engine is gone: 3 s at most."""
UNWELL_PROBES = 3
"""Answers in a row by which an engine is believed that it is not well."""
SILENT_S = 20.0
"""Seconds without any sign of life, with MISSED_PROBES, after which an engine is ill."""
MISSED_PROBES = 4
SETTLING_S = 2.0
FIRST_S = 90.0
"""Seconds that an engine may take longer for its first token: it may have to compile for it."""
LONGEST_PROMPTS = 3.0
"""Prompts of the greatest length, in whose time an engine may stand still."""
LONGEST_PAUSES = 5.0
"""Multiple of its longest pause for which an engine may stand still besides."""
PAUSES_FADE = 0.999


class Probe(StrEnum):
    """Outcome of asking an engine whether it is well."""

    ANSWERED = "answered"
    LATE = "does not answer"
    DENIED = "is not let answer"
    UNWELL = "says that it is not well"
    REFUSED = "is gone: nobody listens"


class Life(StrEnum):
    WELL = "well"
    ILL = "ill"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """Judgement of an engine. why: "" if it is well. late_s: seconds that it has kept others
    waiting for an answer or a token, beyond what is usual."""

    life: Life
    why: str = ""
    late_s: float = 0.0


class _Progress:
    def __init__(self) -> None:
        self._last: tuple[float | None, ...] = ()

    def has_moved(self, load: EngineLoad) -> bool:
        counts = (
            *(load.prompt_tokens, load.first_tokens, load.generated_tokens, load.inter_tokens),
            *(load.steps, load.busy_tokens, load.transferred_tokens),
        )
        last, self._last = self._last, counts
        return bool(last) and counts != last

    @property
    def is_told(self) -> bool:
        return any(count is not None for count in self._last)


class EngineHealth:
    """Health of one rank. now: seconds of one clock that never goes back, as are all times.

    stall_s: seconds that an engine may have requests and compute nothing, besides FIRST_S,
    LONGEST_PROMPTS and LONGEST_PAUSES; 0: for ever. waits_for_others: whether requests may wait in
    the engine for KV from other engines.
    """

    def __init__(self, now: float, *, stall_s: float, waits_for_others: bool = False) -> None:
        self._stall_s = stall_s
        self._waits_for_others = waits_for_others
        self._asked_s: float | None = None
        self._took_s = 0.0
        self._answered_s = now
        self._life_s = now
        self._read_s = now
        self._outcome = Probe.ANSWERED
        self._in_a_row = 0
        self._missed = 0
        """Probes since the last answer, whatever came of each."""
        self._progress = _Progress()
        self._moved_s = -math.inf
        self._has_ever_moved = False
        self._busy_since_s: float | None = None
        self._longest_pause_s = 0.0
        self._num_heard = 0
        self._longest_prompt_s = 0.0

    def asked(self, now: float) -> None:
        self._asked_s = now

    def probed(self, outcome: Probe, now: float) -> None:
        if self._asked_s is not None:
            self._took_s, self._asked_s = now - self._asked_s, None
        self._in_a_row = self._in_a_row + 1 if outcome is self._outcome else 1
        self._outcome = outcome
        self._missed += 1
        if outcome is Probe.ANSWERED:
            self._answered_s = self._life_s = now
            self._missed = 0

    def read(self, load: EngineLoad, now: float, longest_prompt_s: float) -> None:
        """Takes in the engine's counters. longest_prompt_s: predicted seconds of a prompt of the
        greatest length."""
        self._read_s = self._life_s = now
        self._longest_prompt_s = longest_prompt_s
        has_requests = bool(load.running or (load.waiting and not self._waits_for_others))
        if self._progress.has_moved(load):
            self._has_ever_moved = True
            self._moved(now)
        if not has_requests:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = now

    def heard(self, num_heard: int, now: float) -> None:
        """num_heard: messages of the engine's events so far."""
        if num_heard != self._num_heard:
            self._num_heard = num_heard
            self._moved(now)

    def verdict(self, now: float) -> HealthVerdict:
        has_moved = now - self._moved_s < SETTLING_S
        late_s = max(self._late_s(now), self._still_s - SETTLING_S - self._longest_pause_s)
        if self._was(Probe.REFUSED, REFUSED_PROBES) and not has_moved:
            return HealthVerdict(Life.GONE, self._outcome.value)
        if self._was(Probe.UNWELL, UNWELL_PROBES) and not has_moved:
            return HealthVerdict(Life.ILL, self._outcome.value, late_s)
        if now - self._life_s >= SILENT_S and self._missed >= MISSED_PROBES:
            return HealthVerdict(Life.ILL, self._outcome.value, late_s)
        if self._is_stalled:
            return HealthVerdict(Life.ILL, STALLED, late_s)
        return HealthVerdict(Life.WELL, late_s=late_s if late_s > LATE_S else 0.0)

    def _was(self, outcome: Probe, in_a_row: int) -> bool:
        return self._outcome is outcome and self._in_a_row >= in_a_row

    @property
    def _is_stalled(self) -> bool:
        first_s = 0.0 if self._has_ever_moved else FIRST_S
        usual_s = LONGEST_PROMPTS * self._longest_prompt_s + LONGEST_PAUSES * self._longest_pause_s
        return 0.0 < self._stall_s <= self._still_s - first_s - usual_s

    @property
    def _still_s(self) -> float:
        """Returns for how long the engine had had requests and computed nothing, when it was last
        read; 0 if that is not known."""
        if self._busy_since_s is None or not self._progress.is_told:
            return 0.0
        return max(0.0, self._read_s - max(self._busy_since_s, self._moved_s))

    def _late_s(self, now: float) -> float:
        """Returns for how long a probe waits for its answer, or the last one did; no longer than
        PROBE_S while there are other signs of life."""
        if not self._missed:
            return max(self._took_s, 0.0 if self._asked_s is None else now - self._asked_s)
        silent_s = now - self._life_s
        if self._outcome is Probe.DENIED:
            return silent_s
        return min(now - self._answered_s, max(PROBE_S, silent_s))

    def _moved(self, now: float) -> None:
        if self._busy_since_s is not None and not self._is_stalled:
            pause_s = now - max(self._busy_since_s, self._moved_s)
            self._longest_pause_s = max(PAUSES_FADE * self._longest_pause_s, pause_s)
        self._moved_s = self._life_s = now


STALLED = "has requests, and computes nothing of them"


BLOCKS_A_PROMPT = 2
"""Mean blocks of prompts from which on at least one prompt has filled a block."""
MANY_BLOCKS = 100
"""Blocks to compute where the number of prompts is not known: short ones fill no block."""
SETTLING_READINGS = 2
"""Readings by which counters may lag behind events."""
LATE_READINGS = 2


class _Computed(NamedTuple):
    computed: float
    prompts: float | None
    running: int = 0


class Silence:
    """Whether an engine computes what causes events, and none is heard. block_size: tokens of its
    block."""

    def __init__(self, block_size: int) -> None:
        self.since_s: float | None = None
        """Start of the silence, in the time of `observe`; None: events arrive, or none were due."""
        self._block_size = block_size
        self._num_heard = 0
        self._settling = 0
        self._late = 0
        self._before: _Computed | None = None
        self._last: _Computed | None = None

    def observe(self, load: EngineLoad, num_heard: int, now: float) -> None:
        """num_heard: batches that came until now, also those that were asked for."""
        progress = _computed(load)
        if progress is None:
            return
        is_restarted = self._last is not None and progress.computed < self._last.computed
        self._last = progress
        if num_heard != self._num_heard or self._before is None or is_restarted:
            self._num_heard, self._settling = num_heard, SETTLING_READINGS
        if self._settling:
            self._settling -= 1
            self._before, self._late, self.since_s = progress, 0, None
        elif self._is_due(self._before, progress):
            self._late += 1
            if self._late == LATE_READINGS:
                self.since_s = now

    def _is_due(self, before: _Computed | None, progress: _Computed) -> bool:
        assert before is not None
        blocks = (progress.computed - before.computed) / self._block_size
        if progress.prompts is None or before.prompts is None:
            return blocks >= MANY_BLOCKS
        requests = progress.prompts - before.prompts + before.running
        return blocks >= BLOCKS_A_PROMPT * max(1.0, requests)


def _computed(load: EngineLoad) -> _Computed | None:
    if load.busy_tokens is not None:
        return _Computed(load.busy_tokens, None)
    if load.prompt_tokens is None or load.cached_tokens is None:
        return None
    computed = load.prompt_tokens - load.cached_tokens + (load.generated_tokens or 0.0)
    return _Computed(computed, load.first_tokens, load.running)
