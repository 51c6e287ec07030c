"""Whether workers report the cached tokens that were predicted of them; else something between
tokenizer, engine and index is wrong, and nothing else would say so. No I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Share of the prompt tokens that may be missing: blocks that are evicted between decision and
prefill are fewer."""
UNKNOWN = 0.1
"""Share of the cached tokens: if fewer were predicted, the index knows nothing of them. More is
often cached than predicted, as requests that come together find each other's blocks."""
MIN_ANSWERS = 100
"""Answers that are compared before anything is said."""
REMEMBERED_ANSWERS = 1000
"""Answers after which older ones count half: what was put right is soon forgotten."""
MAX_PAIRS = 10_000
"""Pairs of model and worker; the one heard of longest ago makes room."""


@dataclass(slots=True)
class _Sums:
    """Sums of tokens, and a number of answers. missing: predicted, but not cached."""

    answers: float = 0.0
    prompt: float = 0.0
    predicted: float = 0.0
    cached: float = 0.0
    missing: float = 0.0
    rings: bool = False

    @property
    def is_apart(self) -> bool:
        least = TOLERANCE * self.prompt
        is_unknown = self.cached > least and self.predicted < UNKNOWN * self.cached
        return self.answers >= MIN_ANSWERS and (self.missing > least or is_unknown)

    def halve(self) -> None:
        for name in ("answers", "prompt", "predicted", "cached", "missing"):
            setattr(self, name, getattr(self, name) / 2)


class Alarm:
    """Follows each worker of each model."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}

    def compare(
        self,
        model: str,
        worker: str,
        prompt: int,
        predicted: int,
        cached: int,
        *,
        at_least: bool = False,
    ) -> None:
        """Takes in one answer. All numbers are tokens of its prompt. at_least: more may have been
        cached than was predicted, as an agent has yet to publish what it holds."""
        sums = self._sums.pop((model, worker), None) or _Sums()
        self._sums[model, worker] = sums
        if len(self._sums) > MAX_PAIRS:
            del self._sums[next(iter(self._sums))]
        if sums.answers >= REMEMBERED_ANSWERS:
            sums.halve()
        sums.answers += 1
        sums.prompt += prompt
        sums.predicted += predicted
        sums.cached += min(cached, predicted) if at_least else cached
        sums.missing += max(0, predicted - cached)
        rings = sums.is_apart
        if rings != sums.rings:
            sums.rings = rings
            log.warning("%s" if rings else "no more: %s", _said(model, worker, sums))

    def remarks(self) -> list[str]:
        """Returns a line for each worker of a model that rings."""
        return [
            _said(*pair, sums)
            for pair, sums in sorted(self._sums.items(), key=lambda item: item[0])
            if sums.rings
        ]


def _said(model: str, worker: str, sums: _Sums) -> str:
    shares = [value / sums.prompt for value in (sums.predicted, sums.cached, sums.missing)]
    predicted, cached, missing = (f"{share:.1%}" for share in shares)
    return (
        f"cached tokens: of its prompts of model {model}, {predicted} was predicted to be cached "
        f"by worker {worker}, and {cached} was; {missing} was predicted and missing"
    )
