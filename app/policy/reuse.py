"""Losses of a prompt's reuse, from what was asked before to what its engine had cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.policy.choose import has_room
from app.policy.decision import Decision, Lost, Step
from app.policy.locality import Locality
from app.policy.transfer import TransferKind

if TYPE_CHECKING:
    from app.policy.plan import Plan

PROMPT, UNFORESEEN = "prompt", "unforeseen"
"""Names beside the steps: all tokens of prompts, and those cached that nobody knew of."""
NO_ROOM = (Locality.FULL, Locality.EXCLUDED, Locality.FAILING, Locality.LEASE)
CHOSEN_INSTEAD = (Locality.LOAD, Locality.SESSION, Locality.TIE)


def lost_by_decision(plan: Plan, asked: int, held_once: int) -> Lost:
    """Returns the tokens lost before the prompt came to its worker.

    asked: leading blocks that were asked before. held_once: those that a worker was seen to hold.
    """
    decision, full = plan.decision, len(plan.query.request.chain)
    block, tokens = decision.worker.block_size, decision.isl_tokens
    knows = decision.trust.predicts
    held, best, chosen = _reached(plan) if knows else (0, 0, 0)
    seen = min(full, max(asked, held))
    held_once = min(seen, max(held_once, held))
    lost: Lost = {
        (Step.SEEN, "no tokens" if plan.query.request.is_blind else "partial block"): max(
            0, tokens - full * block
        ),
        (Step.SEEN, "new"): (full - seen) * block,
        (Step.BEST, decision.locality.value): (held - best) * block,
        (Step.CHOSEN, _why_not_best(decision)): (best - chosen) * block,
    }
    if not knows or plan.query.is_short:
        lost[Step.HELD, decision.trust.value] = (seen - held) * block
    else:
        lost[Step.HELD, "evicted"] = (held_once - held) * block
        lost[Step.HELD, "unpublished"] = (seen - held_once) * block
    return {why: count for why, count in lost.items() if count}


def lost_by_engine(decision: Decision, cached: int | None) -> Lost:
    """Returns the tokens that the chosen worker held and its engine computed all the same.

    cached: tokens that the engine says it had cached; None: it does not say.
    """
    info = decision.prompt_worker
    chosen = held_tokens(decision)
    # The last token is always computed, and with it the block of the engine that it is in.
    most = min(chosen, decision.isl_tokens - 1) // info.block_size
    whole = max(0, most - info.lookahead_blocks) // info.reuse_blocks * info.reuse_blocks
    if decision.source is None:
        # Where the index says that its engine goes on, that is less than the numbers tell.
        whole = min(whole, decision.overlap.total + info.recomputed_blocks)
    reusable = max(0, whole - info.recomputed_blocks) * info.block_size
    left = chosen - min(chosen, reusable if cached is None else cached)
    lost: Lost = {}
    for cause, most in (
        ("alignment", chosen - whole * info.block_size),
        ("recompute", whole * info.block_size - reusable),
        ("race", left),
    ):
        if tokens := min(left, most):
            lost[Step.USED, cause] = tokens
            left -= tokens
    if cached is None and reusable:
        lost[Step.USED, "unreported"] = min(chosen, reusable)
    return lost


def held_tokens(decision: Decision) -> int:
    """Returns how many tokens of the prompt the worker that computes it held."""
    return decision.isl_tokens - sum(decision.lost.values())


def _reached(plan: Plan) -> tuple[int, int, int]:
    """Returns leading blocks that any worker holds, that any worker holds that could have taken the
    request, and that the worker holds that computes the prompt, or hands it on."""
    decision, view, query = plan.decision, plan.view, plan.query
    chosen = decision.overlap.total
    if decision.source is None or decision.source.kind is not TransferKind.FETCH:
        own = query.held.get(view.incarnations[plan.route.source])
        chosen = own.total if own is not None else 0
    held = max(chosen, query.held.longest)
    if decision.locality not in NO_ROOM:
        return held, held, chosen
    best, able = chosen, plan.who.targets & has_room(plan.candidates, plan.size)
    for members, overlap in query.held.groups():
        places = map(view.position, members)
        if overlap.total > best and any(at is not None and able[at] for at in places):
            best = overlap.total
    return held, best, chosen


def _why_not_best(decision: Decision) -> str:
    if decision.source is not None and decision.source.kind is TransferKind.FETCH:
        return "fetch"
    if decision.locality in CHOSEN_INSTEAD:
        return decision.locality.value
    # No other reason is left: engines reuse whole units, of which another's last one is cut.
    return Locality.LOAD.value if decision.locality in NO_ROOM else "alignment"
