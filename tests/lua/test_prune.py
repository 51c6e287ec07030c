from itertools import count

import pytest

from app.core.types import SequenceHash
from app.state.predictions import PredictionSettings, PruneStep, prune

CHAIN = [SequenceHash((i + 1) << 52) for i in range(16)]
OTHER = [SequenceHash((i + 1) << 44) for i in range(16)]
HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=128)
"""With this limit, predictions are laid out in four buckets."""


@pytest.mark.oldest_too
async def test_only_expired_predictions_are_removed(space, a, b):
    await space.predict(a, CHAIN, HOURS)
    await space.age_predictions(5)
    await space.predict(b, CHAIN, HOURS)
    assert await space.prune(HOURS) == 16
    assert await space.prune(HOURS) == 0
    assert await space.predicted(CHAIN, HOURS) == {b: 16}
    assert await space.predictions() == 16


async def test_predictions_for_a_retired_worker_are_removed(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    await space.retire("a", inc)
    await space.sweep()
    assert await space.prune(HOURS) == 16
    assert await space.predictions() == 0
    assert await space.redis.keys(space.key("predicted:") + "*") == []


async def test_steps_are_bounded_and_start_over_after_the_last_bucket(space, inc):
    spread = [SequenceHash(bucket << 62) for bucket in range(4)]
    await space.predict(inc, spread, HOURS)
    await space.age_predictions(5)
    assert [await space.prune(HOURS, 3) for _ in range(4)] == [3, 1, 0, 0]
    await space.predict(inc, spread, HOURS)
    await space.age_predictions(5)
    assert await space.prune(HOURS, 3) + await space.prune(HOURS, 3) == 4


async def test_a_step_reports_the_number_of_buckets_in_a_round(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    await space.age_predictions(5)
    assert await space.do(prune(space.shard, HOURS, 3)) == PruneStep(removed=16, buckets=4)


async def test_without_predictions_there_is_nothing_to_prune(space):
    assert await space.do(prune(space.shard, HOURS, 3)) == PruneStep(removed=0, buckets=0)
    assert await space.redis.dbsize() == 0


async def test_an_inflated_count_is_dropped_after_its_slice(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    [letter] = [f for f in await space.redis.hkeys(space.key("predictions")) if len(f) == 1]
    await space.redis.hset(space.key("predictions"), letter, "500")
    await space.age_predictions(5)
    assert await space.prune(HOURS) == 16
    assert b"484" in await space.redis.hvals(space.key("predictions"))
    # Before its letter is used again.
    await space.age_predictions(16)
    assert await space.prune(HOURS) == 0
    assert await space.predictions() == 0


async def test_only_counts_end_with_their_slice(space, inc):
    """The fields `bucket_bits` and `cursor` begin with the letters of slices that have ended."""
    now = await space.now_ms()
    lifetime_s = next(s for s in count(4 * 3600) if now // (s * 250) % 26 == ord("y") - ord("a"))
    settings = PredictionSettings(lifetime_s=lifetime_s, max_entries=128)
    await space.predict(inc, CHAIN, settings)
    for _ in range(2):
        await space.prune(settings, max_buckets=1)
    assert await space.get("predictions", "bucket_bits") == "2"
    assert await space.get("predictions", "cursor") == "2"


async def test_a_cutoff_in_the_future_is_dropped(space, inc):
    await space.predict(inc, CHAIN, HOURS)
    slices = await space.now_ms() // HOURS.slice_ms
    await space.redis.hset(space.key("predictions"), "cutoff", str(slices + 2))
    assert await space.predicted(CHAIN, HOURS) == {}
    assert await space.prune(HOURS) == 0
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}
