"""The namespaces that the requests for one name of a model go to.

A name belongs to the namespace that claimed it first, of those that have workers for it. Others get
none of its requests, whatever they claim, unless the operator says that the two share their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from app.core.verdicts import State
from app.core.worker_report import WorkerInfo
from app.policy.view import View

Groups = Sequence[Mapping[str, float]]
"""Namespaces that share their names, and the weight of each; no namespace is in two groups."""


class Availability(IntEnum):
    """Workers that a namespace has for a name; more is larger.

    LEAVES: workers that are about to go, or may be gone. SLEEPS: none, and a planner that starts
    one for a request. STAYS: workers that get no requests for a while, as they failed some. SERVES:
    workers that take requests.
    """

    LEAVES = 1
    SLEEPS = 2
    STAYS = 3
    SERVES = 4


AVAILABILITY = {
    **dict.fromkeys((State.SERVING, State.TRIAL, State.AWAY), Availability.SERVES),
    **dict.fromkeys((State.PAUSED, State.ILL, State.TAINTED), Availability.STAYS),
    State.DRAINING: Availability.LEAVES,
}
"""Availability of a name by the state of a worker that serves it; other states: none."""


def standings(view: View) -> dict[str, Availability]:
    """Returns the availability of each name that the workers of a namespace serve."""
    by_name: dict[str, Availability] = {}

    def note(info: WorkerInfo, standing: Availability) -> None:
        for name in (*info.models, *info.adapters):
            by_name[name] = max(by_name.get(name, standing), standing)

    for info in view.infos:
        note(info, Availability.SERVES)
    for inc, info in view.paused.items():
        note(info, AVAILABILITY[view.verdict(inc).state])
    return by_name


def owner_of(claims: Sequence[str], standings: Mapping[str, Availability]) -> str | None:
    """Returns the namespace that a name belongs to; None: none has workers for it.

    claims: the namespaces that claim the name, the earliest first. standings: of all that have
    anything for it.
    """
    there = [name for name in claims if name in standings]
    staying = [name for name in there if standings[name] is not Availability.LEAVES]
    return next(iter(staying or there), None)


def spread(
    claims: Sequence[str], standings: Mapping[str, Availability], groups: Groups
) -> dict[str, float]:
    """Returns namespace -> weight of each that gets requests for a name; those with weight 0 only
    get those of sessions that are there. Empty: none has workers.

    claims: the namespaces that claim the name, the earliest first. standings: of all that have
    anything for it.
    """
    owner = owner_of(claims, standings)
    if owner is None:
        return {}
    group = next((group for group in groups if owner in group), {owner: 1.0})
    weights = {name: weight for name, weight in group.items() if name in standings}
    most = max((standings[name] for name, weight in weights.items() if weight), default=None)
    return {
        name: weight
        for name, weight in weights.items()
        if standings[name] is (most if weight else Availability.SERVES)
    }


def pick(weights: Mapping[str, float], point: float) -> str:
    """Returns the namespace at `point`, in [0, 1), of the weights laid end to end.

    Raises nothing: one weight at least is not 0.
    """
    left = point * sum(weights.values())
    chosen = ""
    for name, weight in weights.items():
        if weight:
            chosen = name
            left -= weight
            if left < 0:
                break
    return chosen
