"""A replay of the recorded decisions in virtual time, for a fleet of any size.

Workers begin with the caches that the decisions before those played have left them: one that would
join with none, and that of the one that would leave is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from xxhash import xxh3_64_intdigest

from app.core.chains import positions
from app.core.errors import KvrouteError
from app.core.roles import Role
from app.core.types import SequenceHash
from app.core.worker_report import Speed
from app.planner.rules.state import (
    FleetState,
    Latencies,
    PastRequest,
    Phase,
    Pools,
    Prediction,
    Rules,
    Slo,
    WorkerState,
    pool_of,
)
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.profiles import USUAL
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest

FILLS = 2
"""Times that prompts must fill a cache to leave nothing in it of those before them."""
GOLDEN = 0x9E3779B97F4A7C15
U64 = 2**64 - 1
MOST_GROWTH = 2.0
LEAST_S = 1.0
REMEMBERED = 4
"""Decisions that fill caches for each one that is played, which takes about four times as long."""


class ReplayTooLong(KvrouteError):
    """The replay of so many recorded decisions took too long."""

    def __init__(self, num_played: int) -> None:
        super().__init__(f"{num_played} decisions took too long to replay")
        self.num_played = num_played


class Replay:
    """Plays the recorded decisions of one state for any size of the fleet.

    policy: of the routers. setting: its workers and block size do not count. speed: of a worker,
    for the SLO. is_over: asked again and again whether no time is left. growth: factor on the rate
    of the decisions.
    """

    def __init__(
        self,
        state: FleetState,
        rules: Rules,
        policy: str,
        setting: Setting,
        speed: Speed,
        is_over: Callable[[], bool] = lambda: False,
        growth: float = 1.0,
    ) -> None:
        self._rules, self._policy = rules, policy
        self._setting = replace(setting, block_size=state.block_size)
        self._speed, self._is_over, self._growth = speed, is_over, growth
        self._has_roles = state.has_roles
        self._workers = [w for w in state.workers if w.phase is not Phase.DRAINING]
        self._usual = next((w.profile for w in self._workers if w.profile), USUAL)
        recent = state.recent
        begin_s = state.now_s - rules.window_s - rules.lead_s
        first = sum(asked.at_s < begin_s for asked in recent)
        if len(recent) - first > rules.window_requests:
            first = len(recent) - rules.window_requests
            begin_s = recent[first].at_s
        earliest = max(0, first - REMEMBERED * rules.window_requests)
        self._before, self._played = recent[earliest:first], recent[first:]
        self._origin_s = recent[earliest].at_s if recent else begin_s
        lead_s = min(rules.lead_s, (state.now_s - begin_s) / 2)
        self._judged_s = self._at_s(begin_s + lead_s)

    def predict(self, pools: Pools, victims: Mapping[Role, str]) -> Prediction:
        """Returns what such pools would have made of the decisions. victims: the worker that a
        smaller pool is without. Raises ReplayTooLong."""
        if not pools.size:
            return Prediction(0, 0, 1.0, 0.0, 0.0)
        crew: list[WorkerState] = []
        decode = Role.DECODE if self._has_roles else Role.BOTH
        for role, size in ((Role.PREFILL, pools.prefill), (decode, pools.decode)):
            members = [worker for worker in self._workers if worker.pool is pool_of(role)]
            victim = victims.get(pool_of(role)) if size < len(members) else None
            crew += self._crew(members, size, victim, role)
        return replace(self._play(crew), pools=pools if self._has_roles else None)

    def _crew(
        self, workers: Sequence[WorkerState], size: int, victim: str | None, role: Role
    ) -> list[WorkerState]:
        """Returns `size` workers: these without the victim, and then new ones of that role."""
        stay = [worker for worker in workers if worker.name != victim][:size]
        usual = next((worker.profile for worker in workers if worker.profile), self._usual)
        new = WorkerState("", Phase.PENDING, 0.0, profile=usual, role=role)
        return stay + [new] * (size - len(stay))

    def _play(self, crew: Sequence[WorkerState]) -> Prediction:
        setting = replace(
            self._setting,
            num_workers=len(crew),
            profiles=tuple(worker.profile or self._usual for worker in crew),
            roles=tuple(worker.role for worker in crew),
        )
        fleet = SimFleet(self._policy, setting)
        places = {worker.name: place for place, worker in enumerate(crew) if worker.name}
        for asked in self._remembered(fleet, places):
            self._check_time()
            fleet.run(until_s=self._at_s(asked.at_s))
            for holder in asked.holders:
                if holder in places:
                    fleet.warm(places[holder], asked.request)
        answers: list[SimAnswer] = []

        def keep(answer: SimAnswer, _: float) -> None:
            self._check_time()
            answers.append(answer)

        pools = {worker.metrics.kv_total_blocks for worker in fleet.workers}
        for number, asked in enumerate(self._played):
            self._check_time()
            output_tokens = _output_that_fits(asked.request, pools, self._setting.block_size)
            if output_tokens < 1:
                continue
            fleet.run(until_s=self._at_s(asked.at_s))
            # One that was decided again, as its worker had failed, has the same id.
            request = replace(asked.request, request_id=str(number), max_tokens=output_tokens)
            fleet.ask(request, keep)
        fleet.run()
        judged = [answer for answer in answers if answer.arrival_s >= self._judged_s]
        return summary(len(crew), judged, self._rules.slo, self._speed)

    def _at_s(self, at_s: float) -> float:
        return (at_s - self._origin_s) / self._growth

    def _check_time(self) -> None:
        if self._is_over():
            raise ReplayTooLong(len(self._played))

    def _remembered(self, fleet: SimFleet, places: Mapping[str, int]) -> Iterator[PastRequest]:
        """Yields the decisions before those played that have left a trace in the caches."""
        host_blocks = self._setting.host_pool_tokens // self._setting.block_size
        room = {
            name: FILLS * (fleet.workers[place].metrics.kv_total_blocks + host_blocks)
            for name, place in places.items()
        }
        first = len(self._before)
        for asked in reversed(self._before):
            if all(blocks <= 0 for blocks in room.values()):
                break
            first -= 1
            for holder in asked.holders:
                room[holder] = room.get(holder, 0) - len(asked.request.blocks)
        return (a for a in self._before[first:] if not places.keys().isdisjoint(a.holders))


def _output_that_fits(request: SimRequest, pools: Iterable[int], block_size: int) -> int:
    """Returns how long the answer can be on any worker that a router would choose, below 1 if some
    have no room. pools: blocks of the workers."""
    prompt_blocks = -(-request.prompt_tokens // block_size)
    room = min((pool for pool in pools if pool >= prompt_blocks), default=0)
    return min(request.max_tokens, room * block_size - request.prompt_tokens)


def meets(answer: SimAnswer, slo: Slo, speed: Speed) -> bool:
    if answer.first_token_s is None or answer.end_s is None:
        return False
    token_s = (answer.end_s - answer.first_token_s) / max(1, answer.output_tokens - 1)
    came = Latencies(answer.first_token_s - answer.arrival_s, token_s)
    return slo.is_met(came, answer.request.prompt_tokens, speed)


def summary(size: int, answers: Sequence[SimAnswer], slo: Slo, speed: Speed) -> Prediction:
    """Returns what answers come to; of none, all are within the SLO."""
    ttfts = [a.first_token_s - a.arrival_s for a in answers if a.first_token_s is not None]
    return Prediction(
        size=size,
        requests=len(answers),
        attainment=sum(meets(a, slo, speed) for a in answers) / len(answers) if answers else 1.0,
        ttft_p99_s=float(np.percentile(ttfts, 99)) if ttfts else 0.0,
        hit_rate=sum(answer.cached_tokens for answer in answers)
        / max(1, sum(answer.request.prompt_tokens for answer in answers)),
    )


def recorded_request(
    request_id: str,
    recorded: Sequence[SequenceHash],
    *,
    prompt_tokens: int,
    output_tokens: int,
    block_size: int,
    merged: int = 1,
) -> SimRequest:
    """Returns a request like the recorded one, in blocks of `merged` of its own. recorded: some of
    its blocks.

    A block that was not recorded is made from the next one that was, so that prompts share here
    what they share, up to the last recorded block of it. Those behind the last are its own.
    """
    full_blocks = prompt_tokens // block_size
    chain: list[SequenceHash] = []
    own = xxh3_64_intdigest(request_id.encode())
    known = iter([*zip(positions(full_blocks), recorded, strict=True), (full_blocks + 1, own)])
    end, block = next(known)
    for place in range(merged, full_blocks + 1, merged):
        while end < place:
            end, block = next(known)
        chain.append(SequenceHash(block if end == place else block ^ (place * GOLDEN & U64)))
    tail = (0,) * (prompt_tokens - len(chain) * merged * block_size)
    return SimRequest(request_id, tuple(chain), tail, prompt_tokens, output_tokens)


def growth(state: FleetState, rules: Rules) -> float:
    """Returns the rate of requests once a worker that is asked for now is live, over the mean rate
    of those replayed; at least 1.

    If the rate changes evenly, relative to its mean by r a second, requests of the last T seconds
    lie r T² / 12 behind their middle on average; of N of them that is exact to T / sqrt(12 N). As
    much as may be chance is taken off: few requests foretell nothing. T begins with the first
    request of the window: that there was none before says that traffic began, not that it grows.
    """
    begin_s = state.now_s - rules.window_s - rules.lead_s
    at_s = [asked.at_s for asked in state.recent if asked.at_s >= begin_s]
    if len(at_s) < 2:
        return 1.0
    first_s, *later_s = sorted(at_s)
    past_s = max(state.now_s - first_s, LEAST_S)
    behind_s = fmean(later_s) - first_s - past_s / 2 - past_s / math.sqrt(12 * len(later_s))
    rise = 12 * max(0.0, behind_s) / past_s**2
    return min(MOST_GROWTH, 1.0 + rise * (past_s / 2 + state.startup_s))
