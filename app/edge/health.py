"""Whether requests can be routed, and what is missing."""

from __future__ import annotations

import asyncio

from app.console.kept import CachedAnswer
from app.core.errors import NamespaceMissing, RedisUnavailable, WrongVersion
from app.door.front import FrontDoor
from app.policy.view import View
from app.router.router import Router
from app.router.routers import Routers

KEPT_S = 0.5
"""Anybody may ask, without a key, and each look reads the loads of all workers."""
State = tuple[bool, list[str]]
"""Whether a namespace can be served, and what is missing."""


class ReadinessCheck:
    """Of one replica, by all namespaces that it serves."""

    def __init__(self, routers: Routers, door: FrontDoor) -> None:
        self._routers = routers
        self._door = door
        self._looked = CachedAnswer(self._look, KEPT_S)

    async def now(self) -> State:
        """Whether it can be served in any of them, as it was half a second ago at most."""
        states = await self._looked.now()
        missing = [what for _, lacks in states for what in lacks]
        if not states:
            missing = ["workers: none is alive"]
        missing += self._door.remarks()
        if danger := self._routers.own.danger_of_eviction:
            missing.append(f"redis: {danger}")
        is_ready = any(is_ready for is_ready, _ in states) and self._door.models.answers_any()
        return is_ready, [*dict.fromkeys(missing)]

    async def _look(self) -> list[State]:
        """Of each namespace that exists."""
        by_namespace = dict(self._routers.by_namespace)
        states = await asyncio.gather(
            *(
                _state(router, f" in namespace {name}" if len(by_namespace) > 1 else "")
                for name, router in by_namespace.items()
            )
        )
        return [state for state in states if state is not None]


def _away(view: View) -> str:
    """How many agents."""
    return f"{sum(away_s is not None for away_s in view.away_s)} of {len(view.infos)}"


async def _state(router: Router, where: str) -> State | None:
    """None: its namespace does not exist, as far as is known. where: in which one, in words."""
    fleet = router.fleet
    missing = []
    view: View | None = None
    try:
        view = await router.refresh()
    except WrongVersion as error:
        return False, [f"namespace: {error}"]  # which it names
    except (RedisUnavailable, NamespaceMissing) as error:
        # Without Redis a router still routes, by the last loads it saw.
        view = fleet.last_view
        if view is None and isinstance(error, NamespaceMissing):
            return None
        missing.append(f"redis: {error}")
    if view is not None and view.away:
        missing.append(f"agents: {_away(view)} are away{where}; their engines answer")
    if view is not None and (view.infos or fleet.wakes):
        return True, missing
    missing.append(f"workers: none is alive{where}")
    return False, [*missing, *(f"workers: {what}" for what in fleet.strangers.values())]
