"""A trace against a fleet in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from app.policy.transfer import TransferKind
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer, SimLoss
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.client import FailureKind, Outcome
from loadtest.traces import BIN_MS, Session, Trace, TraceRequest

DRIFT_S = 60.0
"""Seconds from one random shift of arrivals to the next; between them it changes evenly, so that
what arrives together stays together."""
FAILURES = {
    SimLoss.FULL: FailureKind.FULL,
    SimLoss.NO_WORKERS: FailureKind.UNAVAILABLE,
}


class TracePrompts:
    """A trace's requests as the engines take them; kept, because hashing them takes a while."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._made: dict[int, SimRequest] = {}

    def of(self, asked: TraceRequest) -> SimRequest:
        made = self._made.get(asked.index)
        if made is None:
            request = SimRequest.from_tokens(
                str(asked.index), asked.prompt(), asked.output_tokens, block_size=self.block_size
            )
            made = self._made[asked.index] = replace(request, priority=asked.priority)
        return made


class Simulation:
    """One policy against one trace. Call `run` once only."""

    def __init__(self, policy: str, setting: Setting, prompts: TracePrompts | None = None) -> None:
        self.fleet = SimFleet(policy, setting)
        self.outcomes: list[Outcome] = []
        self.kinds: Counter[TransferKind] = Counter()
        self.on_answer: Callable[[SimAnswer], None] | None = None
        self._prompts = prompts or TracePrompts(setting.block_size)

    def run(self, trace: Trace) -> list[Outcome]:
        """Outcomes in order of arrival; times in engine seconds."""
        knots_s = np.arange(0.0, trace.sessions[-1].start_s + 2 * DRIFT_S, DRIFT_S)
        moved = self.fleet.setting.seed != 0
        shifts_s = moved * self.fleet.rng.uniform(0.0, BIN_MS / 1000, len(knots_s))
        starts_s = [session.start_s for session in trace.sessions]
        late_s = np.interp(starts_s, knots_s, shifts_s)
        for session, start_s in zip(trace.sessions, (starts_s + late_s).tolist(), strict=True):
            self._arrive_at(session, 0, start_s + session.turns[0].think_s)
        self.fleet.run()
        return sorted(self.outcomes, key=lambda outcome: outcome.arrival_s)

    def _arrive_at(self, session: Session, turn: int, when_s: float) -> None:
        self.fleet.at(when_s, lambda _: self._arrive(session, turn))

    def _arrive(self, session: Session, turn: int) -> None:
        request = self._prompts.of(session.turns[turn])
        if not self.fleet.setting.priorities:
            request = replace(request, priority="normal")
        self.fleet.ask(request, partial(self._end, session, turn))

    def _end(self, session: Session, turn: int, answer: SimAnswer, now_s: float) -> None:
        self.outcomes.append(outcome_of(answer))
        if answer.loss is None:
            self.kinds[answer.kind] += 1
        if self.on_answer is not None:
            self.on_answer(answer)
        turn += 1
        if turn < len(session.turns):
            self._arrive_at(session, turn, now_s + session.turns[turn].think_s)


def outcome_of(answer: SimAnswer) -> Outcome:
    return Outcome(
        request_id=answer.request.request_id,
        arrival_s=answer.arrival_s,
        sent_s=answer.arrival_s,
        prompt_tokens=answer.request.prompt_tokens,
        attempts=answer.attempts,
        failure=FAILURES[answer.loss] if answer.loss else None,
        error=answer.reason or None,
        worker=None if answer.worker is None else f"w{answer.worker}:0",
        first_token_s=answer.first_token_s,
        end_s=answer.end_s,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
    )
