"""First tokens and ends that nobody waits for ride with what is sent next."""

import asyncio
from functools import partial

import pytest

from app.core.outcomes import Ending
from app.router import reports
from tests.endings import all_endings
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.router.test_router import request, router, running, workers

__all__ = ["router", "workers"]


@pytest.fixture
def for_good(monkeypatch):
    """Reports wait for a look-up for as long as it takes."""
    monkeypatch.setattr(reports, "SOON_S", 3600.0)


async def counted(replica, event):
    return replica.counted("reservations", event=event)


@pytest.mark.usefixtures("for_good")
async def test_what_a_request_tells_costs_no_round_trip_and_the_next_decision_sees_it(
    router, workers
):
    await workers.register("w1", max_requests=1)
    # Loads the scripts into Redis.
    await router.route(request("r"))
    await router.release("r")
    router.runner.round_trips.clear()
    for n in range(3):
        decision = await router.route(request(f"r{n}", carried=True))
        router.first_token(decision.reservation_id)
        router.end(decision.reservation_id)
    decided = [["release", "loads", "match"], ["reserve"]]
    assert router.runner.round_trips == [["loads", "match"], ["reserve"], *decided, *decided]
    assert set(await workers.reserved()) == {"r2"}
    assert await counted(router, "prefill_complete") == 2
    assert await counted(router, "released") == 3


async def test_where_no_look_up_follows_they_are_told_by_themselves(router, workers):
    await workers.register("w1")
    decision = await router.route(request("r1", carried=True))
    router.end(decision.reservation_id)
    await eventually(workers.reserved, lambda found: found == {})


@pytest.mark.usefixtures("for_good")
async def test_a_caller_that_waits_takes_all_others_along(router, workers):
    await workers.register("w1")
    first, second = [await router.route(request(name, carried=True)) for name in ("r1", "r2")]
    router.end(first.reservation_id)
    assert await router.release(second.reservation_id)
    assert await workers.reserved() == {}


@pytest.mark.usefixtures("for_good")
async def test_many_go_without_waiting_for_a_look_up(router, workers):
    await workers.register("w1")
    names = [f"r{n}" for n in range(reports.AT_ONCE)]
    made = await asyncio.gather(*(router.route(request(name, carried=True)) for name in names))
    for decision in made:
        router.end(decision.reservation_id)
    await eventually(workers.reserved, lambda found: found == {})


@pytest.mark.usefixtures("for_good")
async def test_the_second_word_of_a_request_waits_for_the_answer_to_the_first(router, workers):
    await workers.register("w1")
    first, other = [await router.route(request(name, carried=True)) for name in ("r1", "r2")]
    router.first_token(first.reservation_id)

    async def end_meanwhile():
        router.runner.before_look_up = None
        router.end(first.reservation_id)
        assert await router.release(other.reservation_id)
        assert set(await workers.reserved()) == {"r1"}

    router.runner.before_look_up = end_meanwhile
    await router.route(request("r3", carried=True))
    await eventually(partial(counted, router, "released"), lambda count: count == 2)
    assert set(await workers.reserved()) == {"r3"}
    assert await counted(router, "prefill_complete") == 1
    assert await counted(router, "unknown") == 0


@pytest.mark.usefixtures("for_good")
@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_replica_that_stops_tells_what_is_left(one_redis_server, workers, cut_off):
    """cut_off: amid the look-up that would have taken it along."""
    await workers.register("w1")
    reached = asyncio.Event()

    async def hang():
        reached.set()
        await asyncio.Event().wait()

    async with running(one_redis_server.url) as replica:
        decision = await replica.route(request("r1", carried=True))
        replica.end(decision.reservation_id, Ending(output_tokens=5))
        if cut_off:
            replica.runner.before_look_up = hang
            routing = asyncio.create_task(replica.route(request("r2")))
            await reached.wait()
            routing.cancel()
    assert await workers.reserved() == {}
    [ending] = (await all_endings(workers.redis, KEYS)).values()
    assert ending.output_tokens == 5


@pytest.mark.usefixtures("for_good")
async def test_reports_are_counted_though_the_look_up_finds_no_namespace(redis, router, workers):
    await workers.register("w1")
    decision = await router.route(request("r1", carried=True))
    router.end(decision.reservation_id)
    await redis.flushall()
    assert (await router.route(request("r2"))).degraded
    await eventually(partial(counted, router, "unknown"), lambda count: count == 1)
