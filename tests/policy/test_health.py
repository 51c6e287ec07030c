"""What failures cost, worked out by hand."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.core.failures import Counts, Failure
from app.core.loads import Load, Loads, Reservation, Snapshot
from app.core.types import Incarnation
from app.core.verdicts import Mark, Marks, MarksByWorker
from app.policy.cost import FAILED_TERM, Costs
from app.policy.health import avoided, avoiding, counts_for, without_avoided
from app.policy.policies import POLICIES
from app.policy.view import View
from app.policy.workers import UNMEASURED, Workers
from tests.policy.test_choose import SIZE, candidates
from tests.policy.test_view import info

NOW_MS = 10_000
ONE, TWO, THREE = Incarnation(1), Incarnation(2), Incarnation(3)


def costs(*values):
    def fixed(_, __):
        return Costs(np.array(values), {"x": np.array(values)})

    shares = np.array([0.5, *[0.0] * (len(values) - 1)])
    return avoiding(fixed, shares)(candidates(len(values)), SIZE)


def view(marks, *loads):
    incarnations = [Incarnation(1 + number) for number in range(len(loads))]
    workers = Workers([(inc, info(f"w{inc}", 8), UNMEASURED) for inc in incarnations])
    known = Loads.of(dict(zip(incarnations, loads, strict=True)))
    return View(Snapshot(NOW_MS, known, marks=MarksByWorker(marks)), workers)


def failed(share, ago_ms=0, until_ms=0):
    """What is known of a worker that failed so many of a thousand tries."""
    at_ms = NOW_MS - ago_ms
    return Marks(failed=Mark(count=1, share=share, at_ms=at_ms, until_ms=until_ms))


def test_one_that_failed_half_of_its_tries_is_as_dear_as_the_dearest():
    priced = costs(1.0, 2.0, 3.0)
    assert_allclose(priced.cost, [3.0, 2.0, 3.0], atol=1e-6)
    assert_allclose(priced.terms[FAILED_TERM], [2.0, 0.0, 0.0], atol=1e-6)
    assert_allclose(sum(priced.terms.values()), priced.cost)


def test_among_equals_one_that_failed_is_the_last():
    priced = costs(2.0, 2.0)
    assert priced.cost[0] > priced.cost[1]


def test_what_a_policy_rules_out_is_no_measure():
    assert_allclose(costs(1.0, 2.0, math.inf).cost, [2.0, 2.0, math.inf], atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_worker_that_fails_is_cheapest_for_no_policy(policy):
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


def masks(*columns):
    """Each from `x` and `.`."""
    return [np.array([letter == "x" for letter in column]) for column in columns]


@pytest.mark.parametrize(
    ("avoid", "room", "left"),
    [("x..", "xxx", ".xx"), ("x..", "x..", "xxx"), ("xxx", "xxx", "xxx"), ("xx.", "xxx", "..x")],
)
def test_who_is_avoided_is_compared_only_where_nobody_else_has_room(avoid, room, left):
    everybody, avoided_ones, with_room, expected = masks("xxx", avoid, room, left)
    assert_array_equal(without_avoided(everybody, with_room, avoided_ones), expected)


def test_the_only_one_of_a_role_is_not_avoided():
    everybody, avoid, prefill, expected = masks("xxx", "xx.", "x..", "x.x")
    found = without_avoided(everybody, everybody, avoid, (~prefill, prefill))
    assert_array_equal(found, expected)


def avoided_by(seen, *names):
    mask = avoided(seen, names)
    return "" if mask is None else "".join(".x"[int(one)] for one in mask)


def test_those_are_avoided_that_fail_half_of_their_tries_or_are_left_alone():
    paused, over = Mark(until_ms=NOW_MS + 1), Mark(until_ms=NOW_MS - 1)
    one, three = Marks({"lacks poems": over, "caller a": Mark(count=1)}), Marks(failed(0))
    three |= {"lacks poems": paused, "caller a": paused}
    marks = {ONE: one, TWO: failed(600), THREE: three}
    seen = view(marks, Load(), Load(requests=1), Load())
    assert avoided_by(seen, "lacks m", "caller b") == ".x."
    assert avoided_by(seen, "lacks poems", "caller b") == ".xx"
    assert avoided_by(seen, "lacks m", "caller a") == ".xx"
    # After a pause there is one request at a time.
    tried = view({ONE: one, THREE: three}, Load(requests=1), Load(requests=1), Load())
    assert avoided_by(tried, "lacks poems") == "x.x"
    assert avoided_by(tried, "caller a") == "..x"


def test_a_suspect_is_left_alone_by_its_caller():
    seen = view({}, Load(), Load())
    assert avoided(seen, ("caller a",)) is None
    seen.suspected["caller a", TWO] = 1
    assert avoided_by(seen, "lacks m", "caller a") == ".x"
    assert avoided_by(seen, "lacks m", "caller b") == ".."


def test_nothing_is_priced_where_nobody_failed():
    assert view({}, Load(), Load()).failed_shares is None
    drains = {ONE: Marks(draining=Mark())}
    assert view(drains, Load(), Load()).failed_shares is None


def test_a_share_fades_until_it_says_nothing():
    shares = view({TWO: failed(600, ago_ms=4000)}, Load(), Load()).failed_shares
    assert shares is not None
    assert_allclose(shares, [0, 0.6 / math.e])
    assert view({TWO: failed(600, ago_ms=8000)}, Load(), Load()).failed_shares is None


def test_one_on_trial_gets_one_request_at_its_usual_price():
    trial = failed(900, until_ms=NOW_MS - 1)
    seen = view({ONE: trial}, Load(requests=3, decoding=3), Load())
    assert seen.failed_shares is None
    assert avoided_by(seen, "lacks m") == ".."
    seen.add(0, Reservation("r", 10, 10, 1))
    assert avoided_by(seen, "lacks m") == "x."
    assert seen.openings(math.inf) == 4 + 8


CALLER, WITNESSED, ALL = Counts


@pytest.mark.parametrize(
    ("counts", "weight", "is_answered", "num_failed", "found"),
    [
        (WITNESSED, 0.3, True, 1, ALL),  # then another worker has answered the request
        (WITNESSED, 0.3, True, 3, ALL),
        (WITNESSED, 0.3, False, 1, WITNESSED),  # another caller may have seen failures, too
        (WITNESSED, 0.3, False, 2, None),  # it follows the request from worker to worker
        (WITNESSED, 0.0, True, 1, ALL),
        (WITNESSED, 0.0, False, 2, CALLER),  # who is full is no less so
        (CALLER, 0.0, True, 1, CALLER),
        (ALL, 0.3, False, 2, ALL),
    ],
)
def test_a_verdict_wants_witnesses(counts, weight, is_answered, num_failed, found):
    assert counts_for(Failure("x", weight=weight, counts=counts), is_answered, num_failed) is found
