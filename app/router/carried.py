"""Requests that a replica's door carries: each stays reserved for as long as it is carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.loads import Reservation
from app.core.types import WorkerKey
from app.policy.decision import Decision
from app.policy.view import View
from app.state.reservations import Extension, ExtensionOutcome

EXTEND_S = 3.0
"""Seconds between two extensions of a request; more of them would only cost Redis time."""


@dataclass(slots=True)
class _CarriedRequest:
    """A carried request. due_s: when to extend what is reserved for it, monotonic."""

    reservation: Reservation
    worker: WorkerKey
    address: str
    due_s: float
    decoding: bool = False


class Carried:
    """Carried requests by the id of what is reserved for them, the earliest due first."""

    def __init__(self) -> None:
        self._requests: dict[str, _CarriedRequest] = {}

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, decision: Decision, now_s: float) -> None:
        """Carry a request to where it was decided to go, if anything is reserved there."""
        if decision.reservation is not None:
            worker = decision.worker
            self._requests[decision.reservation_id] = _CarriedRequest(
                decision.reservation, worker.key, worker.address, now_s + EXTEND_S
            )

    def first_token(self, reservation_id: str) -> None:
        if reservation_id in self._requests:
            self._requests[reservation_id].decoding = True

    def end(self, reservation_id: str) -> None:
        self._requests.pop(reservation_id, None)

    def due(self, now_s: float, view: View | None) -> list[Extension]:
        """Returns what to extend now. view: a worker at an unchanged address counts as the same
        process, whatever its incarnation."""
        if view is None or not self._requests:
            return []
        workers = [*zip(view.incarnations, view.infos, strict=True), *view.paused.items()]
        incarnations = {(info.key, info.address): inc for inc, info in workers}
        due = []
        for reservation_id, one in self._requests.items():
            if one.due_s > now_s:
                break
            inc = incarnations.get((one.worker, one.address))
            due.append(Extension(reservation_id, one.reservation, inc, one.decoding))
        return due

    def extended(
        self, extensions: Sequence[Extension], outcomes: Sequence[ExtensionOutcome], now_s: float
    ) -> None:
        """Note what Redis has answered; what was neither extended nor reserved again remains
        due."""
        for extension, outcome in zip(extensions, outcomes, strict=True):
            if outcome is not ExtensionOutcome.NEITHER:
                one = self._requests.pop(extension.reservation_id, None)
                if one is not None:
                    one.due_s = now_s + EXTEND_S
                    self._requests[extension.reservation_id] = one
