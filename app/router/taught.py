"""What this replica has learned from the answers of workers whose engines tell nothing."""

from __future__ import annotations

from app.core.types import Incarnation
from app.policy.answers import Answer, Answers, tells_speed
from app.policy.decision import Decision
from app.router.fleet import Fleet


class Taught:
    """By incarnation; those that are gone are forgotten."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._answers: dict[Incarnation, Answers] = {}

    def add(self, decision: Decision, answer: Answer) -> None:
        """What an engine said of an answer that it has given to its end."""
        info, incarnation = decision.worker, decision.incarnation
        if not info.approximate or decision.source is not None:
            return
        if incarnation not in self._answers:
            known = self._answers.items()
            self._answers = {inc: one for inc, one in known if self._fleet.info_of(inc)}
        answers = self._answers.setdefault(incarnation, Answers())
        promised = decision.reservation
        own_s = promised.prefill_us / 1e6 if promised is not None else 0.0
        predicted = decision.overlap.total * info.block_size
        answers.add(answer, predicted, max(0.0, decision.expected_s - own_s))
        if not tells_speed(info):
            self._fleet.teach(incarnation, answers.speed)

    def kept(self, incarnation: Incarnation) -> float:
        """See Answers; 1: nothing is known."""
        answers = self._answers.get(incarnation)
        return 1.0 if answers is None else answers.kept
