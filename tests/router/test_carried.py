import asyncio

import pytest

from app.router import carried, reports
from app.router.carried import Carried
from app.state import reservations
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.router.test_router import request, running, workers

__all__ = ["workers"]

SHORT_MS = 400


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(reservations, "CARRIED_MS", SHORT_MS)
    monkeypatch.setattr(carried, "EXTEND_S", 0.1)
    monkeypatch.setattr(reports, "LOOK_S", 0.05)


async def until_expired(redis, *reservation_ids):
    """Return once what is reserved now would have expired, unless it is extended."""
    scores = [await redis.zscore(KEYS["expiry"], each) for each in reservation_ids]

    async def now_ms():
        seconds, micros = await redis.time()
        return float(seconds * 1000 + micros / 1000)

    await eventually(now_ms, lambda now: all(score and now > score for score in scores))


@pytest.mark.parametrize("decoding", [False, True])
async def test_what_a_door_carries_stays_reserved_and_ends_soon_after_its_replica(
    one_redis_server, redis, workers, decoding
):
    await workers.register("w1", max_requests=2)
    both = {"r1": "w1:0", "r2": "w1:0"}
    async with running(one_redis_server.url, prefill_ttl_s=0.2, reservation_ttl_s=0.3) as other:
        async with running(one_redis_server.url) as dies:
            for name in both:
                decision = await dies.route(request(name, carried=True))
                if decoding:
                    dies.first_token(decision.reservation_id)
            for _ in range(2):
                await until_expired(redis, *both)
                assert await workers.reserved() == both
            assert (await other.refresh()).loads[0].decoding == 2 * decoding
        await eventually(workers.reserved, lambda found: found == {})


async def test_what_a_client_carries_itself_outlives_the_replica_that_decided(
    one_redis_server, redis, workers
):
    await workers.register("w1")
    async with running(one_redis_server.url):
        async with running(one_redis_server.url) as dies:
            await dies.route(request("carried", carried=True))
            await dies.route(request("own"))
        await eventually(workers.reserved, lambda found: found == {"own": "w1:0"})


async def test_what_redis_lost_of_running_requests_comes_back_and_is_released_once(
    one_redis_server, redis, workers
):
    await workers.register("w1")
    async with running(one_redis_server.url) as replica:
        ends = await replica.route(request("r1", carried=True))
        await replica.route(request("r2", carried=True))
        await redis.flushall()
        await workers.register("w1")
        await eventually(workers.reserved, lambda found: set(found) == {"r1", "r2"})
        replica.end(ends.reservation_id)
        await eventually(workers.reserved, lambda found: set(found) == {"r2"})
        assert replica.counted("reservations", event="made_again") == 2
        await until_expired(redis, "r2")
        assert set(await workers.reserved()) == {"r2"}


def extensions(replica):
    """How many calls each round trip had that extended anything."""
    trips = (names.count("extend") for names in replica.runner.round_trips)
    return [number for number in trips if number]


async def test_many_share_a_round_trip_and_short_requests_cost_none(
    one_redis_server, redis, workers, monkeypatch
):
    await workers.register("w1")
    async with running(one_redis_server.url) as replica:
        monkeypatch.setattr(carried, "EXTEND_S", 60.0)
        short = await replica.route(request("short", carried=True))
        await until_expired(redis, "short")
        assert extensions(replica) == []
        replica.end(short.reservation_id)
        names = [f"r{n}" for n in range(200)]
        await asyncio.gather(*(replica.route(request(n, carried=True)) for n in names))
        due = Carried.due
        # However long those 200 took, now they are due at once.
        monkeypatch.setattr(Carried, "due", lambda self, now_s, view: due(self, now_s + 60, view))

        async def shared():
            return 2 in extensions(replica)

        await eventually(shared)
        await eventually(workers.reserved, lambda found: set(found) == set(names))
        assert max(extensions(replica)) == 2


async def test_a_whole_answer_is_told_by_one_script(one_redis_server, redis, workers):
    await workers.register("w1")
    async with running(one_redis_server.url) as replica:
        whole = await replica.route(request("whole", carried=True))
        streamed = await replica.route(request("streamed", carried=True))
        assert await replica.prefill_complete(streamed.reservation_id)
        replica.runner.round_trips.clear()
        replica.first_token(whole.reservation_id)
        replica.end(whole.reservation_id)
        replica.end(streamed.reservation_id)

        async def released():
            return replica.counted("reservations", event="released")

        await eventually(released, lambda count: count == 2)
        told = [name for names in replica.runner.round_trips for name in names]
        assert [name for name in told if name in ("prefill_complete", "release")] == ["release"]
        assert replica.counted("reservations", event="prefill_complete") == 2
        assert await workers.reserved() == {}
