import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from app.policy.affinity import Affinity, discounted
from app.policy.choose import choose
from app.policy.cost import RequestSize, predicted_prefill_s
from app.policy.policies import POLICIES
from tests.policy.test_choose import candidates

SIZE = RequestSize(isl_tokens=1000, block_size=100)
CACHE_AWARE = ("latency", "balance", "logit", "blocks")


def discount(policy, seen, affinity):
    """The affinity term of the session's worker. Checks that no other worker has one."""
    costs = discounted(POLICIES[policy].cost, affinity)(seen, SIZE)
    assert_allclose(sum(costs.terms.values()), costs.cost)
    assert np.count_nonzero(np.delete(costs.terms["affinity"], affinity.position)) == 0
    plain = POLICIES[policy].cost(seen, SIZE)
    assert {name for name in costs.terms if name != "affinity"} == set(plain.terms)
    return float(costs.terms["affinity"][affinity.position])


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_session_returns_to_its_last_worker_if_workers_are_equal(policy):
    rng = np.random.default_rng(0)
    for position in range(3):
        cost = discounted(POLICIES[policy].cost, Affinity(position, 0.1))
        choice = choose(
            policy, candidates(3), SIZE, eligible=np.ones(3, dtype=bool), rng=rng, cost=cost
        )
        assert choice.index == position


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(CACHE_AWARE)))
def test_policies_that_ignore_the_cache_ignore_sessions(policy):
    assert discount(policy, candidates(2), Affinity(1, 1.0)) == 0.0


def test_a_discount_is_what_the_fraction_of_the_missing_blocks_would_save():
    # 4 of 10 blocks are held; half of the other 6 are credited.
    seen = candidates(2, overlap_device=[0, 3], overlap_host=[0, 1])
    assert discount("blocks", seen, Affinity(1, 0.5)) == pytest.approx(-3.0)
    assert discount("logit", seen, Affinity(1, 0.5)) == pytest.approx(-2 * 3 / 10)
    credited = candidates(2, overlap_device=[0, 6], overlap_host=[0, 1])
    plain, saved = (POLICIES["latency"].cost(c, SIZE).cost[1] for c in (seen, credited))
    assert discount("latency", seen, Affinity(1, 0.5)) == pytest.approx(saved - plain)


def test_a_worker_that_holds_the_whole_prompt_gets_no_discount():
    seen = candidates(2, overlap_device=[0, 10])
    for policy in CACHE_AWARE:
        assert discount(policy, seen, Affinity(1, 1.0)) == 0.0


def test_what_a_session_sent_to_its_worker_does_not_count_against_it():
    seen = candidates(2, overlap_device=[0, 10], routed_tokens=[1e4, 3e4])
    assert POLICIES["latency"].cost(seen, SIZE).terms["spread_s"].tolist() == pytest.approx(
        [0, 1.7]
    )
    assert discount("latency", seen, Affinity(1, 0.5)) == pytest.approx(-1.7)


def test_a_full_worker_is_not_chosen_for_its_session():
    seen = candidates(2, active_requests=[0, 8])
    cost = discounted(POLICIES["latency"].cost, Affinity(1, 1.0))
    rng = np.random.default_rng(0)
    choice = choose("latency", seen, SIZE, eligible=np.ones(2, dtype=bool), rng=rng, cost=cost)
    assert choice.index == 0


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_an_overloaded_worker_gets_no_discount(policy):
    prefill_s = float(predicted_prefill_s(candidates(2), SIZE)[1])
    affinity = Affinity(1, 0.5, max_queue_s=10.0)

    def with_queues(*prefill_s):
        return candidates(2, prefill_s=list(prefill_s))

    # Overloaded: longer than the shortest queue by over half the prefill, or than max_queue_s.
    assert discount(policy, with_queues(1.0, 1.0 + 0.49 * prefill_s), affinity) < 0.0
    assert discount(policy, with_queues(1.0, 1.0 + 0.51 * prefill_s), affinity) == 0.0
    assert discount(policy, with_queues(10.0, 10.0), affinity) < 0.0
    assert discount(policy, with_queues(10.1, 10.1), affinity) == 0.0


def test_a_worker_that_the_policy_rules_out_stays_ruled_out():
    seen = candidates(2, kv_active_blocks=[0, 10], kv_total_blocks=[10, 10])
    assert discount("balance", seen, Affinity(1, 1.0)) == 0.0
    assert math.isinf(discounted(POLICIES["balance"].cost, Affinity(1, 1.0))(seen, SIZE).cost[1])


def _values(low, high):
    return st.lists(st.floats(low, high), min_size=3, max_size=3)


@given(
    overlap=st.lists(st.integers(0, 10), min_size=3, max_size=3),
    prefill_s=_values(0.0, 5.0),
    requests=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    fraction=st.floats(0.0, 1.0),
    isl_tokens=st.integers(1000, 1099),
)
def test_latency_never_discounts_more_than_the_fraction_of_the_prefill_cost(
    overlap, prefill_s, requests, fraction, isl_tokens
):
    size = RequestSize(isl_tokens, 100)
    given = {
        "overlap_device": overlap,
        "prefill_s": prefill_s,
        "active_requests": requests,
        "prefill_s_per_token2": [1e-7] * 3,
    }
    seen = candidates(3, **given)
    costs = discounted(POLICIES["latency"].cost, Affinity(0, fraction))(seen, size)
    terms = {name: float(values[0]) for name, values in costs.terms.items()}
    prefill = terms["prefill_s"] + terms["blocking_s"] + terms["interference_s"]
    assert -fraction * prefill - 1e-9 <= terms["affinity"] <= 0.0
    # The candidates are unchanged, because reservations go by what is known to be held.
    assert seen.overlap_device.tolist() == overlap
