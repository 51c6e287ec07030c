"""What an engine makes of the blocks that its worker held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.loads import Load
from app.core.types import TierOverlap
from app.policy.decision import Decision
from app.policy.reuse import held_tokens, lost_by_engine
from tests.policy.test_plan import plan, query, view_of


def decided(held: int, tokens: int, **engine: Any) -> Decision:
    """A prompt of which the worker holds `held` blocks of 16 tokens."""
    view = view_of(Load())
    [holder] = view.incarnations
    decision = plan(query({holder: TierOverlap(held)}, tokens=tokens), view).decision
    decision.worker = replace(decision.worker, **engine)
    decision.lost = {("seen", "new"): tokens - 16 * held}
    return decision


@pytest.mark.parametrize(
    ("held", "tokens", "engine", "cached", "lost"),
    [
        (4, 100, {}, 64, {}),
        (4, 100, {}, 48, {"race": 16}),
        (4, 64, {}, 48, {"alignment": 16}),
        (4, 64, {}, 63, {"alignment": 1}),
        (3, 100, {"reuse_blocks": 2}, 32, {"alignment": 16}),
        (4, 100, {"recomputed_blocks": 1}, 48, {"recompute": 16}),
        (4, 100, {"recomputed_blocks": 1}, 0, {"recompute": 16, "race": 48}),
        (4, 100, {}, None, {"unreported": 64}),
        (4, 64, {}, None, {"alignment": 16, "unreported": 48}),
        (0, 100, {}, 48, {}),
    ],
)
def test_what_is_not_used_has_a_cause(
    held: int, tokens: int, engine: dict[str, Any], cached: int | None, lost: dict[str, int]
) -> None:
    found = lost_by_engine(decided(held, tokens, **engine), cached)
    assert {cause: tokens for (_, cause), tokens in found.items()} == lost


@given(
    st.integers(0, 6),
    st.integers(96, 112),
    st.integers(1, 4),
    st.integers(0, 3),
    st.none() | st.integers(0, 112),
)
def test_what_is_used_and_what_is_lost_is_all_that_was_held(
    held: int, tokens: int, unit: int, recomputed: int, cached: int | None
) -> None:
    decision = decided(held, tokens, reuse_blocks=unit, recomputed_blocks=recomputed)
    lost = lost_by_engine(decision, cached)
    assert all(number > 0 for number in lost.values())
    used = held_tokens(decision) - sum(lost.values())
    assert used == min(held_tokens(decision), cached or 0)
