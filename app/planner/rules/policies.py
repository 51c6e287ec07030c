"""Policies: how large a fleet should be. Each is a pure function of what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Generic, TypeVar

from app.core.settings.planner import ScalingPolicy
from app.core.worker_report import DEFAULT_SPEED
from app.planner.rules.forecast import growth
from app.planner.rules.sleep import reason_to_sleep, rules_of_serving
from app.planner.rules.state import (
    FleetState,
    Phase,
    Pools,
    Prediction,
    Proposal,
    Reason,
    Rules,
    Slo,
    WorkerLoad,
    WorkerState,
)
from app.planner.rules.victims import least_loss_s

Predict = Callable[[int], Prediction]
"""What a fleet of this size would have made of the recorded decisions. One less is one without
the worker that would leave."""
AIM_GAIN = 2.0
AIM_ROOM = 0.4
Victim = Callable[[FleetState], str]


Size = TypeVar("Size", int, Pools)


@dataclass(frozen=True, slots=True)
class Advice(Generic[Size]):
    """What a policy wants, within the rules or not: so many workers, or so many in each pool."""

    desired: Size
    reason: Reason
    inputs: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[Prediction, ...] = ()


Policy = Callable[[FleetState, Rules, Predict], Advice[int]]


def propose(
    name: str, state: FleetState, rules: Rules, predict: Predict, victim: Victim
) -> Proposal:
    """What the policy `name`, a key of POLICIES, proposes within the rules.

    At most one worker leaves at a time.
    """
    if (sleeps := reason_to_sleep(state, rules)) is not None:
        wish = Advice(max(0, state.size - 1), sleeps)
    else:
        rules = rules_of_serving(rules)
        wish = _bounded(_wish(name, state, rules, predict), state, rules)
    desired = max(wish.desired, state.size - 1)
    return Proposal(
        at_s=state.now_s,
        policy=name,
        size=state.size,
        desired=desired,
        reason=wish.reason,
        victim=victim(state) if desired < state.size and state.those(Phase.LIVE) else None,
        inputs=wish.inputs,
        candidates=wish.candidates,
    )


def _wish(name: str, state: FleetState, rules: Rules, predict: Predict) -> Advice[int]:
    size = state.size
    if size < rules.min_workers:
        return Advice(rules.min_workers, below_minimum(state))
    if size > rules.max_workers:
        return Advice(rules.max_workers, Reason.OVER_BUDGET)
    if (reason := held_by(state)) is not None:
        return Advice(size, reason)
    return POLICIES[name](state, rules, predict)


def below_minimum(state: FleetState) -> Reason:
    return Reason.WOKEN if state.somebody_waits and not state.size else Reason.BELOW_MINIMUM


def held_by(state: FleetState) -> Reason | None:
    """Why no policy is asked; None: one is."""
    if any(worker.load is None for worker in state.those(Phase.LIVE)):
        return Reason.NO_METRICS
    if state.proposals and state.size not in (
        state.proposals[-1].size,
        state.proposals[-1].desired,
    ):
        return Reason.FLEET_CHANGED
    return None


def _bounded(wish: Advice[int], state: FleetState, rules: Rules) -> Advice[int]:
    if wish.desired > rules.max_workers:
        reason = wish.reason if state.size < rules.max_workers else Reason.AT_BUDGET
        return Advice(rules.max_workers, reason, wish.inputs, wish.candidates)
    if wish.desired < rules.min_workers:
        reason = wish.reason if state.size > rules.min_workers else Reason.AT_MINIMUM
        return Advice(rules.min_workers, reason, wish.inputs, wish.candidates)
    return wish


def _loads(workers: Iterable[WorkerState]) -> Iterator[WorkerLoad]:
    return (worker.load for worker in workers if worker.load is not None)


def prefill_queue(workers: Iterable[WorkerState]) -> float:
    """Mean of the workers; of none it is 0: who has none has no load."""
    return fmean([load.prefill_queue for load in _loads(workers)] or [0.0])


def kv_load(workers: Iterable[WorkerState], rules: Rules) -> float:
    """Mean of the workers' KV use, and of what their waiting requests will take; of none it is
    0."""
    per_waiting = rules.kv_load_per_waiting
    return fmean([load.kv_usage + per_waiting * load.waiting for load in _loads(workers)] or [0.0])


def in_grace(workers: Iterable[WorkerState], state: FleetState, rules: Rules) -> bool:
    """Whether one of the live ones among `workers` has joined a short time ago."""
    since_s = state.now_s - rules.grace_intervals * rules.interval_s
    return any(w.since_s > since_s for w in workers if w.phase is Phase.LIVE)


def threshold(state: FleetState, rules: Rules, _: Predict) -> Advice[int]:
    """One more if the queue of prefills per worker or the KV load is high, one less if both are
    low; nothing while a change is under way.

    After NVIDIA Dynamo 0.2, docs/architecture/load_planner.md. There, workers that prefill and
    workers that decode are two pools, each with its own signal, as in app.planner.rules.pools; here
    every worker does both.
    """
    live = state.those(Phase.LIVE)
    queue, kv = prefill_queue(live), kv_load(live, rules)
    inputs = {"prefill_queue": queue, "kv_load": kv}
    size = state.size
    if state.is_changing:
        return Advice(size, Reason.CHANGE_UNDER_WAY, inputs)
    if queue < rules.prefill_queue_down and kv < rules.kv_load_down:
        if in_grace(state.workers, state, rules):
            return Advice(size, Reason.GRACE, inputs)
        return Advice(size - 1, Reason.LOW_LOAD, inputs)
    if queue > rules.prefill_queue_up:
        return Advice(size + 1, Reason.PREFILL_QUEUE, inputs)
    if kv > rules.kv_load_up:
        return Advice(size + 1, Reason.KV_LOAD, inputs)
    return Advice(size, Reason.ENOUGH, inputs)


def waiting(state: FleetState, rules: Rules, _: Predict) -> Advice[int]:
    """A worker for every five waiting requests; down only to what the cool-down has needed.

    After the KEDA examples of vLLM's production stack, which scale on num_requests_waiting.
    """
    total = sum(load.waiting for load in _loads(state.those(Phase.LIVE)))
    needed = ceil(total / rules.waiting_per_worker)
    return _needed(state, needed, {"waiting": total}, Reason.WAITING, rules.cool_down_s)


def ongoing(state: FleetState, rules: Rules, _: Predict) -> Advice[int]:
    """A worker for so many requests in flight; down only to what ten minutes have needed.

    After Ray Serve's autoscaling: target_ongoing_requests, downscale_delay_s.
    """
    total = sum(load.requests for load in _loads(state.those(Phase.LIVE)))
    needed = ceil(total / rules.ongoing_per_worker)
    return _needed(state, needed, {"ongoing": total}, Reason.ONGOING, rules.ongoing_delay_s)


def _needed(
    state: FleetState, needed: int, inputs: dict[str, float], reason: Reason, cool_down_s: float
) -> Advice[int]:
    """Up at once, down to the most that was needed within the cool-down."""
    since_s = state.now_s - cool_down_s
    lately = [int(p.inputs.get("needed", 0)) for p in state.proposals if p.at_s > since_s]
    inputs = inputs | {"needed": float(needed)}
    if needed >= state.size:
        return Advice(needed, reason if needed > state.size else Reason.ENOUGH, inputs)
    if state.is_changing:
        return Advice(state.size, Reason.CHANGE_UNDER_WAY, inputs)
    if not lately or max(lately) >= state.size or state.proposals[0].at_s > since_s:
        return Advice(state.size, Reason.COOL_DOWN, inputs)
    return Advice(max(needed, *lately), reason, inputs)


def slo(state: FleetState, rules: Rules, predict: Predict) -> Advice[int]:
    """The smallest fleet that would have kept the SLO over the recorded decisions.

    Up at once, by up to two workers; down to what was needed at every proposal for as many seconds
    as it costs of a worker's time to take a step back: a start, and what the cache of the one that
    leaves is worth. When it will be needed again is not known. Who keeps it until it has cost as
    much as its return would pays at most twice what who knew would pay: the ski rental problem.
    """
    size = state.size
    now = predict(size)
    inputs = judged(state, rules, now)
    target = inputs["aim"]
    if now.attainment < target:
        more = predict(size + 1)
        candidates: tuple[Prediction, ...] = (now, more)
        if more.attainment < target:
            candidates += (predict(size + 2),)
        inputs["needed"] = float(candidates[-1].size)
        return Advice(candidates[-1].size, Reason.SLO_MISSED, inputs, candidates)
    if size <= rules.min_workers:
        return Advice(size, Reason.AT_MINIMUM, inputs, (now,))
    fewer = _fewer(size, rules, predict, target)
    needed = next((p.size for p in reversed(fewer) if p.attainment >= target), size)
    inputs["needed"], inputs["change_s"] = float(needed), change_s(state, rules)
    desired, reason = kept(state, rules, needed, inputs["change_s"])
    return Advice(desired, reason, inputs, (*reversed(fewer), now))


def judged(state: FleetState, rules: Rules, now: Prediction) -> dict[str, float]:
    """What is known of the SLO. now: of the fleet as it is. `aim`: the share that predictions are
    to reach."""
    known, share = attained(state, rules.slo, state.now_s - rules.attained_s)
    return {
        "requests": float(now.requests),
        "attainment": now.attainment,
        "known": float(known),
        "attained": share,
        "aim": _aim(rules.slo.target, share),
        "growth": growth(state, rules),
    }


def change_s(state: FleetState, rules: Rules) -> float:
    """Seconds of a worker that it costs to take a step down back."""
    return min(state.startup_s + least_loss_s(state), rules.longest_kept_s)


def _fewer(size: int, rules: Rules, predict: Predict, target: float) -> list[Prediction]:
    """For one worker less, two less, four less ..., until that would have been too few."""
    predictions: list[Prediction] = []
    less = 1
    while size - less >= rules.min_workers and (
        not predictions or predictions[-1].attainment >= target
    ):
        predictions.append(predict(size - less))
        less *= 2
    return predictions


def kept(state: FleetState, rules: Rules, needed: int, cool_down_s: float) -> tuple[int, Reason]:
    """The size to shrink to: the most that was needed in the last `cool_down_s`."""
    size, since_s = state.size, state.now_s - cool_down_s
    if needed >= size:
        return size, Reason.ENOUGH
    if state.is_changing:
        return size, Reason.CHANGE_UNDER_WAY
    if in_grace(state.workers, state, rules):
        return size, Reason.GRACE
    lately = [
        int(p.inputs["needed"])
        for p in state.proposals
        if p.at_s > since_s and "needed" in p.inputs
    ]
    most = max(needed, *lately) if lately else needed
    if not state.proposals or state.proposals[0].at_s > since_s or most >= size:
        return size, Reason.COOL_DOWN
    return most, Reason.SLO_MET_BY_FEWER


def attained(state: FleetState, slo: Slo, since_s: float) -> tuple[int, float]:
    """Of how many requests it is known what came of them, and the share within the SLO; 1.0 of
    none."""
    speeds = {worker.name: worker.speed for worker in state.workers}
    met = [
        slo.is_met(asked.came, asked.request.prompt_tokens, speeds.get(asked.worker, DEFAULT_SPEED))
        for asked in state.recent
        if asked.came is not None and asked.at_s >= since_s
    ]
    return len(met), (sum(met) / len(met) if met else 1.0)


def _aim(target: float, share: float) -> float:
    """The share within the SLO that predictions are to reach, so that `target` comes of them: above
    it by AIM_GAIN times what was missing lately, and by at most AIM_ROOM of what there is: nobody
    foresees bursts, and as many workers as all of it would take stand idle after one."""
    return target + min(AIM_GAIN * max(0.0, target - share), AIM_ROOM * (1.0 - target))


POLICIES: Mapping[str, Policy] = {
    ScalingPolicy.SLO: slo,
    ScalingPolicy.THRESHOLD: threshold,
    ScalingPolicy.WAITING: waiting,
    ScalingPolicy.ONGOING: ongoing,
}
