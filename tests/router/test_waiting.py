"""Requests that wait for a worker, at one replica and at several."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AllWorkersBusy, NoWorkers
from app.core.settings.kinds import PRIORITY_SHARES
from app.policy.decision import RouteRequest
from app.router import waiting
from app.router.pending import Pending, WaitQueue
from app.state import waiting as state_of_waiting
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import BLOCK_SIZE, KEYS, FakeWorkers
from tests.router.test_router import Replica, request, running

WAITS = {"wait_queue": 100, "wait_timeout_s": 60.0}


@pytest.fixture
async def workers(redis):
    """A fleet, without workers so far, on `one_redis_server`."""
    return FakeWorkers(redis)


@pytest.fixture
async def router(one_redis_server):
    async with running(one_redis_server.url, **WAITS) as replica:
        yield replica


async def waiting_at(*replicas):
    """How many requests wait at them."""
    found = [r.telemetry.registry.get_sample_value("kvroute_waiting_requests") for r in replicas]
    return int(sum(n or 0 for n in found))


async def all_announced(redis, expected):
    """Waits until `expected` tickets are in the queue that replicas share."""

    async def look():
        patterns = [KEYS[family].replace("{", r"\{") + "*" for family in ("waiting:", "picky:")]
        return sum([await redis.zcard(k) for p in patterns async for k in redis.scan_iter(match=p)])

    await eventually(look, lambda found: found == expected)


class Crowd:
    """Requests that wait in the queue, in the order in which they joined."""

    def __init__(self, redis):
        self._redis = redis
        self._numbers = count(1)
        self.tasks = {}
        self.order = []
        """Request ids, in the order in which they were decided."""

    async def join(self, replica, request_id, **options):
        """Returns once the request is in the queue."""
        task = asyncio.ensure_future(replica.route(request(request_id, **options)))
        task.add_done_callback(lambda _: self.order.append(request_id))
        self.tasks[request_id] = task
        await all_announced(self._redis, next(self._numbers))


async def make_room(redis, crowd, replica, first):
    """Ends `first`, then each request that took its slot, until all of the crowd had a turn."""
    await replica.release(first)
    for ended in count(1):
        await eventually(lambda: _decided(crowd), lambda found, n=ended: found >= n)
        if ended == len(crowd.tasks):
            return
        await replica.release(crowd.order[ended - 1])


async def _decided(crowd):
    return len(crowd.order)


@pytest.mark.parametrize(
    ("openings", "workers", "turns"),
    [(5, 1000, 5), (500, 8, 16), (500, 128, 16), (500, 1000, 125), (9000, 4000, 128)],
)
def test_the_more_workers_there_are_the_more_requests_go_at_once(openings, workers, turns):
    assert waiting.turns_at_once(openings, workers) == turns


class TestOff:
    async def test_without_a_queue_nobody_waits(self, one_redis_server, workers):
        await workers.register("w1", max_requests=1)
        async with running(one_redis_server.url, wait_queue=0, wait_above_s=0.5) as replica:
            await workers.occupy("w1", "x", prefill_s=100.0)
            with pytest.raises(AllWorkersBusy, match=r"all eligible workers \(1\) are full$"):
                await replica.route(request("r1"))
            await workers.register("w2", max_requests=2)
            await workers.occupy("w2", "y", prefill_s=100.0)
            # Without a queue, wait_above_s has no effect: a worker with a long one is taken.
            assert (await replica.route(request("r2", tenant="other"))).waited_ms == 0


class TestWhoWaits:
    async def test_a_decision_still_costs_two_round_trips_when_nobody_waits(self, router, workers):
        await workers.register("w1")
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        decision = await router.route(request("r1"))
        assert router.runner.round_trips == [["loads", "match"], ["reserve"]]
        assert (decision.tries, decision.waited_ms) == (1, 0)

    async def test_a_request_that_finds_all_workers_full_is_decided_when_a_slot_is_freed(
        self, router, workers, redis
    ):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = Crowd(redis)
        await crowd.join(router, "r1")
        assert await waiting_at(router) == 1
        assert await workers.reserved() == {"x": "w1:0"}
        await router.release("x")
        decision = await crowd.tasks["r1"]
        assert decision.reserved
        assert decision.waited_ms > 0
        assert await workers.reserved() == {"r1": "w1:0"}
        await all_announced(redis, 0)
        assert await waiting_at(router) == 0
        labels = {"tenant": "other", "priority": "normal"}
        assert router.counted("waits", **labels, outcome="routed") == 1
        assert router.counted("decisions", policy="least_loaded", outcome="routed") == 1

    async def test_a_long_queue_keeps_requests_waiting_once_any_replica_has_another_tenant_s(
        self, one_redis_server, workers, redis
    ):
        await workers.register("w1")
        await workers.register("w2")
        above = WAITS | {"wait_above_s": 50.0}
        async with (
            running(one_redis_server.url, **above) as replica,
            running(one_redis_server.url, **above) as other,
        ):
            await workers.occupy("w1", "x", prefill_s=100.0)
            # w2 has room, so nothing waits: the policy chooses between w1 and w2.
            assert (await replica.route(request("r1", "latency"))).worker.key.worker_id == "w2"
            await workers.occupy("w2", "y", prefill_s=100.0)
            # One tenant's requests have only each other to wait for: the engines' queues do.
            assert (await replica.route(request("r0", "latency"))).waited_ms == 0
            await replica.release("r0")
            assert (await other.route(request("r3", "latency", tenant="other"))).waited_ms == 0
            await other.release("r3")
            crowd = Crowd(redis)
            await crowd.join(replica, "r2")
            assert replica.counted("decisions", policy="least_loaded", outcome="routed") == 0
            await replica.prefill_complete("x")
            assert (await crowd.tasks["r2"]).worker.key.worker_id == "w1"

    async def test_a_long_queue_stops_neither_queries_nor_decisions_without_redis(
        self, own_redis_server
    ):
        async with (
            connect(own_redis_server.url) as redis,
            running(own_redis_server.url, **WAITS, wait_above_s=50.0) as replica,
        ):
            workers = FakeWorkers(redis)
            await workers.register("w1")
            await workers.occupy("w1", "x", prefill_s=100.0)
            query = await replica.route(request("r1", reserve=False))
            assert (query.reserved, query.waited_ms) == (False, 0)
            await asyncio.to_thread(own_redis_server.kill)
            blind = await replica.route(request("r2"))
            assert (blind.degraded, blind.waited_ms) == (True, 0)

    async def test_a_request_without_reservation_does_not_wait(self, router, workers):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        with pytest.raises(AllWorkersBusy):
            await router.route(request("r1", reserve=False))

    async def test_a_request_that_excludes_all_workers_does_not_wait(self, router, workers):
        await workers.register("w1", max_requests=1)
        with pytest.raises(NoWorkers):
            await router.route(request("r1", exclude=frozenset({"w1"})))

    async def test_a_later_request_waits_behind_earlier_ones_even_at_another_replica(
        self, one_redis_server, router, workers, redis
    ):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        async with running(one_redis_server.url, **WAITS) as other:
            crowd = Crowd(redis)
            await crowd.join(router, "early")
            await crowd.join(other, "late")
            await make_room(redis, crowd, router, "x")
        assert crowd.order == ["early", "late"]

    async def test_a_new_request_leaves_the_free_worker_to_one_waiting_at_another_replica(
        self, one_redis_server, router, workers, redis, monkeypatch
    ):
        monkeypatch.setattr(waiting, "TICKET_TTL_MS", 60_000)
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = Crowd(redis)
        async with connect(one_redis_server.url) as other_redis:
            other = Replica(other_redis, **WAITS)
            running_task = asyncio.ensure_future(other.run())
            await crowd.join(other, "early")
            # The request stays in the queue, but nobody asks for its turn.
            running_task.cancel()
            await asyncio.wait([running_task])
            with pytest.raises(NoWorkers, match="is not served here any more"):
                await crowd.tasks.pop("early")
            await router.release("x")
            assert not (await router.route(request("look", reserve=False))).reserved
            await crowd.join(router, "late")
            assert await workers.reserved() == {}
            for task in crowd.tasks.values():
                task.cancel()

    async def test_a_request_routed_again_does_not_wait_for_the_slot_it_holds_itself(
        self, router, workers, redis
    ):
        await workers.register("w1", max_requests=1)
        await router.route(request("again"))
        crowd = Crowd(redis)
        await crowd.join(router, "other")
        crowd.tasks["again"] = asyncio.ensure_future(router.route(request("again", retry=True)))
        assert (await crowd.tasks["other"]).reserved
        await router.release("other")
        assert (await crowd.tasks["again"]).reserved
        assert await workers.reserved() == {"again": "w1:0"}

    async def test_a_request_that_excludes_the_free_worker_holds_up_nobody(
        self, router, workers, redis
    ):
        await workers.register("w1", max_requests=1)
        await workers.register("w2", max_requests=1)
        await workers.occupy("w1", "x")
        await workers.occupy("w2", "y")
        crowd = Crowd(redis)
        await crowd.join(router, "picky", exclude=frozenset({"w1"}))
        await crowd.join(router, "any")
        await router.release("x")
        assert (await crowd.tasks["any"]).worker.key.worker_id == "w1"
        assert await waiting_at(router) == 1
        await router.release("y")
        assert (await crowd.tasks["picky"]).worker.key.worker_id == "w2"

    async def test_a_prompt_too_large_for_the_free_worker_holds_up_nobody(
        self, router, workers, redis
    ):
        await workers.register("large", max_requests=1)
        await workers.register("small", max_requests=1, kv_total_blocks=4)
        await workers.occupy("large", "x")
        await workers.occupy("small", "y")
        crowd = Crowd(redis)
        await crowd.join(router, "long", prompt=range(5 * BLOCK_SIZE))
        await crowd.join(router, "short")
        await router.release("y")
        assert (await crowd.tasks["short"]).worker.key.worker_id == "small"
        assert await waiting_at(router) == 1
        await router.release("x")
        assert (await crowd.tasks["long"]).worker.key.worker_id == "large"


class TestOrder:
    """The order in which waiting requests get the only slot."""

    @pytest.fixture
    async def full(self, workers):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        return workers

    async def test_tenants_share_turns_by_weight_whatever_the_replica_and_however_many_wait(
        self, one_redis_server, full, redis
    ):
        crowd = Crowd(redis)
        async with AsyncExitStack() as stack:
            weighted = WAITS | {"tenant_weights": "gold=2"}
            a, b, c = [
                await stack.enter_async_context(running(one_redis_server.url, **weighted))
                for _ in range(3)
            ]
            # All of gold's requests arrive at one replica, those of plain at all three.
            for n in range(4):
                await crowd.join(a, f"gold{n}", tenant="gold")
            for n, replica in enumerate((a, b, c, a, b, c)):
                await crowd.join(replica, f"plain{n}", tenant="plain")
            await crowd.join(b, "new", tenant="new")
            await make_room(redis, crowd, b, "x")
        # By the time gold has had two turns, each of the others has had one.
        turns_of = [request_id.rstrip("0123456789") for request_id in crowd.order]
        assert Counter(turns_of[:4]) == {"gold": 2, "plain": 1, "new": 1}
        assert Counter(turns_of[4:7]) == {"gold": 2, "plain": 1}
        for tenant in ("gold", "plain"):
            own = [request_id for request_id in crowd.order if request_id.startswith(tenant)]
            assert own == sorted(own)

    async def test_a_higher_priority_overtakes_and_a_lower_one_still_gets_its_turn(
        self, one_redis_server, full, redis
    ):
        crowd = Crowd(redis)
        async with (
            running(one_redis_server.url, **WAITS) as one,
            running(one_redis_server.url, **WAITS) as two,
        ):
            await crowd.join(one, "low", priority="low")
            for n in range(3):
                await crowd.join(two, f"normal{n}")
            for n in range(18):
                await crowd.join(one, f"high{n:02}", priority="high")
            await make_room(redis, crowd, two, "x")
        kinds = [request_id.rstrip("0123456789") for request_id in crowd.order]
        # A priority gets sixteen turns for each turn of the next lower one.
        assert kinds[:15] == ["high"] * 15
        assert sorted(kinds[15:17]) == ["high", "normal"]
        assert kinds[-1] == "low"

    async def test_a_short_prompt_goes_before_a_long_one_of_another_tenant(
        self, router, full, redis
    ):
        crowd = Crowd(redis)
        task = asyncio.ensure_future(
            router.route(RouteRequest("long", [], 4000, "least_loaded", tenant="a"))
        )
        task.add_done_callback(lambda _: crowd.order.append("long"))
        crowd.tasks["long"] = task
        await all_announced(redis, next(crowd._numbers))
        for n in range(3):
            await crowd.join(router, f"short{n}", tenant="b")
        await make_room(redis, crowd, router, "x")
        assert crowd.order == ["short0", "short1", "short2", "long"]

    async def test_only_the_part_of_a_prompt_that_no_worker_holds_counts_towards_its_turn(
        self, router, full, redis
    ):
        held = range(1000, 1400)
        await full.publish("w1", held)
        crowd = Crowd(redis)
        await crowd.join(router, "long", prompt=held, tenant="a")
        for n in range(3):
            await crowd.join(router, f"short{n}", tenant="b")
        await make_room(redis, crowd, router, "x")
        assert crowd.order == ["long", "short0", "short1", "short2"]


class TestWhoGivesUp:
    @pytest.fixture
    async def full(self, workers):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x", prefill_s=30.0)
        return workers

    async def test_a_request_that_has_waited_too_long_is_told_when_to_retry(
        self, one_redis_server, full, redis
    ):
        settings = WAITS | {"wait_timeout_s": 0.05}
        async with running(one_redis_server.url, **settings) as replica:
            with pytest.raises(AllWorkersBusy, match=r"no worker had room within 0\.05 s") as busy:
                await replica.route(request("r1"))
            assert 20 < busy.value.retry_after_s <= 30
            await all_announced(redis, 0)
            labels = {"tenant": "other", "priority": "normal"}
            assert replica.counted("waits", **labels, outcome="timed_out") == 1
            assert replica.counted("decisions", policy="least_loaded", outcome="all_busy") == 1
        assert set(await full.reserved()) == {"x"}

    async def test_a_caller_that_hangs_up_leaves_the_line_and_gets_no_reservation(
        self, router, full, redis
    ):
        crowd = Crowd(redis)
        await crowd.join(router, "gone")
        await crowd.join(router, "stays")
        crowd.tasks["gone"].cancel()
        await all_announced(redis, 1)
        await router.release("x")
        assert (await crowd.tasks["stays"]).reserved
        assert set(await full.reserved()) == {"stays"}
        labels = {"tenant": "other", "priority": "normal"}
        assert router.counted("waits", **labels, outcome="gone") == 1

    async def test_a_caller_that_hangs_up_during_its_decision_keeps_no_reservation(
        self, router, full, redis
    ):
        crowd = Crowd(redis)

        async def hang_up():
            crowd.tasks["gone"].cancel()

        await crowd.join(router, "gone")
        router.runner.before_reserve = hang_up
        await router.release("x")
        await asyncio.wait([crowd.tasks["gone"]])
        await eventually(full.reserved, lambda found: found == {})
        await all_announced(redis, 0)

    async def test_a_replica_that_stops_refuses_waiting_and_new_requests(self, router, full, redis):
        crowd = Crowd(redis)
        await crowd.join(router, "r1")
        await router.stop()
        with pytest.raises(AllWorkersBusy, match="this router replica is stopping"):
            await crowd.tasks["r1"]
        await all_announced(redis, 0)
        with pytest.raises(AllWorkersBusy, match="this router replica is stopping"):
            await router.route(request("r2"))

    async def test_a_replica_that_ends_takes_its_tickets_out_of_the_line(
        self, one_redis_server, full, redis, monkeypatch
    ):
        monkeypatch.setattr(waiting, "PAUSE_PER_WORKER_S", 60.0)
        async with running(one_redis_server.url, **WAITS) as replica:
            crowd = Crowd(redis)
            await crowd.join(replica, "r1")
            crowd.tasks["r1"].cancel()
            await asyncio.wait([crowd.tasks["r1"]])
        assert not await redis.exists(KEYS["flows"])

    async def test_when_too_many_requests_wait_the_tenant_with_the_most_gives_way(
        self, one_redis_server, full, redis
    ):
        async with running(one_redis_server.url, **WAITS | {"wait_queue": 3}) as replica:
            crowd = Crowd(redis)
            for n in range(3):
                await crowd.join(replica, f"flood{n}", tenant="flood")
            with pytest.raises(AllWorkersBusy, match="3 requests are already waiting for a worker"):
                await replica.route(request("flood3", tenant="flood"))
            modest = asyncio.ensure_future(replica.route(request("modest", tenant="modest")))
            with pytest.raises(AllWorkersBusy, match="3 requests are already waiting for a worker"):
                await crowd.tasks["flood2"]
            assert await waiting_at(replica) == 3
            labels = {"tenant": "other", "priority": "normal"}
            assert replica.counted("waits", **labels, outcome="crowded_out") == 2
            await replica.release("x")
            first = await eventually(full.reserved, lambda found: found)
            await replica.release(*first)
            assert (await modest).reserved


class TestTrouble:
    async def test_a_replica_that_was_killed_holds_up_the_others_only_briefly(
        self, one_redis_server, router, workers, redis
    ):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = Crowd(redis)
        async with connect(one_redis_server.url) as other_redis:
            killed = Replica(other_redis, **WAITS)
            running_task = asyncio.ensure_future(killed.run())
            await crowd.join(killed, "lost")
            # As after kill -9: no further calls.
            running_task.cancel()
            await asyncio.wait([running_task])
            await crowd.join(router, "r1")
            await router.release("x")
            assert (await crowd.tasks["r1"]).reserved
            assert await workers.reserved() == {"r1": "w1:0"}
            await all_announced(redis, 0)
            with pytest.raises(NoWorkers, match="is not served here any more"):
                await crowd.tasks["lost"]

    async def test_however_many_wait_redis_is_told_of_a_few_at_a_time(
        self, router, workers, redis, monkeypatch
    ):
        monkeypatch.setattr(waiting, "MAX_NAMED", 3)
        monkeypatch.setattr(waiting, "NAME_S", 0.05)
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = [asyncio.ensure_future(router.route(request(f"r{i}"))) for i in range(10)]
        await all_announced(redis, 10)
        # Somebody takes all of them out: before long, each is named again.
        await redis.delete(KEYS["waiting:normal:"])
        await all_announced(redis, 10)
        assert router.runner.most_named == 3
        for task in crowd:
            task.cancel()

    async def test_however_much_room_there_is_few_turns_are_given_at_once(
        self, router, workers, redis, monkeypatch
    ):
        monkeypatch.setattr(waiting, "MIN_TURNS", 2)
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = Crowd(redis)
        for i in range(5):
            await crowd.join(router, f"r{i}")
        await workers.register("w2", max_requests=100)
        await asyncio.gather(*crowd.tasks.values())
        assert router.runner.most_turns == 2

    async def test_many_releases_do_not_make_a_replica_of_a_large_fleet_look_at_loads_all_the_time(
        self, workers, router, redis, monkeypatch
    ):
        steps = 0
        step = waiting.Waiting._step

        async def counted(self):
            nonlocal steps
            steps += 1
            return await step(self)

        monkeypatch.setattr(waiting.Waiting, "_step", counted)
        monkeypatch.setattr(waiting, "PAUSE_PER_WORKER_S", 0.5)
        await workers.register("w1", max_requests=1)
        await router.route(request("first"))
        crowd = Crowd(redis)
        await crowd.join(router, "waits")
        for _ in range(50):
            await router.release("unknown")
        assert steps < 25
        await router.release("first")
        assert (await crowd.tasks["waits"]).reserved

    async def test_a_request_waiting_when_redis_fails_gets_a_degraded_decision(
        self, own_redis_server
    ):
        async with (
            connect(own_redis_server.url) as redis,
            running(own_redis_server.url, **WAITS) as router,
        ):
            workers = FakeWorkers(redis)
            await workers.register("w1", max_requests=1)
            await workers.occupy("w1", "x")
            crowd = Crowd(redis)
            await crowd.join(router, "r1")
            await asyncio.to_thread(own_redis_server.kill)
            decision = await crowd.tasks["r1"]
            assert (decision.degraded, decision.reserved) == (True, False)
            assert await waiting_at(router) == 0

    async def test_a_waiting_request_is_not_decided_with_those_whose_reservation_was_lost(
        self, router, workers
    ):
        await workers.register("w1", max_requests=1)
        await workers.register("w2")
        await workers.occupy("w1", "x")
        router.runner.answer_is_lost = True
        lost = asyncio.ensure_future(router.route(request("r1")))
        waits = asyncio.ensure_future(router.route(request("r2", exclude=frozenset({"w2"}))))
        assert (await lost).degraded
        router.runner.answer_is_lost = False
        await router.release("x")
        decision = await waits
        assert (decision.degraded, decision.waited_ms > 0) == (False, True)

    @pytest.mark.parametrize(
        "key", ["line", "flows", "easy_flows", "waiting:normal:", "picky:normal:"]
    )
    async def test_a_line_that_was_deleted_is_rebuilt(self, router, workers, redis, key):
        await workers.register("w1", max_requests=1)
        await workers.occupy("w1", "x")
        crowd = Crowd(redis)
        await crowd.join(router, "r1")
        await redis.delete(KEYS[key])
        await router.release("x")
        assert (await crowd.tasks["r1"]).reserved
        await eventually(lambda: redis.exists(KEYS["flows"]), lambda found: not found)

    async def test_two_replicas_with_many_waiting_requests_overfill_no_worker(
        self, one_redis_server, workers
    ):
        await workers.register("w1", max_requests=3)
        await workers.register("w2", max_requests=4)
        async with (
            running(one_redis_server.url, **WAITS) as one,
            running(one_redis_server.url, **WAITS) as two,
        ):
            tasks = [
                asyncio.ensure_future((one, two)[n % 2].route(request(f"r{n}", tenant=f"t{n % 5}")))
                for n in range(80)
            ]
            ended = set()
            while len(ended) < 80:
                reserved = await eventually(workers.reserved, lambda found: set(found) - ended)
                on = Counter(reserved.values())
                assert on["w1:0"] <= 3
                assert on["w2:0"] <= 4
                for request_id in reserved.keys() - ended:
                    await one.release(request_id)
                    ended.add(request_id)
            decisions = await asyncio.gather(*tasks)
            assert all(d.reserved for d in decisions)
            assert await workers.reserved() == {}


# The queue of one replica, without Redis


def queued(flow, number, weight):
    ticket = state_of_waiting.ticket(
        flow, "x", number, tokens=1, weight=weight, picky=False, since_ms=number
    )
    waits = {"ticket": ticket, "weight": weight, "tenant": flow, "since_s": float(number)}
    return Pending(request(str(number)), "a", answer=None, **waits)


FLOWS = {"a": 1.0, "b": 1.0, "c": 4.0, "d": 0.25}


@given(
    capacity=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(list(FLOWS)), st.booleans()), max_size=60),
)
def test_a_wait_queue_holds_what_a_list_would(capacity, steps):
    queue = WaitQueue(capacity)
    model = []
    for number, (flow, enters) in enumerate(steps):
        if enters or not model:
            one = queued(flow, number, FLOWS[flow])
            gone = queue.enter(one)
            model.append(one)
            if len(model) > capacity:
                held = Counter(w.ticket.flow for w in model)
                crowding = {f: n / FLOWS[f] for f, n in held.items()}
                assert gone is not None
                # The latest of the most crowded flow gives way; among equals, the newcomer.
                assert crowding[gone.ticket.flow] == max(crowding.values())
                assert gone is one or crowding[flow] < max(crowding.values())
                assert gone is [w for w in model if w.ticket.flow == gone.ticket.flow][-1]
                model.remove(gone)
            else:
                assert gone is None
        else:
            one = next((w for w in model if w.ticket.flow == flow), model[0])
            model.remove(one)
            queue.remove(one)
            queue.remove(one)
        assert len(queue) == len(model) <= capacity
        assert sorted(w.since_s for w in queue) == sorted(w.since_s for w in model)
        for w in model:
            assert queue.get(w.ticket.flow, w.ticket.name) is w


def test_a_higher_priority_has_a_larger_share():
    shares = list(PRIORITY_SHARES.values())
    assert shares == sorted(shares, reverse=True)
    assert PRIORITY_SHARES["normal"] == 1.0


def of_holder(holder, flow, number):
    one = queued(flow, number, 1.0)
    one.request.holder = holder
    return one


def test_who_names_many_tenants_takes_no_places_from_other_callers():
    queue = WaitQueue(10)
    for number in range(30):
        queue.enter(of_holder("a", f"tenant-{number}", number))
    for number in range(30, 35):
        gone = queue.enter(of_holder("b", "b", number))
        assert gone is not None
        assert gone.request.holder == "a"
    gone = queue.enter(of_holder("b", "b", 35))
    assert gone is not None
    assert gone.request.request_id == "35"
    assert len(queue) == 10


def test_of_a_callers_flows_the_one_with_most_makes_room():
    queue = WaitQueue(6)
    for number, flow in enumerate("ppppq"):
        queue.enter(of_holder("a", flow, number))
    queue.enter(of_holder("b", "p", 5))
    gone = queue.enter(of_holder("b", "p", 6))
    assert gone is not None
    assert (gone.request.holder, gone.request.request_id) == ("a", "3")
