"""How long a source has not told of an engine: one answer may lack some that are there.

A name server may give some of the addresses, a file be half written, and a server of Kubernetes
that was just started know of no pods yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.discovery.engine import Engines

ANSWERS = 3
"""At least so many have to lack an engine, one after another."""


@dataclass(frozen=True, slots=True)
class _Absence:
    first_s: float
    last_s: float
    answers: int


class Absences:
    """gone_s: for so long answers lack an engine that is gone, whether it works or not."""

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._of: dict[str, _Absence] = {}

    def note(self, followed: Iterable[str], engines: Engines, now: float) -> bool:
        """The source tells of `engines`; of none at all, that says nothing. Returns whether some of
        `followed` lack."""
        if engines:
            before, self._of = self._of, {}
            for key in followed:
                if key not in engines:
                    was = before.get(key, _Absence(now, now, 0))
                    self._of[key] = _Absence(was.first_s, now, was.answers + 1)
        return bool(self._of)

    def is_long(self, key: str) -> bool:
        absence = self._of.get(key)
        return (
            absence is not None
            and absence.answers >= ANSWERS
            and absence.last_s - absence.first_s >= self._gone_s
        )
