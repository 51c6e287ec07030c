"""Policies: how large a fleet should be. Each is a pure function of what is known of it.

Workers that only prefill are one pool, all others another; without roles there is that one alone.
Pools share one budget, each keeps a worker, and one worker leaves at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from app.core.roles import Role
from app.core.settings.planner import ScalingPolicy
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.planner.rules.replay import growth
from app.planner.rules.state import (
    FleetState,
    PastRequest,
    Phase,
    Pools,
    Prediction,
    Proposal,
    Reason,
    Rules,
    Slo,
    WorkerLoad,
    WorkerState,
    prefill_s,
)

Predict = Callable[[Pools], Prediction]
"""Returns what pools would have made of the recorded decisions. A pool with one worker less is
without the one that would leave."""
AIM_GAIN = 2.0
"""Factor on the share that was missing lately, by which predictions are to exceed the target."""
AIM_ROOM = 0.4
"""Share of the room above the target to aim at, at most: nobody foresees bursts, and workers for
all of one stand idle after it."""
LEAST_GAIN = 0.01
"""Share of all requests that a change of role must help where it does not reach the SLO."""
Victim = Callable[[FleetState], str]


@dataclass(frozen=True, slots=True)
class Advice:
    """The number of workers in each pool that a policy wants, and why."""

    desired: Pools
    reason: Reason
    inputs: Mapping[str, float] = field(default_factory=dict)
    candidates: Sequence[Prediction] = ()


Policy = Callable[[FleetState, Rules, Predict], Advice]


def propose(
    name: str, state: FleetState, rules: Rules, predict: Predict, victim: Victim
) -> Proposal:
    """Returns what a policy proposes within the rules. name: a key of POLICIES.

    Where one worker leaves and another starts in the other pool, the first makes room for the
    second.
    """
    wish, now = _wish(name, state, rules, predict), state.pools
    leaving: list[WorkerState] = []
    if wish.desired.prefill < now.prefill:
        leaving = state.live_in(Role.PREFILL)
    elif wish.desired.decode < now.decode:
        leaving = state.live_in(Role.DECODE)
    return Proposal(
        at_s=state.now_s,
        policy=name,
        size=now.size,
        desired=wish.desired.size,
        reason=wish.reason,
        victim=victim(replace(state, workers=leaving)) if leaving else None,
        inputs=wish.inputs,
        candidates=tuple(wish.candidates),
        pools=now if state.has_roles else None,
        desired_pools=wish.desired if state.has_roles else None,
    )


def _wish(name: str, state: FleetState, rules: Rules, predict: Predict) -> Advice:
    now = state.pools
    if (sleeps := _reason_to_sleep(state, rules)) is not None:
        fewer = now.but(prefill=-1) if now.prefill else now.but(decode=-min(1, now.decode))
        return Advice(fewer, sleeps)
    least = Pools(max(int(state.has_roles), now.prefill), max(1, now.decode))
    least = least.but(decode=max(0, rules.min_workers - least.size))
    if least != now:
        woken = state.somebody_waits and not now.size
        return Advice(least, Reason.WOKEN if woken else Reason.BELOW_MINIMUM)
    if now.size > max(1 + state.has_roles, rules.max_workers):
        fewer = now.but(prefill=-1) if now.prefill > now.decode else now.but(decode=-1)
        return Advice(fewer, Reason.OVER_BUDGET)
    if any(worker.load is None for worker in state.those(Phase.LIVE)):
        return Advice(now, Reason.NO_METRICS)
    if state.proposals and now not in (state.proposals[-1].before, state.proposals[-1].after):
        return Advice(now, Reason.FLEET_CHANGED)
    return POLICIES[name](state, rules, predict)


def _reason_to_sleep(state: FleetState, rules: Rules) -> Reason | None:
    """Returns ASLEEP, IDLE if one more worker is to leave, or None if the fleet needs workers."""
    if rules.min_workers or not state.may_sleep or state.somebody_waits:
        return None
    if not state.size:
        return Reason.ASLEEP
    return Reason.IDLE if _is_idle(state, rules) else None


def _is_idle(state: FleetState, rules: Rules) -> bool:
    """Whether nothing was asked for so long, and nothing is under way. A new worker counts as asked
    for."""
    since_s = state.now_s - rules.idle_s
    if state.is_changing or any(asked.at_s > since_s for asked in state.recent):
        return False
    return all(
        worker.since_s <= since_s and worker.load is not None and not worker.load.requests
        for worker in state.those(Phase.LIVE)
    )


def _loads(workers: Iterable[WorkerState]) -> Iterator[WorkerLoad]:
    return (worker.load for worker in workers if worker.load is not None)


def in_grace(workers: Iterable[WorkerState], state: FleetState, rules: Rules) -> bool:
    """Whether a live one of `workers` has joined a short time ago."""
    since_s = state.now_s - rules.grace_intervals * rules.interval_s
    return any(w.since_s > since_s for w in workers if w.phase is Phase.LIVE)


def _one_more(pools: Pools, state: FleetState) -> list[Pools]:
    more = [pools.but(prefill=1), pools.but(decode=1)]
    return more if state.has_roles else more[1:]


def _fewer(pools: Pools, state: FleetState, rules: Rules, by: int = 1) -> list[Pools]:
    """Returns the pools with one of them smaller, as far as each keeps a worker."""
    if pools.size - by < rules.min_workers:
        return []
    fewer = (pools.but(prefill=-by), pools.but(decode=-by))
    return [one for one in fewer if one.prefill >= state.has_roles and one.decode > 0]


def threshold(state: FleetState, rules: Rules, _: Predict) -> Advice:
    """Adds a worker where the queue of prefills or the KV load is high, takes one away where both
    are low, and does nothing while a change is under way.

    With roles, the queue is that of the workers that prefill, and the KV load that of those that
    decode. If both are high, a worker that decodes is added: prefills do not help requests that
    wait for KV there. Without budget the pool with too many makes room. After NVIDIA Dynamo 0.2,
    docs/architecture/load_planner.md.
    """
    now, decoding = state.pools, state.live_in(Role.DECODE)
    prefilling = state.live_in(Role.PREFILL) if state.has_roles else decoding
    queue = fmean([load.prefill_queue for load in _loads(prefilling)] or [0.0])
    # And what waiting requests will take.
    kv_loads = [w.kv_usage + rules.kv_load_per_waiting * w.waiting for w in _loads(decoding)]
    kv = fmean(kv_loads or [0.0])
    inputs = {"prefill_queue": queue, "kv_load": kv}
    if state.is_changing:
        return Advice(now, Reason.CHANGE_UNDER_WAY, inputs)
    more = _one_more(now, state)
    is_short = kv > rules.kv_load_up or queue > rules.prefill_queue_up
    if is_short and now.size < rules.max_workers:
        if kv > rules.kv_load_up:
            return Advice(more[-1], Reason.KV_LOAD, inputs)
        return Advice(more[0], Reason.PREFILL_QUEUE, inputs)
    is_queue_low, is_kv_low = queue < rules.prefill_queue_down, kv < rules.kv_load_down
    if not state.has_roles:
        is_queue_low = is_kv_low = is_queue_low and is_kv_low
    fewer = _fewer(now, state, rules)
    spare = [one for one in fewer if (is_queue_low if one.prefill < now.prefill else is_kv_low)]
    for one in spare:
        workers = prefilling if one.prefill < now.prefill else decoding
        if not in_grace(workers, state, rules):
            return Advice(one, Reason.LOW_LOAD, inputs)
    if is_short:
        return Advice(now, Reason.AT_BUDGET, inputs)
    if spare:
        return Advice(now, Reason.GRACE, inputs)
    is_least = is_queue_low and is_kv_low and not fewer
    return Advice(now, Reason.AT_MINIMUM if is_least else Reason.ENOUGH, inputs)


def slo(state: FleetState, rules: Rules, predict: Predict) -> Advice:
    """Wants the smallest fleet that would have kept the SLO over the recorded decisions.

    If the SLO is missed, a change of role that keeps it costs least. Else the fleet grows at once,
    by up to two workers, where they help most. It shrinks, where that costs least, to what every
    proposal needed for as long as a step back would cost of a worker's time: a start, and what the
    cache of the worker that leaves is worth. Keeping a worker until it has cost as much as its
    return costs at most twice what would be best: the ski rental problem.
    """
    now = predict(state.pools)
    inputs = _judged(state, rules, now)
    if now.attainment < inputs["aim"]:
        return _better(state, rules, predict, now, inputs)
    candidates, enough = [now], [now]
    # One worker less, two less, four less, until that would have been too few.
    while fewer := _fewer(enough[-1].fleet, state, rules, by=max(1, state.size - enough[-1].size)):
        predicted = [predict(one) for one in fewer]
        candidates = [*predicted, *candidates]
        if _best(predicted).attainment < inputs["aim"]:
            break
        enough.append(_best(predicted))
    inputs["needed"] = float(enough[-1].size)
    inputs["change_s"] = min(state.startup_s + least_loss_s(state), rules.longest_kept_s)
    if len(candidates) == 1:
        return Advice(state.pools, Reason.AT_MINIMUM, inputs, candidates)
    if (reason := _kept_by(state, rules, inputs)) is not None:
        return Advice(state.pools, reason, inputs, candidates)
    return Advice(enough[1].fleet, Reason.SLO_MET_BY_FEWER, inputs, candidates)


def _better(
    state: FleetState,
    rules: Rules,
    predict: Predict,
    now: Prediction,
    inputs: dict[str, float],
) -> Advice:
    """Returns the advice for a fleet that misses the SLO."""
    aim, inputs["needed"] = inputs["aim"], float(state.size)
    candidates, moved = [now], None
    if not state.is_changing and not in_grace(state.workers, state, rules):
        pools = state.pools
        moves = [pools.but(prefill=by, decode=-by) for by in (-1, 1)] if pools.prefill else []
        candidates += [predict(one) for one in moves if one.prefill and one.decode]
        moved = _best(candidates[1:]) if candidates[1:] else None
    if moved is not None and moved.attainment >= aim:
        return Advice(moved.fleet, Reason.OTHER_ROLE, inputs, candidates)
    best = now
    while best.size < min(state.size + 2, rules.max_workers) and best.attainment < aim:
        more = [predict(one) for one in _one_more(best.fleet, state)]
        candidates, best = [*candidates, *more], _best(more)
    if best is not now:
        inputs["needed"] = float(best.size)
        return Advice(best.fleet, Reason.SLO_MISSED, inputs, candidates)
    if moved is not None and moved.attainment >= now.attainment + LEAST_GAIN:
        return Advice(moved.fleet, Reason.OTHER_ROLE, inputs, candidates)
    return Advice(state.pools, Reason.AT_BUDGET, inputs, candidates)


def _best(predictions: Sequence[Prediction]) -> Prediction:
    return min(predictions, key=lambda one: (-one.attainment, one.ttft_p99_s))


def _judged(state: FleetState, rules: Rules, now: Prediction) -> dict[str, float]:
    """Returns what is known of the SLO. now: of the fleet as it is. `aim`: the share that
    predictions are to reach."""
    known, share = attained(state, rules.slo, state.now_s - rules.attained_s)
    target = rules.slo.target
    return {
        "requests": float(now.requests),
        "attainment": now.attainment,
        "known": float(known),
        "attained": share,
        "aim": target + min(AIM_GAIN * max(0.0, target - share), AIM_ROOM * (1.0 - target)),
        "growth": growth(state, rules),
    }


def _kept_by(state: FleetState, rules: Rules, inputs: Mapping[str, float]) -> Reason | None:
    """Returns why no worker leaves, or None if fewer were needed for the last `change_s`."""
    since_s = state.now_s - inputs["change_s"]
    if inputs["needed"] >= state.size:
        return Reason.ENOUGH
    if state.is_changing:
        return Reason.CHANGE_UNDER_WAY
    if in_grace(state.workers, state, rules):
        return Reason.GRACE
    lately = [p.inputs.get("needed", 0.0) for p in state.proposals if p.at_s > since_s]
    is_new = len(lately) == len(state.proposals)
    return Reason.COOL_DOWN if is_new or max([0.0, *lately]) >= state.size else None


def attained(state: FleetState, slo: Slo, since_s: float) -> tuple[int, float]:
    """Returns how many requests are known to have ended, and their share within the SLO; 1.0 of
    none."""
    speeds = {worker.name: worker.speed for worker in state.workers}
    met = [
        slo.is_met(asked.came, asked.request.prompt_tokens, speeds.get(asked.worker, DEFAULT_SPEED))
        for asked in state.recent
        if asked.came is not None and asked.at_s >= since_s
    ]
    return len(met), (sum(met) / len(met) if met else 1.0)


POLICIES: Mapping[str, Policy] = {ScalingPolicy.SLO: slo, ScalingPolicy.THRESHOLD: threshold}
Held = Mapping[str, int]
"""Leading blocks of one prompt that each worker holds now."""


def unique_values(
    recent: Sequence[PastRequest],
    held: Sequence[Held],
    *,
    now_s: float,
    half_life_s: float,
    block_size: int,
    speed: Speed,
) -> dict[str, float]:
    """Returns the seconds of prefill that recent prompts, asked again, would take longer without
    each worker.

    A prompt counts half for each `half_life_s` since it was asked. Only blocks count that some
    worker held then: they have been asked for again before. held: of each prompt. Workers whose
    loss would cost nothing are absent.
    """
    values: dict[str, float] = {}
    for asked, blocks in zip(recent, held, strict=True):
        best, second, owner = 0, 0, ""
        for worker, number in blocks.items():
            reused = min(number, asked.best_blocks)
            if reused > best:
                best, second, owner = reused, best, worker
            elif reused > second:
                second = reused
        if best > second:
            lost_s = prefill_s(second * block_size, best * block_size, speed)
            weight = 0.5 ** ((now_s - asked.at_s) / half_life_s)
            values[owner] = values.get(owner, 0.0) + weight * lost_s
    return values


def least_valued(state: FleetState) -> str:
    """Returns the live worker whose cache, and promised prefills, are worth least. There must be
    one."""
    return min(state.those(Phase.LIVE), key=_loss_s).name


def least_loss_s(state: FleetState) -> float:
    """Returns the seconds of prefill that losing that worker would cost, 0 if there is none."""
    return min(map(_loss_s, state.those(Phase.LIVE)), default=0.0)


def _loss_s(worker: WorkerState) -> float:
    return worker.unique_value_s + (worker.load.queue_s if worker.load is not None else 0.0)
