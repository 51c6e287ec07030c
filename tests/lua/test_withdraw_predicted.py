import random

import pytest

from app.core.types import SequenceHash
from app.state.predictions import PredictionSettings

CHAIN = [SequenceHash((i + 1) << 52) for i in range(16)]
HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=1000)


@pytest.mark.oldest_too
async def test_what_a_request_added_goes_with_it(space, a, b):
    await space.predict(a, CHAIN[:4], HOURS, "1-aa")
    await space.predict(a, CHAIN, HOURS, "1-bb", confirmed=False)
    await space.predict(b, CHAIN[:9], HOURS, "1-cc", confirmed=False)
    assert await space.predicted(CHAIN, HOURS) == {a: 16, b: 9}
    assert await space.withdraw_predicted("1-bb") == 12
    assert await space.withdraw_predicted("1-bb") == 0
    assert await space.predicted(CHAIN, HOURS) == {a: 4, b: 9}
    assert await space.withdraw_predicted("1-cc") == 9
    assert await space.predicted(CHAIN, HOURS) == {a: 4}
    assert await space.predictions() == 4


async def test_what_another_request_has_confirmed_since_stays(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa", confirmed=False)
    await space.predict(inc, CHAIN[:10], HOURS, "1-bb")
    assert await space.withdraw_predicted("1-aa") == 6
    assert await space.predicted(CHAIN, HOURS) == {inc: 10}


async def test_what_another_request_was_the_first_to_add_stays(space, inc):
    await space.predict(inc, CHAIN[:10], HOURS, "1-aa", confirmed=False)
    await space.age_predictions(1)
    await space.predict(inc, CHAIN, HOURS, "1-bb", confirmed=False)
    assert await space.withdraw_predicted("1-bb") == 6
    assert await space.predicted(CHAIN, HOURS) == {inc: 10}


async def test_the_first_token_of_another_request_brings_back_what_it_needs(space, inc):
    await space.predict(inc, CHAIN[:10], HOURS, "1-aa", confirmed=False)
    await space.predict(inc, CHAIN, HOURS, "1-bb", confirmed=False)
    await space.withdraw_predicted("1-aa")
    assert await space.predicted(CHAIN, HOURS) == {}
    await space.confirm_predicted("1-bb", HOURS)
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}


async def test_a_request_that_only_used_an_old_prediction_withdraws_nothing(space, inc):
    await space.predict(inc, CHAIN, HOURS, "1-aa")
    await space.age_predictions(3)
    assert await space.predict(inc, CHAIN, HOURS, "1-bb", confirmed=False) == 16
    assert await space.withdraw_predicted("1-bb") == 0
    await space.age_predictions(4)
    assert await space.predicted(CHAIN, HOURS) == {inc: 16}


async def test_once_all_requests_have_ended_exactly_what_was_computed_is_left(space):
    rng = random.Random(1)
    workers = [await space.worker(name) for name in "ab"]
    chains = [
        [*CHAIN[:shared], *(SequenceHash((n * 100 + i) << 40) for i in range(1, 8))]
        for n, shared in enumerate((3, 3, 9, 14), start=1)
    ]
    computed = {inc: set[SequenceHash]() for inc in workers}
    open_requests = []
    for n in range(200):
        inc, chain = rng.choice(workers), rng.choice(chains)
        await space.predict(inc, chain, HOURS, f"{n}-aa", confirmed=False)
        open_requests.append((f"{n}-aa", inc, chain))
        while len(open_requests) > rng.choice((0, 3, 6)):
            attempt, inc, chain = open_requests.pop(rng.randrange(len(open_requests)))
            if rng.random() < 0.02:
                await space.confirm_predicted(attempt, HOURS)
                computed[inc].update(chain)
            else:
                await space.withdraw_predicted(attempt)
    for attempt, *_ in open_requests:
        await space.withdraw_predicted(attempt)
    for chain in chains:
        predicted = await space.predicted(chain, HOURS)
        for inc in workers:
            held = next((i for i, b in enumerate(chain) if b not in computed[inc]), len(chain))
            assert predicted.get(inc, 0) <= held < predicted.get(inc, 0) + max(1, held / 9) + 1
    await space.predictions()
    assert not [key async for key in space.redis.scan_iter(match=space.key("routed:") + "*")]
