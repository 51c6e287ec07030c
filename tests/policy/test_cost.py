import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.core.settings.kinds import PRIORITIES
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.policy.affinity import Affinity, discounted
from app.policy.cost import Candidates, RequestSize, awaiting, latency, predicted_prefill_s, sharing
from app.policy.health import avoiding, late, unheard
from app.policy.policies import POLICIES, balance, blocks, least_loaded, logit

PAGE = Path(__file__).parents[2] / "docs/design/costs.md"
ROUND_SPEED = Speed(
    prefill_s_per_token=1e-3,
    prefill_s_per_token2=1e-6,
    decode_s_per_kv_token=1e-6,
    decode_s_per_seq=1e-3,
    host_s_per_token=1e-4,
    disk_s_per_token=1e-3,
    mean_output_tokens=100.0,
)
SIZE = RequestSize(isl_tokens=1000, block_size=100)  # 10 blocks


def candidates(workers, speed=DEFAULT_SPEED, **given):
    """Idle workers that have reported nothing, except in the columns given."""
    columns = {field.name: np.zeros(workers) for field in fields(Candidates)}
    columns |= {name: np.full(workers, value) for name, value in asdict(speed).items()}
    columns |= {name: np.array(values, dtype=float) for name, values in given.items()}
    return Candidates(**columns)


def random_candidates(workers, seed):
    """Busy workers whose overlaps fit into SIZE; some have reported no totals."""
    rng = np.random.default_rng(seed)
    matrix = rng.integers(1, 50, (len(fields(Candidates)), workers)).astype(float)
    columns = Candidates(*matrix)
    for overlap in (columns.overlap_device, columns.overlap_host, columns.overlap_disk):
        overlap[:] = rng.integers(0, 4, workers)
    columns.kv_total_blocks[:] = rng.choice([0.0, 20.0, 90.0], workers)
    columns.request_total_slots[:] = rng.choice([0.0, 60.0], workers)
    return columns


# Request size


@pytest.mark.parametrize(("isl_tokens", "isl_blocks"), [(1, 1), (99, 1), (100, 1), (101, 2)])
def test_a_partly_filled_last_block_counts_whole(isl_tokens, isl_blocks):
    assert RequestSize(isl_tokens, block_size=100).isl_blocks == isl_blocks


# All policies


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_terms_of_every_policy_add_up_to_its_cost(policy, seed):
    costs = POLICIES[policy].cost(random_candidates(20, seed), SIZE)
    assert costs.cost.shape == (20,)
    assert_allclose(sum(costs.terms.values(), np.zeros(20)), costs.cost, rtol=1e-12)


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("seed", range(10))
def test_all_terms_add_up_and_the_page_on_costs_has_each(seed, priority):
    rng = np.random.default_rng(seed)
    seen = random_candidates(8, seed)
    seen.overlap_device[:2] = 3
    seen.active_requests[:] = rng.permutation([0, 0, 0, 5, 5, 5, 5, 5])
    seen.receiving_s[rng.integers(8)] = 0
    cost = discounted(sharing, Affinity(int(rng.integers(8)), 0.5))
    cost = late(cost, rng.random(8), in_seconds=True)
    cost = unheard(cost, rng.random(8) < 0.5)
    cost = avoiding(cost, rng.random(8))
    cost = awaiting(cost, rng.integers(8, size=3).tolist(), np.zeros(8))
    costs = cost(seen, RequestSize(1000, 100, priority))
    assert_allclose(sum(costs.terms.values()), costs.cost, rtol=1e-12)
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == {*costs.terms}


@pytest.mark.parametrize("policy", POLICIES)
def test_one_idle_worker_that_reported_nothing_has_a_finite_cost(policy):
    costs = POLICIES[policy].cost(candidates(1), SIZE)
    assert np.isfinite(costs.cost).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_in_the_same_state_cost_exactly_the_same_anywhere_in_the_array(policy):
    column = [getattr(random_candidates(1, seed=3), f.name)[0] for f in fields(Candidates)]
    same = Candidates(*np.repeat(np.array(column)[:, np.newaxis], 67, axis=1))
    assert np.unique(POLICIES[policy].cost(same, SIZE).cost).size == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cost_function_does_not_change_the_candidates(policy):
    seen = random_candidates(8, seed=1)
    POLICIES[policy].cost(seen, SIZE)
    for field in fields(Candidates):
        assert_allclose(
            getattr(seen, field.name), getattr(random_candidates(8, seed=1), field.name)
        )


# latency: predicted prefill


def test_prefill_is_linear_and_quadratic_in_uncached_tokens():
    seen = candidates(2, ROUND_SPEED, overlap_device=[0, 8])
    # nothing cached: 1000 * 1e-3 + (1000 * 0 + 1000² / 2) * 1e-6 = 1.0 + 0.5
    # 800 cached:      200 * 1e-3 + (200 * 800 + 200² / 2) * 1e-6 = 0.2 + 0.18
    assert_allclose(predicted_prefill_s(seen, SIZE), [1.5, 0.38])


def test_blocks_of_slower_tiers_are_cached_but_cost_their_load_time():
    seen = candidates(
        3, ROUND_SPEED, overlap_device=[4, 4, 9], overlap_host=[5, 3, 0], overlap_disk=[0, 2, 0]
    )
    # 900 cached in each: 100 * 1e-3 + (100 * 900 + 100² / 2) * 1e-6 = 0.195
    # and to load: 500 * 1e-4 = 0.05; 300 * 1e-4 + 200 * 1e-3 = 0.23; nothing
    assert_allclose(predicted_prefill_s(seen, SIZE), [0.245, 0.425, 0.195])


def test_a_fully_cached_prompt_still_computes_its_last_token():
    seen = candidates(1, ROUND_SPEED, overlap_device=[10])
    # 1 * 1e-3 + (1 * 999 + 1 / 2) * 1e-6
    assert_allclose(predicted_prefill_s(seen, SIZE), [0.0019995])


def test_a_prompt_shorter_than_a_block_is_computed_whole():
    size = RequestSize(isl_tokens=10, block_size=100)
    # 10 * 1e-3 + 10² / 2 * 1e-6
    assert_allclose(predicted_prefill_s(candidates(1, ROUND_SPEED), size), [0.01005])


def test_each_worker_is_predicted_by_its_own_speed():
    seen = candidates(2, prefill_s_per_token=[1e-3, 2e-3], prefill_s_per_token2=[0, 0])
    assert_allclose(predicted_prefill_s(seen, SIZE), [1.0, 2.0])


# latency


def test_latency_weighs_the_queue_and_decode_of_a_busy_worker_against_prefill():
    costs = latency(
        candidates(
            2,
            ROUND_SPEED,
            overlap_device=[8, 0],
            prefill_s=[0.5, 0],
            active_blocks=[50, 0],
            active_requests=[4, 0],
            decoding_requests=[3, 0],
        ),
        SIZE,
    )
    assert_allclose(costs.terms["queue_s"], [0.5, 0])
    assert_allclose(costs.terms["memory_wait_s"], [0, 0])  # kv_total_blocks is unknown
    assert_allclose(costs.terms["prefill_s"], [0.38, 1.5])
    # 0.38 * (1 + 0.3 * 1 of 4 requests that waits)
    assert_allclose(costs.terms["blocking_s"], [0.494, 1.5])
    # 0.7 * 100 tokens * (1e-6 * 5000 KV tokens + 1e-3 * 3 sequences) = 70 * 0.008
    assert_allclose(costs.terms["decode_s"], [0.56, 0])
    # 0.05 * 0.38 * 4 requests
    assert_allclose(costs.terms["interference_s"], [0.076, 0])
    # 0.5 + 0.38 + 0.494 + 0.56 + 0.076; 2 * 1.5
    assert_allclose(costs.cost, [2.01, 3.0])


def memory_wait_s(**given):
    """For one worker with 50 blocks in use, whose requests stay 2.8 s, and 8 blocks of overlap."""
    seen = {
        "kv_active_blocks": [50],
        "active_blocks": [50],
        "active_requests": [4],
        "decoding_requests": [3],
        "overlap_device": [8],
    }
    speed = replace(ROUND_SPEED, decode_s=0.02)
    costs = latency(candidates(1, speed, **(seen | given)), SIZE)
    return float(costs.terms["memory_wait_s"][0])


def test_a_request_whose_new_blocks_fit_does_not_wait_for_memory():
    # 50 in use and 10 - 8 new
    assert memory_wait_s(kv_total_blocks=[52]) == 0


def test_a_request_that_does_not_fit_waits_for_as_long_as_a_request_stays():
    # 100 tokens * (20 ms + 1e-6 * 5000 KV tokens + 1e-3 * 3 sequences)
    assert memory_wait_s(kv_total_blocks=[51]) == pytest.approx(2.8)
    # without the overlap, 10 blocks are new
    assert memory_wait_s(kv_total_blocks=[59], overlap_device=[0]) == pytest.approx(2.8)
    assert memory_wait_s(kv_total_blocks=[60], overlap_device=[0]) == 0


def test_blocks_that_requests_share_are_in_use_once():
    seen = {"kv_total_blocks": [60], "active_blocks": [90]}
    assert memory_wait_s(**seen) == 0


def test_prompts_yet_to_be_computed_will_be_in_use():
    seen = {"kv_total_blocks": [54]}
    assert memory_wait_s(**seen, prefill_tokens=[200]) == 0  # 2 blocks
    assert memory_wait_s(**seen, prefill_tokens=[300]) == pytest.approx(2.8)


def test_blocks_loaded_from_the_host_tier_need_room_on_the_device():
    waits = memory_wait_s(kv_total_blocks=[55], overlap_device=[0], overlap_host=[8])
    assert waits == pytest.approx(2.8)


def test_a_request_waits_for_memory_and_in_the_queue_at_the_same_time():
    assert memory_wait_s(kv_total_blocks=[51], prefill_s=[0.8]) == pytest.approx(2.0)
    assert memory_wait_s(kv_total_blocks=[51], prefill_s=[3.0]) == 0


def test_a_worker_that_does_not_say_how_much_it_holds_has_no_memory_wait():
    assert memory_wait_s(kv_total_blocks=[0]) == 0


def test_an_empty_worker_has_no_memory_wait_even_if_the_prompt_exceeds_its_memory():
    empty = {"active_requests": [0], "decoding_requests": [0]}
    assert memory_wait_s(kv_total_blocks=[5], **empty) == 0


def test_latency_prefers_an_idle_worker_once_the_queue_outweighs_the_cache():
    # with 8 of 10 blocks cached: 2 * 0.38 + queue, against 2 * 1.5
    for queue_s, winner in [(2.2, 0), (2.3, 1)]:
        seen = candidates(2, ROUND_SPEED, overlap_device=[8, 0], prefill_s=[queue_s, 0])
        assert latency(seen, SIZE).cost.argmin() == winner


def test_a_queue_counts_by_its_logarithm_from_two_seconds_on():
    seen = candidates(4, ROUND_SPEED, prefill_s=[0.5, 2.0, 2.0 * math.e, 2.0 * math.e**2])
    assert_allclose(latency(seen, SIZE).terms["queue_s"], [0.5, 2.0, 4.0, 6.0])


@pytest.mark.parametrize(
    ("overlap", "active_requests", "counts_as"),
    [
        ([8, 6, 2, 0], [0, 0, 0, 0], [8, 6, 6, 6]),
        ([8, 6, 2, 0], [0, 1, 1, 0], [8, 6, 6, 6]),
        ([8, 6, 2, 0], [1, 1, 1, 0], [8, 6, 3, 3]),
        ([8, 6, 2, 0], [1, 1, 1, 1], [8, 6, 2, 0]),
        ([8, 0, 0, 0], [0, 0, 0, 0], [8, 0, 0, 0]),
        ([8], [0], [8]),
    ],
)
def test_what_two_workers_hold_counts_as_held_by_all_while_workers_are_idle(
    overlap, active_requests, counts_as
):
    others = {"active_requests": active_requests, "kv_idle_before_evict_s": [300] * len(overlap)}
    priced, held = (
        sharing(candidates(len(overlap), overlap_device=blocks, **others), SIZE)
        for blocks in (overlap, counts_as)
    )
    assert_allclose(priced.cost, held.cost)
    assert_allclose(
        priced.terms["prefill_s"],
        predicted_prefill_s(candidates(len(overlap), overlap_device=overlap), SIZE),
    )


def test_eviction_costs_the_prefill_times_the_chance_that_evicted_blocks_are_needed():
    seen = candidates(
        3, ROUND_SPEED, overlap_device=[0, 0, 8], kv_idle_before_evict_s=[300, 100, 100]
    )
    # 1.5 s times a chance of 1/2 or 3/4; 0.38 s times 3/4
    assert_allclose(latency(seen, SIZE).terms["eviction_s"], [0.75, 1.125, 0.285])


def test_evictions_far_from_where_a_slower_worker_s_blocks_idle_cost_more_than_they_drive_out():
    """Chances of 3/4 and 3/10; what the first is more than 1/4 above the other, squared, 20 times.
    Nothing is lost where nothing is evicted."""
    token_s = [1e-3, 2e-3]
    seen = candidates(
        2, ROUND_SPEED, kv_idle_before_evict_s=[100, 700], prefill_s_per_token=token_s
    )
    weight = 0.75 + 20 * (0.75 - 0.3 - 0.25) ** 2
    assert_allclose(latency(seen, SIZE).terms["eviction_s"], [1.5 * weight, 2.5 * 0.3])
    seen = candidates(2, ROUND_SPEED, kv_idle_before_evict_s=[300, 0], prefill_s_per_token=token_s)
    weight = 0.5 + 20 * (0.5 - 0.25) ** 2
    assert_allclose(latency(seen, SIZE).terms["eviction_s"], [1.5 * weight, 0])


def test_a_worker_that_evicts_nothing_yet_draws_no_more_requests_than_it_spares_others():
    """As far as it is no slower: 4 (k - 1) prefills at most for one k times as slow."""
    for token_s, more in [([1e-3, 1e-3], 0.0), ([1e-3, 5e-4], 0.0), ([1e-3, 1.1e-3], 0.4)]:
        seen = candidates(
            2, ROUND_SPEED, kv_idle_before_evict_s=[100, 0], prefill_s_per_token=token_s
        )
        assert_allclose(latency(seen, SIZE).terms["eviction_s"], [1.5 * (0.75 + more), 0])


def test_a_cold_prompt_goes_where_nothing_is_evicted_or_else_blocks_idle_for_longest():
    for idle_s, winner in [([60, 400], 1), ([400, 60], 0), ([0, 400], 0), ([400, 0], 1)]:
        seen = candidates(2, ROUND_SPEED, kv_idle_before_evict_s=idle_s)
        assert latency(seen, SIZE).cost.argmin() == winner


# balance


@pytest.mark.parametrize(
    ("active_requests", "spread_s"),
    [
        ([0, 0, 0, 0], [4, 2, 0, 0]),
        ([0, 1, 1, 0], [4, 4, 4, 0]),
        ([1, 1, 1, 0], [2, 2, 2, 0]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_idle_fleets_spread_what_they_compute_and_ever_less_as_fewer_workers_are_idle(
    active_requests, spread_s
):
    fleet = candidates(
        4, ROUND_SPEED, routed_tokens=[5000, 3000, 1000, 1000], active_requests=active_requests
    )
    spread = latency(fleet, SIZE).terms.get("spread_s", np.zeros(4))
    assert spread.tolist() == spread_s


def test_a_shared_block_does_not_outbid_an_empty_cache_for_long():
    """Computing the prompt takes 0.9 s where its first block is, and 1 s on the empty worker."""
    linear = replace(ROUND_SPEED, prefill_s_per_token2=0.0)
    prices = [
        latency(
            candidates(2, linear, overlap_device=[1, 0], routed_tokens=[routed_tokens, 0]), SIZE
        ).cost
        for routed_tokens in (190, 210)
    ]
    assert [int(price.argmin()) for price in prices] == [0, 1]


def test_balance_weighs_load_by_0_7_when_loads_differ_much():
    costs = balance(
        candidates(
            2,
            overlap_device=[8, 0],
            kv_active_blocks=[60, 20],
            kv_total_blocks=[100, 100],
            request_active_slots=[5, 1],
            request_total_slots=[10, 10],
        ),
        SIZE,
    )
    # mean 0.4, sample deviation √(0.2² + 0.2²) = 0.283 > 0.04
    assert_allclose(costs.terms["load_deviation"], [0.14, -0.14])  # 0.7 * +-0.2
    assert_allclose(costs.terms["new_tokens"], [0.06, 0.3])  # 0.3 * 200 / 1000, 0.3 * 1
    assert_allclose(costs.terms["slots"], [0.05, 0.01])
    assert_allclose(costs.cost, [0.25, 0.17])


def test_balance_weighs_new_tokens_by_0_7_when_loads_are_alike():
    costs = balance(
        candidates(
            2,
            overlap_device=[8, 0],
            kv_active_blocks=[42, 38],
            kv_total_blocks=[100, 100],
        ),
        SIZE,
    )
    # mean 0.4, sample deviation √(0.02² + 0.02²) = 0.028 < 0.04
    assert_allclose(costs.terms["load_deviation"], [0.006, -0.006])  # 0.3 * +-0.02
    assert_allclose(costs.terms["new_tokens"], [0.14, 0.7])  # 0.7 * 200 / 1000, 0.7 * 1
    assert_allclose(costs.cost, [0.146, 0.694])


def test_balance_uses_the_sample_deviation_of_the_loads():
    # loads 0.37 and 0.43: deviation 0.042 over n - 1, above 0.04; it would be 0.03 over n
    seen = candidates(2, kv_active_blocks=[37, 43], kv_total_blocks=[100, 100])
    assert_allclose(balance(seen, SIZE).terms["load_deviation"], [-0.021, 0.021])  # 0.7 * +-0.03


def test_balance_of_a_single_worker_has_no_deviation():
    costs = balance(candidates(1, kv_active_blocks=[30], kv_total_blocks=[100]), SIZE)
    assert_allclose(costs.cost, [0.7])  # alpha = 0.3: 0.3 * 0 + 0.7 * 1


def test_balance_counts_only_device_overlap_as_saved():
    costs = balance(candidates(2, overlap_device=[5, 0], overlap_host=[0, 5]), SIZE)
    assert_allclose(costs.cost, [0.35, 0.7])  # 0.7 * 500 / 1000, 0.7 * 1


def test_balance_rules_out_workers_that_report_themselves_full():
    costs = balance(
        candidates(
            3,
            kv_active_blocks=[100, 10, 10],
            kv_total_blocks=[100, 100, 100],
            request_active_slots=[1, 10, 9],
            request_total_slots=[10, 10, 10],
        ),
        SIZE,
    )
    assert np.isinf(costs.cost).tolist() == [True, True, False]


def test_balance_treats_a_worker_without_totals_as_empty():
    costs = balance(candidates(1, kv_active_blocks=[5], request_active_slots=[5]), SIZE)
    assert_allclose(costs.cost, [0.7])


# logit


def test_logit_is_usage_plus_waiting_minus_twice_the_overlap():
    costs = logit(
        candidates(
            3,
            overlap_device=[5, 0, 0],
            gpu_cache_usage=[0.9, 0.1, 0.2],
            num_requests_waiting=[4, 0, 2],
        ),
        SIZE,
    )
    # 2 * 0.5 - 0.9 - 4/4 = -0.9; 0 - 0.1 - 0; 0 - 0.2 - 2/4 = -0.7
    assert_allclose(costs.cost, [0.9, 0.1, 0.7])


def test_logit_counts_overlap_in_every_tier():
    seen = candidates(1, overlap_device=[3], overlap_host=[2], overlap_disk=[1])
    assert_allclose(logit(seen, SIZE).cost, [-1.2])  # -2 * 600 / 1000


def test_logits_that_are_all_zero_express_no_preference():
    assert logit(candidates(3), SIZE).cost.tolist() == [0, 0, 0]


# blocks


def test_blocks_adds_prefill_minus_overlap_credits_to_the_blocks_in_flight():
    costs = blocks(
        candidates(
            3,
            overlap_device=[8, 2, 0],
            overlap_host=[0, 4, 0],
            overlap_disk=[0, 2, 0],
            prefill_tokens=[500, 0, 250],
            active_blocks=[30, 7, 0],
        ),
        SIZE,
    )
    # (500 + 1000) / 100 - 8; 10 - (2 + 0.75 * 4 + 0.25 * 2); (250 + 1000) / 100
    assert_allclose(costs.terms["prefill_blocks"], [7, 4.5, 12.5])
    assert_allclose(costs.terms["decode_blocks"], [40, 17, 10])
    assert_allclose(costs.cost, [47, 21.5, 22.5])


def test_blocks_left_to_prefill_are_never_negative():
    size = RequestSize(isl_tokens=50, block_size=100)
    costs = blocks(candidates(1, overlap_device=[1]), size)  # 0.5 - 1
    assert_allclose(costs.terms["prefill_blocks"], [0])


def test_blocks_can_weigh_prefill_above_decode():
    seen = candidates(2, overlap_device=[8, 0], active_blocks=[20, 0])
    assert_allclose(blocks(seen, SIZE).cost, [32, 20])  # 2 + 30; 10 + 10
    assert_allclose(blocks(seen, SIZE, prefill_weight=16).cost, [62, 170])  # 32 + 30; 160 + 10


# least_loaded


def test_least_loaded_compares_blocks_only_between_workers_with_equally_many_requests():
    seen = candidates(3, active_requests=[2, 1, 1], active_blocks=[0, 9_000_000, 8_999_999])
    assert least_loaded(seen, SIZE).cost.argsort().tolist() == [2, 1, 0]


# Priority


def test_low_priority_goes_where_others_wait_already_and_high_where_nobody_does():
    # The second worker has 0.2 s less to compute of the prompt, behind 1.5 s of others.
    busy = candidates(2, ROUND_SPEED, prefill_s=[0.0, 1.5], active_requests=[0.0, 1.0])
    busy.overlap_device[1] = 5.0
    taken = {
        priority: int(latency(busy, RequestSize(1000, 100, priority)).cost.argmin())
        for priority in PRIORITIES
    }
    assert taken == {"high": 0, "normal": 0, "low": 1}
    (normal, high, low) = (
        latency(busy, RequestSize(1000, 100, one)).terms for one in ("normal", "high", "low")
    )
    assert_allclose(high["queue_s"], 2 * normal["queue_s"])
    assert_allclose(low["queue_s"], normal["queue_s"] / 4)
    assert_allclose(low["blocking_s"], normal["blocking_s"] * [4.0, 4.0 * math.exp(-1.5 / 2)])
