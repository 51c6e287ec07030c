"""To which namespaces the requests for one name of a model go.

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
    """What a namespace has for a name. The more it has, the larger."""

    LEAVES = 1
    """Workers that are about to go, or may be gone."""
    SLEEPS = 2
    """None, and a planner that starts one for a request."""
    STAYS = 3
    """Workers that get no requests for a while, because they failed some."""
    SERVES = 4
    """Workers that take requests."""


AVAILABILITY = {
    **dict.fromkeys((State.SERVING, State.TRIAL, State.AWAY), Availability.SERVES),
    **dict.fromkeys((State.PAUSED, State.ILL, State.TAINTED), Availability.STAYS),
    State.DRAINING: Availability.LEAVES,
}
"""Of a name, by the state of a worker that serves it; of others, nothing."""


def standings(view: View) -> dict[str, Availability]:
    """Of a namespace, for each name that its workers serve."""
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
    """The namespace that a name belongs to; None: none has workers for it. As `spread`."""
    there = [name for name in claims if name in standings]
    staying = [name for name in there if standings[name] is not Availability.LEAVES]
    return next(iter(staying or there), None)


def spread(
    claims: Sequence[str], standings: Mapping[str, Availability], groups: Groups
) -> dict[str, float]:
    """Namespace -> weight of each that gets requests for a name; those with weight 0 get none but
    of sessions that are there. Empty: none has workers.

    claims: the namespaces that claim the name, the first first. standings: of all that have
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
    """The namespace at that point, in [0, 1), of the weights laid end to end, of which one at least
    is not 0."""
    left = point * sum(weights.values())
    chosen = ""
    for name, weight in weights.items():
        if weight:
            chosen = name
            left -= weight
            if left < 0:
                break
    return chosen
