"""What failures cost, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.core.failures import Failing
from app.core.loads import Load, Loads, Reservation, Snapshot
from app.core.types import Incarnation
from app.policy.cost import FAILED_TERM, POLICIES, Candidates, Costs, RequestSize
from app.policy.health import Mask, avoided, avoiding, without_avoided
from app.policy.view import View
from app.policy.workers import UNMEASURED, Workers
from tests.policy.test_choose import SIZE, candidates
from tests.policy.test_view import info

NOW_MS = 10_000
ONE, TWO, THREE = Incarnation(1), Incarnation(2), Incarnation(3)


def costs(*values: float) -> Costs:
    def fixed(_: Candidates, __: RequestSize) -> Costs:
        return Costs(np.array(values), {"x": np.array(values)})

    shares = np.array([0.5, *[0.0] * (len(values) - 1)])
    return avoiding(fixed, shares)(candidates(len(values)), SIZE)


def view(
    failing: dict[Incarnation, Failing],
    *loads: Load,
    lacking: dict[str, dict[Incarnation, Failing]] | None = None,
) -> View:
    incarnations = [Incarnation(1 + number) for number in range(len(loads))]
    workers = Workers([(inc, info(f"w{inc}", 8), UNMEASURED) for inc in incarnations])
    known = Loads.of(dict(zip(incarnations, loads, strict=True)))
    return View(Snapshot(NOW_MS, known, failing=failing, lacking=lacking or {}), workers)


def test_one_that_failed_half_of_its_tries_is_as_dear_as_the_dearest() -> None:
    priced = costs(1.0, 2.0, 3.0)
    assert_allclose(priced.cost, [3.0, 2.0, 3.0], atol=1e-6)
    assert_allclose(priced.terms[FAILED_TERM], [2.0, 0.0, 0.0], atol=1e-6)
    assert_allclose(sum(priced.terms.values()), priced.cost)


def test_among_equals_one_that_failed_is_the_last() -> None:
    priced = costs(2.0, 2.0)
    assert priced.cost[0] > priced.cost[1]


def test_what_a_policy_rules_out_is_no_measure() -> None:
    assert_allclose(costs(1.0, 2.0, math.inf).cost, [2.0, 2.0, math.inf], atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_worker_that_fails_is_cheapest_for_no_policy(policy: str) -> None:
    busy = candidates(
        3,
        prefill_s=[0, 1, 1],
        prefill_tokens=[0, 1000, 1000],
        active_blocks=[0, 50, 50],
        active_requests=[0, 4, 4],
        num_requests_waiting=[0, 4, 4],
        gpu_cache_usage=[0, 0.5, 0.5],
        kv_active_blocks=[0, 50, 50],
        kv_total_blocks=[100, 100, 100],
    )
    shares = np.array([0.6, 0.0, 0.0])
    cost = avoiding(POLICIES[policy].cost, shares)(busy, SIZE).cost
    assert cost[0] > cost[1] == cost[2]


def masks(*columns: str) -> list[Mask]:
    """Each from `x` and `.`."""
    return [np.array([letter == "x" for letter in column]) for column in columns]


@pytest.mark.parametrize(
    ("avoid", "room", "left"),
    [("x..", "xxx", ".xx"), ("x..", "x..", "xxx"), ("xxx", "xxx", "xxx"), ("xx.", "xxx", "..x")],
)
def test_who_is_avoided_is_compared_only_where_nobody_else_has_room(
    avoid: str, room: str, left: str
) -> None:
    everybody, avoided_ones, with_room, expected = masks("xxx", avoid, room, left)
    assert_array_equal(without_avoided(everybody, with_room, avoided_ones), expected)


def test_the_only_one_of_a_role_is_not_avoided() -> None:
    everybody, avoid, prefill, expected = masks("xxx", "xx.", "x..", "x.x")
    found = without_avoided(everybody, everybody, avoid, (~prefill, prefill))
    assert_array_equal(found, expected)


def test_those_that_fail_half_of_their_tries_or_lack_what_is_asked_for_are_avoided() -> None:
    failed = {ONE: Failing(1, 0, share=0.4, at_ms=NOW_MS), TWO: Failing(2, 0, 0.6, NOW_MS)}
    paused, over = Failing(1, NOW_MS + 1), Failing(1, NOW_MS - 1)
    seen = view(failed, Load(), Load(), Load(), lacking={"poems": {THREE: paused, ONE: over}})
    for subjects, expected in ((("m", ""), ".x."), (("poems", ""), ".xx"), (("m", "poems"), ".xx")):
        avoid = avoided(seen, subjects)
        assert avoid is not None
        assert_array_equal(avoid, *masks(expected))
    nothing = view({}, Load(), lacking={"poems": {ONE: over}})
    assert avoided(nothing, ("m", "")) is not None
    assert not np.any(avoided(nothing, ("poems", "")))


def test_nothing_is_priced_where_nobody_failed() -> None:
    assert view({}, Load(), Load()).failed_shares is None
    drains = {ONE: Failing(0, -1)}
    assert view(drains, Load(), Load()).failed_shares is None


def test_a_share_fades_until_it_says_nothing() -> None:
    failed = Failing(1, 0, share=0.6, at_ms=NOW_MS - 4000)
    shares = view({TWO: failed}, Load(), Load()).failed_shares
    assert shares is not None
    assert_allclose(shares, [0, 0.6 / math.e])
    old = Failing(1, 0, share=0.6, at_ms=NOW_MS - 8000)
    assert view({TWO: old}, Load(), Load()).failed_shares is None


def test_one_on_trial_gets_one_request_at_its_usual_price() -> None:
    trial = Failing(2, NOW_MS - 1, share=0.9, at_ms=NOW_MS, is_on_trial=True)
    seen = view({ONE: trial}, Load(requests=3, decoding=3), Load())
    assert seen.failed_shares is None
    avoid = avoided(seen, ("m", ""))
    assert avoid is not None
    assert_array_equal(avoid, *masks(".."))
    seen.add(0, Reservation("r", 10, 10, 1))
    avoid = avoided(seen, ("m", ""))
    assert avoid is not None
    assert_array_equal(avoid, *masks("x."))
    assert seen.openings(math.inf) == 4 + 8
