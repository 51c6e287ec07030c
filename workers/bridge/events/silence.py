"""Whether an engine's events fail to arrive: it computes what causes some, and none is heard."""

from __future__ import annotations

from typing import NamedTuple

from workers.bridge.http.facts import EngineLoad

BLOCKS_A_PROMPT = 2
"""Where prompts have more on average, at least one of them has filled a block."""
MANY_BLOCKS = 100
"""So many must be computed where the number of prompts is not known: short ones fill no block."""
SETTLING_READINGS = 2
"""Counters may lag behind the events of what they count."""
LATE_READINGS = 2


class _Progress(NamedTuple):
    computed: float
    """Tokens."""
    prompts: float | None
    """That have begun, and as many as may have begun before and run."""
    running: int = 0


class Silence:
    """block_size: tokens of an engine's block."""

    def __init__(self, block_size: int) -> None:
        self.since_s: float | None = None
        """When it began, in the time of `observe`; None: events arrive, or none were due."""
        self._block_size = block_size
        self._num_heard = 0
        self._settling = 0
        self._late = 0
        self._before: _Progress | None = None
        self._last: _Progress | None = None

    def observe(self, load: EngineLoad, num_heard: int, now: float) -> None:
        """num_heard: batches that came until now, also those that were asked for."""
        progress = _progress(load)
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

    def _is_due(self, before: _Progress | None, progress: _Progress) -> bool:
        assert before is not None
        blocks = (progress.computed - before.computed) / self._block_size
        if progress.prompts is None or before.prompts is None:
            return blocks >= MANY_BLOCKS
        requests = progress.prompts - before.prompts + before.running
        return blocks >= BLOCKS_A_PROMPT * max(1.0, requests)


def _progress(load: EngineLoad) -> _Progress | None:
    """None if the engine does not say what it has computed."""
    if load.busy_tokens is not None:
        return _Progress(load.busy_tokens, None)
    if load.prompt_tokens is None or load.cached_tokens is None:
        return None
    computed = load.prompt_tokens - load.cached_tokens + (load.generated_tokens or 0.0)
    return _Progress(computed, load.first_tokens, load.running)
