import math
from collections import Counter
from dataclasses import asdict, fields

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.core.errors import AllWorkersBusy, NoWorkers, PromptTooLarge
from app.core.worker_report import DEFAULT_SPEED
from app.policy.choose import choose
from app.policy.cost import Candidates, RequestSize
from app.policy.policies import POLICIES

SIZE = RequestSize(isl_tokens=1000, block_size=100)
DRAWS = 2000


def candidates(workers, **given):
    """Idle workers that take 8 requests each, except in the columns given."""
    columns = {field.name: np.zeros(workers) for field in fields(Candidates)}
    columns |= {name: np.full(workers, value) for name, value in asdict(DEFAULT_SPEED).items()}
    columns["max_requests"] = np.full(workers, 8.0)
    columns |= {name: np.array(values, dtype=float) for name, values in given.items()}
    return Candidates(**columns)


def choose_one(
    policy, seen, *, eligible=None, seed=0, nth=0, temperature=0.0, max_queue_s=math.inf
):
    allowed = [True] * seen.max_requests.size if eligible is None else eligible
    return choose(
        policy,
        seen,
        SIZE,
        eligible=np.array(allowed, dtype=bool),
        rng=np.random.default_rng(seed),
        nth=nth,
        temperature=temperature,
        max_queue_s=max_queue_s,
    )


def count_choices(policy, seen, *, eligible=None, temperature=0.0):
    """How often each worker is chosen in DRAWS decisions, turn by turn, from one seed."""
    rng = np.random.default_rng(7)
    allowed = np.array([True] * seen.max_requests.size if eligible is None else eligible)
    return Counter(
        choose(
            policy, seen, SIZE, eligible=allowed, rng=rng, nth=nth, temperature=temperature
        ).index
        for nth in range(DRAWS)
    )


# Which workers can be chosen


@pytest.mark.parametrize("policy", POLICIES)
def test_no_eligible_worker_is_an_error(policy):
    with pytest.raises(NoWorkers, match=r"excludes all live workers \(2\)"):
        choose_one(policy, candidates(2), eligible=[False, False])


@pytest.mark.parametrize("policy", POLICIES)
def test_no_worker_at_all_is_an_error(policy):
    with pytest.raises(NoWorkers, match="no worker is alive"):
        choose_one(policy, candidates(0))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_eligible_worker_with_room_is_an_error(policy):
    seen = candidates(3, active_requests=[8, 9, 0], prefill_s=[7.5, 3.5, 0.5])
    with pytest.raises(AllWorkersBusy, match=r"all eligible workers \(2\)") as busy:
        choose_one(policy, seen, eligible=[True, True, False])
    assert busy.value.retry_after_s == 3.5


@pytest.mark.parametrize("policy", POLICIES)
def test_all_workers_are_busy_if_no_queue_is_short_enough(policy):
    seen = candidates(3, active_requests=[8, 0, 0], prefill_s=[0.5, 2.5, 3.5])
    with pytest.raises(
        AllWorkersBusy, match=r"all eligible workers \(3\) are full or have over 2 s"
    ):
        choose_one(policy, seen, max_queue_s=2.0)
    # Workers 1 and 2 have room, and the queue of 1 is short enough, so either may be chosen.
    assert choose_one(policy, seen, max_queue_s=2.5).index in (1, 2)


def test_the_policy_may_choose_a_longer_queue_if_another_is_short_enough():
    seen = candidates(2, prefill_s=[1.0, 2.0], overlap_device=[0, 10], active_blocks=[0, 1])
    assert choose_one("blocks", seen, max_queue_s=1.5).index == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_worker_that_is_eligible_and_not_full_is_chosen(policy, temperature):
    seen = candidates(4, active_requests=[8, 0, 7, 8], prefill_s=[0, 0, 9, 0])
    choice = choose_one(
        policy, seen, eligible=[True, False, True, True], nth=5, temperature=temperature
    )
    assert choice.index == 2
    assert not choice.tied


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_worker_that_the_policy_rules_out_is_not_chosen(temperature):
    # the first worker's slots are all in use, though no requests are reserved on it
    seen = candidates(2, request_active_slots=[4, 3], request_total_slots=[4, 4])
    assert count_choices("balance", seen, temperature=temperature) == {1: DRAWS}


def test_balance_finds_all_workers_busy_when_each_reports_itself_full():
    seen = candidates(2, kv_active_blocks=[50, 60], kv_total_blocks=[50, 60])
    with pytest.raises(AllWorkersBusy, match=r"all eligible workers \(2\)"):
        choose_one("balance", seen)


def test_costs_are_given_for_every_worker_even_those_that_cannot_be_chosen():
    seen = candidates(3, active_requests=[8, 2, 0], overlap_device=[9, 5, 0])
    choice = choose_one("latency", seen, eligible=[True, True, False])
    assert choice.index == 1
    assert_allclose(choice.costs.cost, POLICIES["latency"].cost(seen, SIZE).cost)


# Lowest cost and ties


def test_the_lowest_cost_wins():
    choice = choose_one("latency", candidates(3, prefill_s=[0.3, 0.1, 0.2]))
    assert (choice.index, choice.tied) == (1, False)


@pytest.mark.parametrize("policy", ["latency", "balance", "logit", "blocks", "least_loaded"])
def test_ties_are_broken_evenly_at_random(policy):
    # workers 0, 2 and 3 are alike; worker 1 is worse by every policy
    seen = candidates(
        4,
        prefill_s=[0, 1, 0, 0],
        prefill_tokens=[0, 500, 0, 0],
        active_requests=[0, 1, 0, 0],
        gpu_cache_usage=[0, 0.5, 0, 0],
        request_active_slots=[0, 1, 0, 0],
        request_total_slots=[8, 8, 8, 8],
    )
    assert choose_one(policy, seen).tied
    chosen = count_choices(policy, seen)
    assert set(chosen) == {0, 2, 3}
    # 667 expected, standard deviation 21
    assert all(600 < count < 734 for count in chosen.values())


def test_the_same_seed_gives_the_same_choice():
    choices = {choose_one("random", candidates(100), seed=5).index for _ in range(5)}
    assert len(choices) == 1


# Temperature


def test_a_temperature_samples_from_the_softmax_of_the_scaled_cost():
    # cost is requests: 1, 2 and 5 scale to 0, 1/4 and 1; at 0.5 the weights are
    # e^0 = 1, e^-0.5 = 0.607 and e^-2 = 0.135, of 1.742: 57.4 %, 34.8 % and 7.8 %
    seen = candidates(3, active_requests=[1, 2, 5])
    chosen = count_choices("least_loaded", seen, temperature=0.5)
    expected = [1148, 696, 155]  # standard deviations 22, 21 and 12
    assert_allclose([chosen[i] for i in range(3)], expected, atol=65)


def test_costs_are_scaled_over_the_workers_that_can_be_chosen():
    # worker 2 is full; of the others 1 scales to 0 and 2 to 1: 1 / (1 + e^-1) = 73.1 %
    seen = candidates(3, active_requests=[1, 2, 8])
    chosen = count_choices("least_loaded", seen, temperature=1.0)
    assert set(chosen) == {0, 1}
    assert chosen[0] == pytest.approx(1462, abs=60)  # standard deviation 20


def test_a_low_temperature_chooses_the_lowest_cost():
    seen = candidates(3, active_requests=[2, 1, 3])
    assert count_choices("least_loaded", seen, temperature=0.01) == {1: DRAWS}


def test_a_high_temperature_chooses_almost_evenly():
    seen = candidates(2, active_requests=[2, 1])
    chosen = count_choices("least_loaded", seen, temperature=1000.0)
    assert chosen[0] == pytest.approx(1000, abs=70)  # standard deviation 22


def test_equal_costs_are_sampled_evenly():
    chosen = count_choices("latency", candidates(2), temperature=0.1)
    assert chosen[0] == pytest.approx(1000, abs=70)


# Baselines


def test_random_is_even_whatever_the_load():
    chosen = count_choices("random", candidates(4, active_requests=[0, 7, 3, 0]))
    assert set(chosen) == {0, 1, 2, 3}
    # 500 expected, standard deviation 19
    assert all(440 < count < 560 for count in chosen.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_with_fewer_blocks_than_the_prompt_is_never_chosen(policy):
    # SIZE is 10 blocks; 0 means that the worker has reported no total.
    seen = candidates(4, kv_total_blocks=[9, 10, 0, 9], active_requests=[0, 1, 1, 0])
    assert count_choices(policy, seen).keys() == {1, 2}
    with pytest.raises(PromptTooLarge, match=r"1,000 tokens fills 10 blocks.* more than 9"):
        choose_one(policy, seen, eligible=[True, False, False, True])
    with pytest.raises(NoWorkers):
        choose_one(policy, seen, eligible=[False] * 4)


def test_round_robin_takes_the_eligible_workers_in_turn():
    seen = candidates(4, active_requests=[7, 0, 0, 3])
    chosen = [
        choose_one("round_robin", seen, eligible=[True, False, True, True], nth=nth).index
        for nth in range(7)
    ]
    assert chosen == [0, 2, 3, 0, 2, 3, 0]


def test_round_robin_passes_over_full_workers():
    seen = candidates(3, active_requests=[0, 8, 0])
    assert count_choices("round_robin", seen) == {0: DRAWS // 2, 2: DRAWS // 2}


def test_power_of_two_takes_the_worker_with_fewer_requests_of_a_random_pair():
    seen = candidates(4, active_requests=[0, 1, 2, 3])
    chosen = count_choices("power_of_two", seen)
    # of 6 equally likely pairs worker 0 wins 3, worker 1 two, worker 2 one and worker 3 none
    assert_allclose([chosen[i] for i in range(4)], [1000, 667, 333, 0], atol=70)


def test_power_of_two_draws_evenly_from_the_eligible():
    seen = candidates(5, active_requests=[0, 0, 0, 0, 0])
    chosen = count_choices("power_of_two", seen, eligible=[True, True, False, True, True])
    assert set(chosen) == {0, 1, 3, 4}
    # 500 expected, standard deviation 19
    assert all(440 < count < 560 for count in chosen.values())


def test_power_of_two_compares_both_of_two_workers():
    assert count_choices("power_of_two", candidates(2, active_requests=[3, 2])) == {1: DRAWS}
