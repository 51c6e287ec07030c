from itertools import count

import pytest

from app.core.types import SequenceHash
from app.state.predictions import PredictionSettings

CHAIN = [SequenceHash((i + 1) << 52) for i in range(64)]
OTHER = [*CHAIN[:10], *(SequenceHash((i + 1) << 32) for i in range(20))]
HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=1000)


@pytest.mark.oldest_too
async def test_blocks_routed_to_a_worker_are_predicted_there(space, inc):
    assert await space.predict(inc, CHAIN, HOURS) == 32
    assert await space.predicted(CHAIN, HOURS) == {inc: 64}
    assert await space.predicted(CHAIN[:20], HOURS) == {inc: 20}
    assert await space.predicted(OTHER, HOURS) == {inc: 10}


async def test_workers_with_similar_numbers_are_distinguished(space):
    b, *_, a = [await space.worker(f"w{i}") for i in range(11)]  # 1 and 11
    await space.predict(a, CHAIN, HOURS)
    await space.predict(b, CHAIN[:12], HOURS)
    await space.predict(b, OTHER, HOURS)
    assert await space.predicted(CHAIN, HOURS) == {a: 64, b: 12}
    assert await space.predicted(OTHER, HOURS) == {a: 10, b: 30}
    await space.age_predictions(1)
    await space.predict(a, CHAIN, HOURS)
    assert await space.predicted(CHAIN, HOURS) == {a: 64, b: 12}


async def test_blocks_already_recorded_in_the_current_slice_cost_nothing_more(space, inc):
    await space.predict(inc, CHAIN[:40], HOURS)
    assert await space.predict(inc, CHAIN[:40], HOURS) == 0
    assert await space.predict(inc, CHAIN, HOURS) == len([44, 48, 52, 56, 60, 64])
    counted = await space.redis.hgetall(space.key("predictions"))
    assert sum(int(n) for name, n in counted.items() if len(name) == 1) == 32


async def test_an_empty_chain_predicts_nothing(space, inc):
    assert await space.predict(inc, [], HOURS) == 0
    assert await space.predicted([], HOURS) == {}
    assert await space.predicted(CHAIN, HOURS) == {}


async def test_a_retired_incarnation_gets_no_predictions(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    await space.retire("a", inc)
    await space.sweep(max_buckets=0)
    assert await space.predicted(CHAIN, HOURS) == {}
    assert await space.predict(inc, OTHER, HOURS) == 0


async def test_a_prediction_stays_while_it_is_used_and_then_expires(space, inc):
    """Entries are aged by moving their slices back."""
    await space.predict(inc, CHAIN, HOURS)
    await space.age_predictions(4)
    assert await space.predicted(CHAIN, HOURS) == {inc: 64}
    assert await space.predict(inc, CHAIN[:20], HOURS) == 18
    assert await space.predictions() == 32
    await space.age_predictions(1)
    assert await space.predicted(CHAIN, HOURS) == {inc: 20}
    await space.age_predictions(4)
    assert await space.predicted(CHAIN, HOURS) == {}


async def test_the_oldest_predictions_are_given_up_at_the_limit(space, inc):
    few = PredictionSettings(lifetime_s=4 * 3600, max_entries=100)
    chains = [[SequenceHash((n * 100 + i) << 44) for i in range(1, 65)] for n in range(4)]
    for chain, slices in zip(chains, (1, 1, 2), strict=False):
        await space.predict(inc, chain, few)
        await space.age_predictions(slices)
    assert [await space.predicted(chain, few) for chain in chains[:3]] == [{inc: 64}] * 3
    await space.predict(inc, chains[3], few)  # 128 entries are too many; 80 are to be left
    predicted = [await space.predicted(chain, few) for chain in chains]
    assert predicted == [{}, {}, {inc: 64}, {inc: 64}]


async def test_expired_predictions_do_not_count_towards_the_limit(space, inc):
    few = PredictionSettings(lifetime_s=4 * 3600, max_entries=100)
    chains = [[SequenceHash((n * 100 + i) << 44) for i in range(1, 65)] for n in range(4)]
    for chain, slices in ((chains[0], 0), (chains[1], 4), (chains[2], 1), (chains[3], 0)):
        await space.predict(inc, chain, few)
        await space.age_predictions(slices)
    assert await space.predictions() == 128
    assert await space.predicted(chains[2], few) == {inc: 64}


async def test_only_slices_count_towards_the_limit(space, inc):
    """The field `bucket_bits` begins with the letter of a slice that has not expired."""
    now = await space.now_ms()
    lifetime_s = next(s for s in count(4 * 3600) if now // (s * 250) % 26 == ord("d") - ord("a"))
    settings = PredictionSettings(lifetime_s=lifetime_s, max_entries=32)
    assert await space.predict(inc, CHAIN, settings) == 32
    assert await space.get("predictions", "cutoff") is None


async def test_a_slice_that_is_full_by_itself_takes_no_more(space, inc):
    """Entries of the current slice are never given up, however many requests come in it."""
    few = PredictionSettings(lifetime_s=4 * 3600, max_entries=128)
    earlier, *chains = [[SequenceHash((n * 100 + i) << 44) for i in range(1, 65)] for n in range(9)]
    await space.predict(inc, earlier, few)
    await space.age_predictions(1)
    made = [await space.predict(inc, chain, few) for chain in chains]
    assert made == [32, 32, 32, 32, 0, 0, 0, 0]
    assert await space.predictions() == 160
    assert await space.predicted(earlier, few) == {}
    assert await space.predicted(chains[3], few) == {inc: 64}
    await space.age_predictions(1)
    assert await space.predict(inc, chains[7], few) == 32
    assert await space.predicted(chains[7], few) == {inc: 64}


async def test_the_first_prediction_sets_the_bucket_layout(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    bucket_bits = await space.get("predictions", "bucket_bits")
    await space.predict(inc, OTHER, PredictionSettings(lifetime_s=4 * 3600, max_entries=1_000_000))
    assert await space.get("predictions", "bucket_bits") == bucket_bits
    assert await space.predicted(CHAIN, HOURS) == {inc: 64}
    assert await space.predicted(OTHER, HOURS) == {inc: 30}
