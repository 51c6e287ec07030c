"""Figures that this replica has learned of workers whose engines tell nothing: from what it routed
to them, and from their answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from app.core.chains import positions
from app.core.trust import Trust
from app.core.types import Incarnation, SequenceHash
from app.policy.answers import Answer, Answers, tells_speed
from app.policy.decision import Decision
from app.policy.plan import Plan
from app.policy.view import View
from app.router.fleet import Fleet

MOST_USED = 65_536
"""Blocks of one worker whose last use is known: of some thousand prompts."""


class LastUse:
    """Last use of each block of one worker, by the tokens that it had computed by then. Engines
    evict what was not used for longest."""

    def __init__(self) -> None:
        self._used: OrderedDict[SequenceHash, float] = OrderedDict()
        self._computed = 0.0
        self._requests = 0
        """Requests that the worker had got when one was last routed from here."""

    def now(self, requests: int, mean_tokens: float) -> float:
        """Returns the tokens computed by now.

        requests: that it has got, from all replicas; those of others are taken to add mean_tokens
        each.
        """
        others = max(0, requests - self._requests) if self._requests else 0
        return self._computed + others * mean_tokens

    def note(
        self, chain: Sequence[SequenceHash], tokens: int, requests: int, mean_tokens: float
    ) -> None:
        """Note that a request is routed there, with so many tokens of its prompt to compute.

        requests: that the worker has got with this one.
        """
        at = self._computed = self.now(requests - 1, mean_tokens) + tokens
        self._requests = requests
        for place in positions(len(chain)):
            self._used[chain[place - 1]] = at
            self._used.move_to_end(chain[place - 1])
        while len(self._used) > MOST_USED:
            self._used.popitem(last=False)

    def held(
        self, chain: Sequence[SequenceHash], blocks: int, now: float, room_tokens: float
    ) -> int:
        """Returns how many of the first `blocks` of a chain were used within the last
        `room_tokens`, or at an unknown time."""
        held = 0
        for place in positions(len(chain)):
            if place > blocks:
                break
            last = self._used.get(chain[place - 1])
            if last is not None and now - last > room_tokens:
                return held
            held = place
        return blocks


class LearnedWorkers:
    """Last uses and answers by incarnation; workers that are gone are forgotten."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._workers: dict[Incarnation, tuple[LastUse, Answers]] = {}

    def routed(self, plan: Plan) -> None:
        """Note that a request goes where it was planned to."""
        incarnation = plan.reservation.incarnation
        if incarnation in plan.view.guessed and plan.query.request.chain:
            last_use, answers = self._of(incarnation)
            decision = plan.decision
            held = decision.overlap.total * decision.worker.block_size
            requests = plan.view.total(plan.position)
            computed = max(0, decision.isl_tokens - held)
            last_use.note(plan.query.request.chain, computed, requests, answers.new_tokens or 0.0)

    def add(self, decision: Decision, answer: Answer) -> None:
        """Learn from what an engine said of an answer that it gave to its end."""
        info, incarnation = decision.worker, decision.incarnation
        # Of one whose agent hears nothing for a while, overlap is also what was published before.
        is_silent = info.trust is Trust.APPROXIMATE and not info.event_addresses
        if not is_silent or decision.source is not None:
            return
        _, answers = self._of(incarnation)
        promised = decision.reservation
        own_s = promised.prefill_us / 1e6 if promised is not None else 0.0
        predicted = decision.overlap.total * info.block_size
        answers.add(answer, predicted, max(0.0, decision.expected_s - own_s))
        if not tells_speed(info):
            self._fleet.measurements.teach(incarnation, answers.speed)

    def held(
        self, incarnation: Incarnation, chain: Sequence[SequenceHash], blocks: int, view: View
    ) -> int:
        """Returns how many of the first `blocks` of a chain, which were routed to a worker, it is
        expected to have still."""
        position = view.position(incarnation)
        if position is None or incarnation not in self._workers:
            return blocks
        last_use, answers = self._workers[incarnation]
        info, mean_tokens = view.infos[position], answers.new_tokens
        room_tokens = info.kv_total_blocks * info.block_size
        if room_tokens and mean_tokens is not None:
            now = last_use.now(view.total(position), mean_tokens)
            blocks = last_use.held(chain, blocks, now, room_tokens)
        return round(blocks * answers.kept)

    def _of(self, incarnation: Incarnation) -> tuple[LastUse, Answers]:
        if incarnation not in self._workers:
            known = self._workers.items()
            self._workers = {inc: one for inc, one in known if self._fleet.info_of(inc)}
            self._workers[incarnation] = LastUse(), Answers()
        return self._workers[incarnation]
