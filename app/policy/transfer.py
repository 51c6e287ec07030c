"""The source of a request's KV: computed where it is decoded, or by another worker, or fetched.

A worker that decodes is a request's target. Blocks that the target lacks may come from a source,
which computes them for it (a split of prefill and decode), or holds them already (a fetch). All
three have one price, in the seconds of `app.policy.cost.latency`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from app.core.loads import Reservation
from app.policy.cost import (
    AWAY_TERM,
    BEHIND_WEIGHT,
    FAILED_TERM,
    LATE_TERM,
    Candidates,
    Costs,
    Floats,
    RequestSize,
    added_up,
    least,
    predicted_prefill_s,
)
from app.policy.pairing import Mask, Roles

MAX_PREFILL_S = 86_400.0
"""Longer prefills are no measurement, and a sum of many would not fit into Redis's integers."""
DECODING_TERMS = ("queue_s", "memory_wait_s", "eviction_s", "decode_s")
"""Terms of what a worker that decodes costs, besides the transfer."""


class TransferKind(StrEnum):
    """How the KV of a prompt gets to the worker that decodes: the target computes what it lacks;
    the source computes what it lacks, and the target fetches what it lacks; or the target fetches
    what the source holds, and computes the rest."""

    LOCAL = "local"
    SPLIT = "split"
    FETCH = "fetch"


class Demand(NamedTuple):
    """One worker's share of a request.

    prefill_tokens: 0: only to hold blocks. sending_s: for how long handing them on keeps its link
    busy.
    receiving_s: until the prefix that it fetches has come.
    """

    prefill_tokens: int
    prefill_s: float
    blocks: int
    sending_s: float = 0.0
    receiving_s: float = 0.0

    def reservation(self, request_id: str, **more: Any) -> Reservation:
        """Returns the reservation of it. more: fields of Reservation."""
        return Reservation(
            request_id,
            prefill_tokens=self.prefill_tokens,
            prefill_us=round(1e6 * min(self.prefill_s, MAX_PREFILL_S)),
            blocks=self.blocks,
            sending_ms=round(1e3 * min(self.sending_s, MAX_PREFILL_S)),
            receiving_ms=round(1e3 * min(self.receiving_s, MAX_PREFILL_S)),
            **more,
        )


class TransferRoute(NamedTuple):
    """Workers by their place in the candidates, and what the request costs there, in seconds.

    source: the target's own place if the target computes the prompt itself.
    held: leading blocks that the source of a fetch hands on. rest_s: for which the target then
    computes.
    """

    kind: TransferKind
    target: int
    source: int
    cost: float
    held: int = 0
    rest_s: float = 0.0


@dataclass(slots=True, eq=False)
class TransferInputs:
    """A request whose KV may travel, as one decision sees it; masks are (workers,).

    costs: the policy's. eligible: allowed to compute the prompt; room: able to take it; targets:
    allowed to decode it. published: leading blocks that each worker has on its device, (workers,),
    without foreseen ones.
    """

    policy: str
    candidates: Candidates
    size: RequestSize
    costs: Costs
    eligible: Mask
    room: Mask
    targets: Mask
    roles: Roles
    published: Floats
    rng: Generator

    def cheapest(self, cost: Floats, allowed: Mask) -> int | None:
        """Returns one of the cheapest of the allowed, at random; None: none is left."""
        costs = np.where(allowed, cost, np.inf)
        place = int(costs.argmin())
        lowest = costs[place]
        if lowest == np.inf:
            return None
        (equals,) = (costs == lowest).nonzero()
        return place if equals.size == 1 else int(equals[self.rng.integers(equals.size)])


def routes_with_source(given: TransferInputs, below: float = inf) -> list[TransferRoute]:
    """Returns the cheapest route of each kind but LOCAL, without kinds that have no pair of
    workers, or no pair that can cost as little as `below`.

    Policies other than `latency` do not count in seconds: they split a request wherever there is a
    worker for nothing but prefill, between the cheapest of those and of the others.
    """
    routes = [r for group in given.roles.groups for r in _routes_within(given, group, below)]
    if len(given.roles.groups) < 2:
        return routes
    kinds = dict.fromkeys(route.kind for route in routes)
    return [min((r for r in routes if r.kind is kind), key=lambda r: r.cost) for kind in kinds]


def _routes_within(given: TransferInputs, group: Mask, below: float) -> list[TransferRoute]:
    room, roles, costs = given.room, given.roles, given.costs
    owners = given.eligible & group & roles.sources
    targets = given.targets & group & room & roles.receivers
    if given.policy != "latency":
        source = given.cheapest(costs.cost, owners & room & roles.prefill)
        target = given.cheapest(costs.cost, targets)
        if source is None or target is None:
            return []
        return [TransferRoute(TransferKind.SPLIT, target, source, float(costs.cost[target]))]
    # Rounding may make the sum of a bound larger than that of a price.
    below += 1e-9 * abs(below)
    routes = []
    if _least_split(given.candidates, costs) <= below:
        routes.append(_split(given, owners & room, targets))
    if roles.fetches:
        routes.append(_fetch(given, owners, targets, below))
    return [route for route in routes if route is not None]


def _least_split(candidates: Candidates, costs: Costs) -> float:
    """Returns what any pair of `_split` costs at least: its cheapest halves, without the
    transfer."""
    decoding = added_up({name: costs.terms[name] for name in DECODING_TERMS})
    computing = costs.cost - costs.terms["decode_s"]
    return least(computing) + least(decoding) + least(candidates.prefill_s_per_token)


def awaited_s(candidates: Candidates, published: Floats) -> Floats:
    """Returns seconds until what is on its way to a worker is there, (workers,); 0 for workers that
    are not foreseen to hold more of the prompt than they have `published`."""
    return np.where(candidates.overlap_device > published, candidates.receiving_s, 0.0)


def _split(given: TransferInputs, sources: Mask, targets: Mask) -> TransferRoute | None:
    """Returns the cheapest pair of a source that computes the prompt and a target that decodes;
    None: there is none.

    costs: of `latency`. The source costs what it would for the whole request, but for its decode,
    and the wait for its link, if that is busy until after its prefill. The target costs its
    transfer, its queue, its memory and its decode. What travels depends on the target alone, so the
    two are chosen apart. Blocks that have yet to come to a worker cannot be handed on.
    """
    candidates, size, costs = given.candidates, given.size, given.costs
    terms = costs.terms
    computing = costs.cost - terms["decode_s"]
    if np.count_nonzero(candidates.sending_s):
        computed_s = candidates.prefill_s + terms["prefill_s"]
        computing += BEHIND_WEIGHT * np.maximum(candidates.sending_s - computed_s, 0.0)
    lacking = size.isl_tokens - candidates.overlap * size.block_size
    decoding = transfer_s(candidates, lacking)
    decoding += candidates.prefill_s_per_token + candidates.prefill_s_per_token2 * size.isl_tokens
    for name in (*DECODING_TERMS, FAILED_TERM, LATE_TERM, AWAY_TERM, "arrival_s"):
        if name in terms:
            decoding += terms[name]
    if "arrival_s" in terms:
        sources = sources & (candidates.receiving_s == 0.0)
    source, target = given.cheapest(computing, sources), given.cheapest(decoding, targets)
    if source is None or target is None:
        return None
    pairs: list[tuple[int | None, int | None]] = [(source, target)]
    if source == target:
        others = sources.copy(), targets.copy()
        for mask in others:
            mask[source] = False
        pairs = [
            (given.cheapest(computing, others[0]), target),
            (source, given.cheapest(decoding, others[1])),
        ]
    routes = [
        TransferRoute(TransferKind.SPLIT, t, s, float(computing[s] + decoding[t]))
        for s, t in pairs
        if s is not None and t is not None
    ]
    return min(routes, key=lambda one: one.cost, default=None)


def _fetch(
    given: TransferInputs, sources: Mask, targets: Mask, below: float
) -> TransferRoute | None:
    """Returns the cheapest target for what the source with the longest overlap holds; None: no
    target gains, or none can cost as little as `below`.

    costs: of `latency`. Of several longest overlaps, the source that is free to send first is
    taken.
    """
    candidates, size, costs = given.candidates, given.size, given.costs
    held = given.published * sources
    longest = float(held[held.argmax()])
    overlap = candidates.overlap
    if longest <= least(overlap):
        return None
    terms = costs.terms
    # Of the terms that grow with what is computed, all but evictions: what arrives takes as much
    # memory.
    growing = terms["prefill_s"] + terms["blocking_s"]
    growing += terms["interference_s"]
    if least(costs.cost - growing) + least(candidates.transfer_s) > below:
        return None
    holds = held == longest
    is_one = np.count_nonzero(holds) == 1
    source = int(holds.argmax()) if is_one else given.cheapest(candidates.sending_s, holds)
    assert source is not None
    gaining = targets & (overlap < longest)
    gaining[source] = False
    rest_s = predicted_prefill_s(candidates, size, longest)
    left = rest_s / np.maximum(terms["prefill_s"], 1e-12)
    total = costs.cost - (1.0 - left) * growing
    total += BEHIND_WEIGHT * candidates.sending_s[source]
    gained = (longest - overlap) * size.block_size
    total += candidates.transfer_s + candidates.transfer_s_per_token * gained
    target = given.cheapest(total, gaining)
    if target is None:
        return None
    return TransferRoute(
        TransferKind.FETCH,
        target,
        source,
        float(total[target]),
        int(longest),
        float(rest_s[target]),
    )


def demands(
    route: TransferRoute, candidates: Candidates, size: RequestSize, prefill_s: Floats
) -> tuple[Demand, Demand | None]:
    """Returns what the target owes, and what the source owes; None: the target computes the prompt.

    prefill_s: predicted of each worker, (workers,).
    """
    source, target = route.source, route.target
    if route.kind is TransferKind.FETCH:
        gained = route.held - candidates.overlap_at(target)
        sending_s = _sending_s(candidates, target, gained * size.block_size)
        free_s = float(candidates.sending_s[source] + candidates.transfer_s[target])
        tokens = _uncached(size, route.held)
        rest = Demand(tokens, route.rest_s, size.isl_blocks, receiving_s=free_s + sending_s)
        return rest, Demand(0, 0.0, route.held, sending_s)
    tokens = _uncached(size, candidates.overlap_at(source))
    computing = Demand(tokens, float(prefill_s[source]), size.isl_blocks)
    if route.kind is TransferKind.LOCAL:
        return computing, None
    last_s = float(
        candidates.prefill_s_per_token[target]
        + candidates.prefill_s_per_token2[target] * size.isl_tokens
    )
    lacking = size.isl_tokens - candidates.overlap_at(target) * size.block_size
    computing = computing._replace(sending_s=_sending_s(candidates, target, lacking))
    # Engines always compute the last token themselves.
    return Demand(1, last_s, size.isl_blocks), computing


def _uncached(size: RequestSize, overlap: float) -> int:
    return max(1, size.isl_tokens - int(overlap) * size.block_size)


def _sending_s(candidates: Candidates, target: int, tokens: float) -> float:
    return float(candidates.transfer_s_per_token[target]) * tokens


def transfer_s(candidates: Candidates, tokens: Floats) -> Floats:
    """Returns seconds until so many tokens' KV has arrived, (workers,); 0 for none."""
    seconds: Floats = candidates.transfer_s + candidates.transfer_s_per_token * tokens
    return seconds if least(tokens) > 0.0 else np.where(tokens > 0.0, seconds, 0.0)
