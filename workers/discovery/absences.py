"""Engines that a source has told of, and does not in its latest answer: one answer may lack some
that are there.

A name server may give some of the addresses, a file be half written, and a server of Kubernetes
that was just started know of no pods yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.discovery.engine import Engine, Engines

ANSWERS = 3
"""At least so many have to lack an engine, one after another."""


@dataclass(frozen=True, slots=True)
class _Absence:
    engine: Engine
    first_s: float
    last_s: float
    answers: int

    def goes_on(self, now: float) -> _Absence:
        first_s = self.first_s if self.answers else now
        return replace(self, first_s=first_s, last_s=now, answers=self.answers + 1)


class Absences:
    """gone_s: for so long answers lack an engine that is gone, whether it works or not."""

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._told: Engines = {}
        self._of: dict[str, _Absence] = {}

    @property
    def lacking(self) -> Engines:
        """Those that may yet be there; of none it is known that it may be begun with."""
        return {key: replace(one.engine, ready=False) for key, one in self._of.items()}

    def note(self, engines: Engines, now: float) -> None:
        """The source tells of `engines`; of none at all, that says nothing."""
        before, self._of = self._of, {}
        known = {key: absence.engine for key, absence in before.items()} | dict(self._told)
        for key, engine in known.items():
            if key in engines or engine.leaving or engine.is_replaced(engines.values()):
                continue
            absence = before.get(key, _Absence(engine, now, now, 0))
            absence = absence.goes_on(now) if engines else absence
            if not self._is_long(absence):
                self._of[key] = absence
        self._told = engines

    def forget(self, key: str) -> None:
        """It is gone."""
        self._of.pop(key, None)

    def _is_long(self, absence: _Absence) -> bool:
        lasted_s = absence.last_s - absence.first_s
        return absence.answers >= ANSWERS and lasted_s >= self._gone_s
