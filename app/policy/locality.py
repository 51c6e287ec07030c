"""The fate of the longest overlap: whether its worker was chosen, and if not, why."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from app.core.types import Incarnation

if TYPE_CHECKING:
    from app.policy.plan import Plan


class Locality(StrEnum):
    """Fate of the longest overlap. text: the same as a sentence."""

    KEPT = "kept", "the worker with the longest overlap was chosen"
    NONE = "none", "no worker held the start of the prompt"
    TIE = "tie", "another worker was drawn, though it was no cheaper"
    LOAD = "load", "another worker was cheaper, counting overlap and load"
    SESSION = "session", "another worker was cheaper, because the session had gone there before"
    FULL = "full", "the worker with the longest overlap was full or too small"
    EXCLUDED = "excluded", "the request excluded the worker with the longest overlap"
    FAILING = "failing", "the worker with the longest overlap had failed requests lately"
    LEASE = "lease", "the lease of the worker with the longest overlap had lapsed"
    DEGRADED = "degraded", "Redis was unreachable, so overlap was not known"

    text: str

    def __new__(cls, value: str, text: str) -> Locality:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class Best(NamedTuple):
    """The longest overlap of any worker, in blocks. worker: "" if none has any."""

    worker: str
    blocks: int


def locality_of(plan: Plan) -> tuple[Locality, Best]:
    """Returns what became of the longest overlap, unless DEGRADED, and whose it is."""
    view, choice, overlaps = plan.view, plan.choice, plan.query.overlaps
    chosen = overlaps.get(view.incarnations[choice.index])
    overlap = chosen.total if chosen is not None else 0
    holder: Incarnation | None = None
    longest = overlap
    for members, known in overlaps.groups():
        if known.total > longest:
            holder, longest = next(iter(members)), known.total
    position = choice.index if holder is None else view.position(holder)
    if position is None:
        return Locality.LEASE, Best(f"#{holder}", longest)
    best = Best(str(view.infos[position].key) if longest else "", longest)
    if position == choice.index:
        return (Locality.KEPT if overlap else Locality.NONE), best
    if not plan.who.allowed[position]:
        return Locality.EXCLUDED, best
    if not plan.who.able[position]:
        return Locality.FULL, best
    if view.failed_shares is not None and view.failed_shares[position]:
        return Locality.FAILING, best
    return _reason(plan, position), best


def _reason(plan: Plan, best: int) -> Locality:
    """Returns why the worker at `best`, which could take the request, was not chosen."""
    candidates, choice = plan.candidates, plan.choice
    is_full = candidates.active_requests[best] >= candidates.max_requests[best]
    if is_full or 0 < candidates.kv_total_blocks[best] < plan.size.isl_blocks:
        return Locality.FULL
    cost = choice.costs.cost
    # It may even be cheaper: with a temperature, or if a policy compares only two workers.
    if cost[best] <= cost[choice.index]:
        return Locality.TIE
    if plan.affinity is not None:
        discount = choice.costs.terms["affinity"][choice.index]
        if cost[best] < cost[choice.index] - discount:
            return Locality.SESSION
    return Locality.LOAD
