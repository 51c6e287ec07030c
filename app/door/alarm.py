"""Whether workers report the cached tokens that were predicted of them; else something between
tokenizer, engine and index is wrong, and nothing else would say so. No I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Of the prompt tokens. Blocks that are evicted between decision and prefill are below it."""
MIN_TOKENS = 20_000
"""Of prompts that were compared before anything is said."""
REMEMBERED_TOKENS = 500_000
"""After so many, the older ones count half: what was put right is soon forgotten."""
MAX_PAIRS = 10_000
"""Of model and worker; the one heard of longest ago makes room."""


@dataclass(slots=True)
class _Sums:
    """Tokens."""

    compared: float = 0.0
    predicted: float = 0.0
    cached: float = 0.0
    apart: float = 0.0
    rings: bool = False


class Alarm:
    """Follows each worker of each model."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}

    def compare(self, model: str, worker: str, prompt: int, predicted: int, cached: int) -> None:
        """Take in one answer. All but `model` and `worker` are tokens of its prompt."""
        sums = self._sums.pop((model, worker), None) or _Sums()
        self._sums[model, worker] = sums
        if len(self._sums) > MAX_PAIRS:
            del self._sums[next(iter(self._sums))]
        if sums.compared > REMEMBERED_TOKENS:
            sums.compared, sums.predicted = sums.compared / 2, sums.predicted / 2
            sums.cached, sums.apart = sums.cached / 2, sums.apart / 2
        sums.compared += prompt
        sums.predicted += predicted
        sums.cached += cached
        sums.apart += abs(cached - predicted)
        rings = sums.compared >= MIN_TOKENS and sums.apart > TOLERANCE * sums.compared
        if rings != sums.rings:
            sums.rings = rings
            what = _said(model, worker, sums)
            log.warning("%s" if rings else "no more: %s", what)

    def remarks(self) -> list[str]:
        """What is wrong, a line for each worker of a model."""
        return [_said(*pair, sums) for pair, sums in sorted(self._sums.items()) if sums.rings]


def _said(model: str, worker: str, sums: _Sums) -> str:
    shares = [value / sums.compared for value in (sums.apart, sums.predicted, sums.cached)]
    apart, predicted, cached = (f"{share:.1%}" for share in shares)
    return (
        f"cached tokens: {apart} of those of prompts of {model} on worker {worker} are not as "
        f"predicted, which was {predicted}; it reports {cached}"
    )
