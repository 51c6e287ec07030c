"""A fleet without workers, for which a planner starts one once a request waits."""

from __future__ import annotations

from app.core.roles import Role
from app.policy.decision import RouteRequest
from app.policy.view import View

TAKE_OVER_MS = 30_000
"""Another planner follows one that is gone within that time."""


def wakes(until_ms: int, now_ms: int | None) -> bool:
    """Whether a planner starts a worker for requests that find none. until_ms: see
    app.state.planner.wakes_until."""
    return (now_ms or 0) < until_ms + TAKE_OVER_MS


def sleeps(view: View) -> bool:
    """Whether no worker decodes."""
    return all(info.role is Role.PREFILL for info in view.infos)


def waking(asks: RouteRequest, policy: str, tag: str) -> RouteRequest:
    """What waits for any worker, in the line as `asks` would."""
    return RouteRequest(
        f"wake-{tag}",
        [],
        1,
        policy,
        reserve=False,
        tenant=asks.tenant,
        priority=asks.priority,
        holder=asks.holder,
    )
