"""The workers that a request may go to."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from app.core.errors import NoWorkers, PromptTooLarge
from app.policy.choose import has_room
from app.policy.cost import Candidates, RequestSize
from app.policy.decision import RouteRequest
from app.policy.health import avoided, without_avoided
from app.policy.pairing import Mask, Roles
from app.policy.view import View


class Eligible(NamedTuple):
    """Masks of workers, (workers,) each: allowed by the request; of those, with engines that take
    it; of those, not avoided; and of those, fit to decode it."""

    allowed: Mask
    able: Mask
    eligible: Mask
    targets: Mask


def eligible_of(
    request: RouteRequest, view: View, candidates: Candidates, size: RequestSize
) -> Eligible:
    """Returns the workers that may take a request. Raises NoWorkers, PromptTooLarge."""
    allowed = _allowed(view, request)
    targets = allowed if view.roles is None else _targets(allowed, view.roles)
    able = allowed
    if request.context_tokens > view.contexts.least:
        targets = _fitting(view, targets, request.context_tokens)
        # A source computes the prompt and one token.
        alone = request.context_tokens - request.output_tokens + 1
        able = targets if view.roles is None else _fitting(view, allowed, alone)
    heeds = view.knows_failures or view.suspected
    avoid = avoided(view, request.marks) if heeds else None
    if avoid is None:
        return Eligible(allowed, able, able, targets)
    room = has_room(candidates, size)
    roles = () if view.roles is None else (targets, view.roles.prefill)
    eligible = without_avoided(able, room, avoid, roles)
    return Eligible(allowed, able, eligible, targets & eligible)


def _allowed(view: View, request: RouteRequest) -> Mask:
    if not request.exclude:
        return view.everybody
    keys = [info.key for info in view.infos]
    return np.array([request.exclude.isdisjoint((key.worker_id, str(key))) for key in keys])


def _targets(eligible: Mask, roles: Roles) -> Mask:
    targets = eligible & roles.targets
    if not np.count_nonzero(targets) and np.count_nonzero(eligible):
        raise NoWorkers("no worker that decodes is alive: all have the role prefill")
    return targets


def _fitting(view: View, allowed: Mask, num_tokens: int) -> Mask:
    """Returns the `allowed` workers, (workers,), whose engines take a prompt and an answer of
    `num_tokens` together.

    Raises PromptTooLarge if no worker does, and NoWorkers if none of the allowed does.
    """
    fits = allowed & (view.contexts.tokens >= num_tokens)
    if np.count_nonzero(fits) or not np.count_nonzero(allowed):
        return fits
    known = (*view.infos, *view.paused.values(), *view.lapsed.values())
    longest = max(info.max_model_len or inf for info in known)
    needs = f"a prompt and its answer of {num_tokens:,} tokens"
    if longest < num_tokens:
        raise PromptTooLarge(f"{needs} fit into no worker: none takes more than {longest:,}")
    raise NoWorkers(f"{needs} fit only into workers that get no requests, or not this one, now")
