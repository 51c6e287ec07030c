import pytest

from app.core.types import SequenceHash
from app.state.predictions import PredictionSettings
from tests.lua.conftest import LONG_MS

CHAIN = [SequenceHash((i + 1) << 52) for i in range(16)]
HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=1000)


@pytest.mark.oldest_too
async def test_a_first_token_confirms_what_was_predicted(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa", confirmed=False)
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}
    assert await space.confirm_predicted("1-aa", HOURS) == 16
    assert not await space.withdraw_predicted("1-aa")
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}
    assert await space.predictions() == 16
    assert await space.confirm_predicted("1-aa", HOURS) == 0
    assert not await space.redis.exists(space.key("routed:1-aa"))


async def test_a_first_token_after_the_prediction_has_expired_renews_it(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa", confirmed=False)
    await space.age_predictions(5)
    assert await space.predicted(CHAIN, HOURS) == {}
    await space.confirm_predicted("1-aa", HOURS)
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}
    assert await space.predictions() == 16


async def test_nothing_is_confirmed_of_a_worker_that_has_ended(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa", confirmed=False)
    await space.retire("a", inc)
    await space.sweep(max_buckets=0)
    assert await space.confirm_predicted("1-aa", HOURS) == 0


async def test_what_nobody_confirms_in_time_is_forgotten(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa", confirmed=False)
    assert 0 < await space.redis.pttl(space.key("routed:1-aa")) <= LONG_MS
