import random

import pytest

from app.core.chains import positions
from app.core.types import SequenceHash
from app.state.predictions import PredictionSettings

HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=100_000)


@pytest.mark.oldest_too
async def test_forecasts_agree_with_a_plain_model_of_what_was_routed(space):
    """Prompts that branch off each other at random, routed to three workers."""
    rng = random.Random(5)
    workers = [await space.worker(f"w{i}") for i in range(3)]
    prompts = [[]]
    recorded = {inc: set() for inc in workers}
    for _ in range(60):
        base = rng.choice(prompts)
        stem = base[: rng.randint(0, len(base))]
        new = [SequenceHash(rng.getrandbits(64)) for _ in range(rng.randint(1, 90))]
        prompt = stem + new
        prompts.append(prompt)
        inc = rng.choice(workers)
        await space.predict(inc, prompt, HOURS)
        recorded[inc] |= {prompt[n - 1] for n in positions(len(prompt))}

        asked = rng.choice(prompts)
        expected = {}
        for inc, blocks in recorded.items():
            reached = [n for n in positions(len(asked)) if asked[n - 1] in blocks]
            if reached:
                expected[inc] = reached[-1]
        assert await space.predicted(asked, HOURS) == expected


async def test_nothing_is_predicted_from_corrupt_predictions(space, inc):
    chain = [SequenceHash(1 << 60)]
    await space.predict(inc, chain, HOURS)
    [bucket] = await space.redis.keys(space.key("predicted:") + "*")
    [(block, entry)] = (await space.redis.hgetall(bucket)).items()
    await space.redis.hset(bucket, block, b"9" * 5000 + entry[-1:])
    assert await space.predicted(chain, HOURS) == {}
    await space.redis.set(bucket, "spoilt")
    assert await space.predicted(chain, HOURS) == {}
    await space.redis.hset(space.key("predictions"), "bucket_bits", "spoilt")
    assert await space.predicted(chain, HOURS) == {}
