"""When the last worker of a fleet leaves, and when the first one comes back."""

from __future__ import annotations

from app.planner.rules.state import FleetState, Phase, Reason, Rules


def reason_to_sleep(state: FleetState, rules: Rules) -> Reason | None:
    """ASLEEP, or IDLE if one more worker is to leave; None: the fleet is to have workers."""
    if rules.min_workers or not state.may_sleep or state.somebody_waits:
        return None
    if not state.size:
        return Reason.ASLEEP
    return Reason.IDLE if _is_idle(state, rules) else None


def _is_idle(state: FleetState, rules: Rules) -> bool:
    """Nothing was asked for so long, nor is anything under way; a new worker counts as asked
    for."""
    since_s = state.now_s - rules.idle_s
    if state.is_changing or any(asked.at_s > since_s for asked in state.recent):
        return False
    return all(
        worker.since_s <= since_s and worker.load is not None and not worker.load.requests
        for worker in state.those(Phase.LIVE)
    )
