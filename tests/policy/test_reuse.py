"""What an engine makes of the blocks that its worker held."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.loads import Load
from app.core.overlaps import Overlaps
from app.core.roles import Role
from app.core.types import TierOverlap
from app.policy.reuse import held_tokens, lost_by_decision, lost_by_engine
from tests.policy.test_plan import plan, query, view_of
from tests.policy.test_transfer import able, fleet, route
from tests.policy.test_view import ONE


def decided(held, tokens, **engine):
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
def test_what_is_not_used_has_a_cause(held, tokens, engine, cached, lost):
    found = lost_by_engine(decided(held, tokens, **engine), cached)
    assert {cause: tokens for (_, cause), tokens in found.items()} == lost


def test_what_is_held_past_where_an_engine_goes_on_is_lost_to_alignment():
    decision = decided(6, 100)
    decision.overlap = TierOverlap(2)
    assert lost_by_engine(decision, 32) == {("used", "alignment"): 64}
    assert lost_by_engine(decision, 0) == {("used", "alignment"): 64, ("used", "race"): 32}


@given(
    st.integers(0, 6),
    st.integers(96, 112),
    st.integers(1, 4),
    st.integers(0, 3),
    st.none() | st.integers(0, 112),
)
def test_what_is_used_and_what_is_lost_is_all_that_was_held(held, tokens, unit, recomputed, cached):
    decision = decided(held, tokens, reuse_blocks=unit, recomputed_blocks=recomputed)
    lost = lost_by_engine(decision, cached)
    assert all(number > 0 for number in lost.values())
    used = held_tokens(decision) - sum(lost.values())
    assert used == min(held_tokens(decision), cached or 0)


def test_of_a_prefix_on_the_way_what_its_owner_does_not_have_on_the_device_is_lost():
    owner = Load(requests=8)
    both = (able("a", Role.BOTH, "kvroute"), able("b", Role.BOTH, "kvroute"))
    view = fleet(*both, loads=[owner, Load()])
    asked = query({ONE: TierOverlap(50, 9)}, tokens=960)
    asked.held = asked.overlaps
    planned = plan(asked, view)
    assert route(planned) == ("b", "a", "fetch")
    assert lost_by_decision(planned, 59, 59) == {
        ("seen", "new"): 16,
        ("chosen", "fetch"): 9 * 16,
    }


def test_of_many_that_hold_the_same_one_with_room_is_enough():
    view = view_of(Load(requests=4), Load(requests=4), Load())
    a, b, c = view.incarnations
    shared = [(frozenset({a, b}), TierOverlap(5))]
    asked = query(tokens=96)
    for held, lost in (
        (Overlaps({c: TierOverlap(2)}, shared), {("best", "full"): 3 * 16}),
        (Overlaps({}, [*shared, (frozenset({b, c}), TierOverlap(6))]), {}),
    ):
        asked.overlaps = asked.held = held
        planned = plan(asked, view)
        found = lost_by_decision(planned, 6, 0)
        assert {why: n for why, n in found.items() if why[0] in ("best", "chosen")} == lost
