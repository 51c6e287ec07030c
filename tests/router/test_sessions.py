"""Session affinity, at several replicas on one Redis."""

import asyncio
from collections import Counter

import pytest

from app.core.keys import Keyspace
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers
from tests.router.test_router import PROMPT, request, running

HALF = {"session_affinity": 0.5}


@pytest.fixture
async def workers(redis):
    """w0 to w3, on `one_redis_server`, without any blocks."""
    made = FakeWorkers(redis)
    for n in range(4):
        await made.register(f"w{n}")
    return made


async def remembered(redis, session):
    await eventually(lambda: redis.hexists(KEYS["sessions"], session))


async def route(replica, request_id, session, **options):
    """The decision about a request that then ends."""
    options = {"policy": "latency", "explain": True} | options
    decision = await replica.route(request(request_id, session=session, **options))
    await replica.release(request_id)
    return decision


class TestRoundTrips:
    async def test_a_decision_with_a_session_costs_two(self, one_redis_server, workers):
        async with running(one_redis_server.url, **HALF) as replica:
            await replica.route(request("r0", session="a"))

            async def told():
                return ["remember"] in replica.runner.round_trips

            await eventually(told)
            replica.runner.round_trips.clear()
            await replica.route(request("r1", session="a"))
            assert replica.runner.round_trips[:2] == [["loads", "recall", "match"], ["reserve"]]
            replica.runner.round_trips.clear()
            await asyncio.gather(*(replica.route(request(name, session=name)) for name in "xyz"))
            calls = [name for trip in replica.runner.round_trips for name in trip]
            assert calls.count("recall") == 1

    async def test_without_the_setting_sessions_are_neither_looked_up_nor_kept(
        self, one_redis_server, workers, redis
    ):
        async with running(one_redis_server.url) as replica:
            await replica.route(request("r0", session="a"))
            await replica.route(request("r1", session="a"))
            trips = [name for trip in replica.runner.round_trips for name in trip]
        assert not {"recall", "remember"} & set(trips)
        assert not await redis.exists(KEYS["sessions"])


async def test_each_session_is_written_once_and_requests_without_one_write_nothing(
    one_redis_server, workers, redis
):
    async with running(one_redis_server.url, **HALF) as replica:
        await replica.route(request("r0"))
        replica.runner.round_trips.clear()
        await replica.route(request("r1"))
        assert replica.runner.round_trips == [["loads", "match"], ["reserve"]]
        for session in ("a", "b"):
            await replica.route(request(f"r-{session}", session=session))
            await remembered(redis, session)
            assert await redis.hkeys(KEYS["sessions"]) == [session.encode()]
            await redis.delete(KEYS["sessions"])


async def test_a_session_returns_to_its_worker_through_any_replica(
    one_redis_server, workers, redis
):
    async with (
        running(one_redis_server.url, **HALF, seed=1) as one,
        running(one_redis_server.url, **HALF, seed=2) as two,
    ):
        for session in ("a", "b", "c"):
            first = await route(one, f"{session}0", session)
            await remembered(redis, session)
            places = Counter()
            for n in range(6):
                again = await route(
                    (two, one)[n % 2], f"{session}{n + 1}", session, policy="blocks"
                )
                places[str(again.worker.key)] += 1
                terms = {str(c.info.key): c.terms["affinity"] for c in again.candidates}
                assert {name for name, value in terms.items() if value < 0} == {
                    str(first.worker.key)
                }
            assert places == {str(first.worker.key): 6}


async def test_affinity_gives_way_to_load(one_redis_server, workers, redis):
    async with running(one_redis_server.url, **HALF) as replica:
        first = await route(replica, "r0", "a")
        await remembered(redis, "a")
        await workers.occupy(str(first.worker.key), "x", prefill_s=5.0)
        moved = await route(replica, "r1", "a")
        assert moved.worker != first.worker
        assert [c.terms["affinity"] for c in moved.candidates] == [0.0] * 4


async def test_affinity_gives_way_once_the_queue_is_longer_than_requests_may_find(
    one_redis_server, workers, redis
):
    # What half of it saves outweighs any difference between these queues.
    prompt = list(range(20_000))
    waits = {"wait_queue": 100, "wait_above_s": 50.0}
    async with running(one_redis_server.url, **HALF, **waits) as replica:
        await route(replica, "r0", "a", prompt=prompt)
        await remembered(redis, "a")
        for n in range(4):
            await workers.occupy(f"w{n}", f"x{n}", prefill_s=3600.0)
        one_tenant = await route(replica, "r1", "a", prompt=prompt, reserve=False)
        assert max(-c.terms["affinity"] for c in one_tenant.candidates) > 0
        # Tenants take turns from the first reservation of a second one on.
        await route(replica, "r2", "b", tenant="other")
        query = await route(replica, "r3", "a", prompt=prompt, reserve=False)
        assert [c.terms["affinity"] for c in query.candidates] == [0.0] * 4


async def test_affinity_gives_way_to_blocks_that_are_known_to_be_elsewhere(
    one_redis_server, workers, redis
):
    async with running(one_redis_server.url, **HALF) as replica:
        first = await route(replica, "r0", "a")
        await remembered(redis, "a")
        other = next(f"w{n}" for n in range(4) if f"w{n}:0" != str(first.worker.key))
        await workers.publish(other, PROMPT)
        assert str((await route(replica, "r1", "a")).worker.key) == f"{other}:0"


async def test_a_decision_says_that_the_session_made_the_difference(
    one_redis_server, workers, redis
):
    async with running(one_redis_server.url, session_affinity=1.0) as replica:
        first = await route(replica, "r0", "a")
        await remembered(redis, "a")
        other = next(f"w{n}" for n in range(4) if f"w{n}:0" != str(first.worker.key))
        # One of the prompt's two blocks and a half is known to be there.
        await workers.publish(other, PROMPT[:4])
        again = await route(replica, "r1", "a")
        assert (again.worker, again.locality) == (first.worker, "session")
        assert again.best.worker == f"{other}:0"
        assert replica.counted("locality", reason="session") == 1


async def test_a_session_that_made_no_difference_is_not_given_as_the_reason(
    one_redis_server, workers, redis
):
    async with running(one_redis_server.url, session_affinity=1.0) as replica:
        first = await route(replica, "r0", "a")
        await remembered(redis, "a")
        other = next(f"w{n}" for n in range(4) if f"w{n}:0" != str(first.worker.key))
        await workers.publish(other, PROMPT[:4])
        # Now any worker costs less than that one, session or not.
        await workers.occupy(other, "x", prefill_s=5.0)
        again = await route(replica, "r1", "a")
        assert (again.worker, again.best.worker) == (first.worker, f"{other}:0")
        assert again.locality == "load"


async def test_affinity_does_not_carry_over_to_a_new_incarnation_of_the_worker(
    one_redis_server, workers, redis
):
    async with running(one_redis_server.url, **HALF) as replica:
        first = await route(replica, "r0", "a")
        await remembered(redis, "a")
        name = first.worker.key.worker_id
        await workers.retire(name)
        await workers.register(name)
        again = await route(replica, "r1", "a")
        assert len(again.candidates) == 4
        assert all("affinity" not in c.terms for c in again.candidates)


async def test_a_corrupted_sessions_key_fails_no_decision(one_redis_server, workers, redis):
    async with running(one_redis_server.url, **HALF) as replica:
        await redis.set(KEYS["sessions"], "spoilt")
        decision = await route(replica, "r0", "a")
        assert (decision.degraded, decision.reserved) == (False, True)


def test_sessions_are_in_the_same_hash_slot_as_the_loads():
    # So that a decision asks one node of a Redis Cluster for both.
    assert Keyspace("a")["sessions"].split("}")[0] == Keyspace("a")["load"].split("}")[0]
