"""Reading a namespace alongside a running cluster."""

import asyncio
import random

import pytest

from app.core.errors import RedisUnavailable
from app.state import decisions, reading, streams
from app.state.connect import connect
from tests.fake_worker import KEYS, FakeWorkers
from tests.redis_servers import stopped


@pytest.mark.parametrize("what", ["control", "promised", "contents", "decisions", "scan"])
async def test_reading_from_a_redis_that_hangs_ends_with_an_error(
    what, own_redis_server, monkeypatch
):
    async with connect(own_redis_server.url) as redis:
        await redis.masters()

        async def read():
            if what == "control":
                return await reading.read_control(redis, KEYS)
            if what == "promised":
                return await reading.read_reservations(redis, KEYS, [b"1"])
            if what == "contents":
                return await reading.contents(redis, [b"a"])
            if what == "decisions":
                return [one async for one in decisions.read(redis, KEYS)]
            return [keys async for _, keys in reading.scan(redis, "*")]

        await read()
        monkeypatch.setattr(reading, "STEP_TIMEOUT_S", 0.05)
        monkeypatch.setattr(streams, "PAGE_TIMEOUT_S", 0.05)
        with stopped(own_redis_server.pid):
            async with asyncio.timeout(10.0):
                with pytest.raises(RedisUnavailable):
                    await read()


async def test_the_fill_of_an_index_is_estimated_from_a_sample_of_its_buckets(redis):
    assert await reading.fill(redis, KEYS, 1, random.Random(1)) == 0
    workers = FakeWorkers(redis)
    await workers.register("w1")
    rng = random.Random(2)
    # Sixteen buckets, laid out for 128 blocks.
    for _ in range(64):
        await workers.publish("w1", [rng.getrandbits(32) for _ in range(4 * 16)])
    found = await reading.fill(redis, KEYS, 1, random.Random(1), samples=400)
    assert found == pytest.approx(1024 / 128, rel=0.25)

    for shard in (1, 2, 3):
        await redis.hset(KEYS.of_shard(shard)["shard"], "bucket_bits", "4")
    await redis.config_resetstat()
    found = await reading.fill(redis, KEYS, 4, random.Random(1), samples=400)
    assert found == pytest.approx(1024 / 128 / 4, rel=0.25)
    assert (await redis.info("commandstats"))["cmdstat_hlen"]["calls"] == 400
