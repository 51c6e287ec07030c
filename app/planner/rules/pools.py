"""The same policies where workers have roles: one pool prefills, the other decodes, and both share
one budget. Each pool keeps a worker, and one thing changes at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from app.core.errors import KvrouteError
from app.core.roles import Role
from app.core.settings.planner import ScalingPolicy
from app.planner.rules.policies import (
    Advice,
    Victim,
    below_minimum,
    change_s,
    held_by,
    in_grace,
    judged,
    kept,
    kv_load,
    prefill_queue,
)
from app.planner.rules.sleep import reason_to_sleep
from app.planner.rules.state import (
    FleetState,
    Pools,
    Prediction,
    Proposal,
    Reason,
    Rules,
    WorkerState,
)

PredictPools = Callable[[Pools], Prediction]
"""What such pools would have made of the recorded decisions. With one worker less, a pool is
without the one that would leave."""
LEAST_GAIN = 0.01
"""By so much of all requests a change of role must help where it does not reach the SLO."""


class RolesNotPlanned(KvrouteError):
    """The policy knows nothing of roles, and some workers have one."""


PoolPolicy = Callable[[FleetState, Rules, PredictPools], Advice[Pools]]


def propose_pools(
    name: str, state: FleetState, rules: Rules, predict: PredictPools, victim: Victim
) -> Proposal:
    """What the policy `name` proposes for both pools. Raises RolesNotPlanned.

    Where one worker leaves and another starts in the other pool, the first makes room for the
    second.
    """
    wish = _wish(name, state, rules, predict)
    now = state.pools
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
        candidates=wish.candidates,
        pools=now,
        desired_pools=wish.desired,
    )


def _wish(name: str, state: FleetState, rules: Rules, predict: PredictPools) -> Advice[Pools]:
    now = state.pools
    if (sleeps := reason_to_sleep(state, rules)) is not None:
        fewer = now.but(prefill=-1) if now.prefill else now.but(decode=-min(1, now.decode))
        return Advice(fewer, sleeps)
    if name not in POOL_POLICIES:
        raise RolesNotPlanned(
            f"scaling_policy {name} knows no roles, which workers here have: use "
            + " or ".join(POOL_POLICIES)
        )
    least = Pools(max(1, now.prefill), max(1, now.decode))
    least = least.but(decode=max(0, rules.min_workers - least.size))
    if least != now:
        return Advice(least, below_minimum(state))
    if now.size > max(2, rules.max_workers):
        fewer = now.but(prefill=-1) if now.prefill > now.decode else now.but(decode=-1)
        return Advice(fewer, Reason.OVER_BUDGET)
    reason = held_by(state)
    if reason is None and state.proposals and not _is_as_proposed(now, state.proposals[-1]):
        reason = Reason.FLEET_CHANGED
    if reason is not None:
        return Advice(now, reason)
    wish = POOL_POLICIES[name](state, rules, predict)
    if wish.desired.size > max(now.size, rules.max_workers):
        return replace(wish, desired=now, reason=Reason.AT_BUDGET)
    return wish


def _is_as_proposed(now: Pools, last: Proposal) -> bool:
    return last.pools is None or now in (last.pools, last.desired_pools)


def threshold(state: FleetState, rules: Rules, _: PredictPools) -> Advice[Pools]:
    """A worker that prefills by the queue of prefills for each, one that decodes by the KV load:
    nothing while a change is under way. Up first, and where both are short, one that decodes: who
    waits for KV there cannot be helped by prefills. Down if none is short, or to free budget.

    After NVIDIA Dynamo 0.2, docs/architecture/load_planner.md.
    """
    now, decoding = state.pools, state.live_in(Role.DECODE)
    queue, kv = prefill_queue(state.live_in(Role.PREFILL)), kv_load(decoding, rules)
    inputs = {"prefill_queue": queue, "kv_load": kv}
    if state.is_changing:
        return Advice(now, Reason.CHANGE_UNDER_WAY, inputs)
    needs_prefill, needs_decode = queue > rules.prefill_queue_up, kv > rules.kv_load_up
    is_short = needs_prefill or needs_decode
    has_budget = now.size < rules.max_workers
    if is_short and has_budget:
        if needs_decode:
            return Advice(now.but(decode=1), Reason.KV_LOAD, inputs)
        return Advice(now.but(prefill=1), Reason.PREFILL_QUEUE, inputs)
    may_shrink = now.size > max(2, rules.min_workers)
    has_spare_decode = may_shrink and now.decode > 1 and kv < rules.kv_load_down
    is_kept = has_spare_decode and in_grace(decoding, state, rules)
    if may_shrink and now.prefill > 1 and queue < rules.prefill_queue_down:
        return Advice(now.but(prefill=-1), Reason.LOW_LOAD, inputs)
    if has_spare_decode and not is_kept:
        return Advice(now.but(decode=-1), Reason.LOW_LOAD, inputs)
    if is_short:
        return Advice(now, Reason.AT_BUDGET, inputs)
    return Advice(now, Reason.GRACE if is_kept else Reason.ENOUGH, inputs)


def slo(state: FleetState, rules: Rules, predict: PredictPools) -> Advice[Pools]:
    """One worker more, one less, or one in the other pool, by the recorded decisions.

    If the SLO is missed, a change of role that keeps it costs least; else one more where that helps
    most. Down as without roles, where that costs least.
    """
    now = predict(state.pools)
    inputs = judged(state, rules, now)
    if now.attainment < inputs["aim"]:
        return _better(state, rules, predict, now, inputs)
    fewer = [predict(less) for less in _one_less(state.pools, rules)]
    enough = [one for one in fewer if one.attainment >= inputs["aim"]]
    needed = state.size - bool(enough)
    inputs["needed"], inputs["change_s"] = float(needed), change_s(state, rules)
    desired, reason = kept(state, rules, needed, inputs["change_s"])
    candidates = (*fewer, now)
    if desired < state.size:
        return _wanted(_best(enough), reason, inputs, candidates)
    if not fewer:
        reason = Reason.AT_MINIMUM
    return Advice(state.pools, reason, inputs, candidates)


def _better(
    state: FleetState,
    rules: Rules,
    predict: PredictPools,
    now: Prediction,
    inputs: dict[str, float],
) -> Advice[Pools]:
    """For a fleet that misses the SLO."""
    pools = state.pools
    inputs["needed"] = float(state.size)
    moved: list[Prediction] = []
    if not state.is_changing and not in_grace(state.workers, state, rules):
        moved = [predict(one) for one in _other_roles(pools)]
    candidates = (now, *moved)
    if moved and _best(moved).attainment >= inputs["aim"]:
        return _wanted(_best(moved), Reason.OTHER_ROLE, inputs, candidates)
    if state.size < rules.max_workers:
        more = [predict(pools.but(prefill=1)), predict(pools.but(decode=1))]
        inputs["needed"] += 1.0
        return _wanted(_best(more), Reason.SLO_MISSED, inputs, (*candidates, *more))
    if moved and _best(moved).attainment >= now.attainment + LEAST_GAIN:
        return _wanted(_best(moved), Reason.OTHER_ROLE, inputs, candidates)
    return Advice(pools, Reason.AT_BUDGET, inputs, candidates)


def _one_less(pools: Pools, rules: Rules) -> list[Pools]:
    if pools.size <= max(2, rules.min_workers):
        return []
    less = (pools.but(prefill=-1), pools.but(decode=-1))
    return [one for one in less if one.prefill and one.decode]


def _other_roles(pools: Pools) -> list[Pools]:
    moves = (pools.but(prefill=-1, decode=1), pools.but(prefill=1, decode=-1))
    return [one for one in moves if one.prefill and one.decode]


def _best(predictions: Sequence[Prediction]) -> Prediction:
    return min(predictions, key=lambda one: (-one.attainment, one.ttft_p99_s))


def _wanted(
    one: Prediction, reason: Reason, inputs: dict[str, float], candidates: tuple[Prediction, ...]
) -> Advice[Pools]:
    assert one.pools is not None, "predicted for pools"
    return Advice(one.pools, reason, inputs, candidates)


POOL_POLICIES: Mapping[str, PoolPolicy] = {
    ScalingPolicy.SLO: slo,
    ScalingPolicy.THRESHOLD: threshold,
}
