import asyncio
import logging
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count

import pytest
from redis.exceptions import NoScriptError

from app.core.chains import shard_of
from app.core.errors import (
    AllWorkersBusy,
    NoWorkers,
    RedisUnavailable,
    RouterOverloaded,
    Superseded,
)
from app.core.failures import REPORTED
from app.core.hashing import compute_hashes
from app.core.limits import MAX_MEASURED
from app.core.roles import Role
from app.core.settings.router import RouterSettings
from app.core.trust import Trust
from app.core.types import TierOverlap
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, Speed
from app.edge.app import create_app
from app.local.redis_server import free_port
from app.policy.answers import Answer
from app.policy.cost import COMPUTING, IN_FLIGHT_TOKENS
from app.policy.decision import Decision, RouteRequest
from app.policy.policies import POLICIES
from app.policy.transfer import MAX_PREFILL_S
from app.router.decider import MAX_BATCH, MAX_QUEUED, MAX_TRIES
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state import in_flight
from app.state.connect import connect
from app.state.records import ReserveRow
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import BLOCK_SIZE, KEYS, NAMESPACE, FakeWorkers
from tests.redis_servers import stopped

# Two full blocks of four tokens, and a partial third.
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
TIMEOUT_S = 5.0
HOUSEKEEPING = {"expire", "sweep", "absent", "record"}


class ScriptedRunner(ScriptRunner):
    """Records the round trips of decisions, and lets a test act between them.

    round_trips: the scripts of each, in order. num_wishes: reservations that it asked for.
    most_named, most_turns: tickets of waiting requests and turns asked for, in one call.
    before_look_up, after_look_up, before_reserve: awaited each time. answer_is_lost: Redis
    reserves, but its answer does not arrive in time.
    """

    def __init__(self, redis):
        super().__init__(redis, TIMEOUT_S)
        self.round_trips = []
        self.num_wishes = 0
        self.most_named = 0
        self.most_turns = 0
        self.before_look_up = None
        self.after_look_up = None
        self.before_reserve = None
        self.answer_is_lost = False

    async def _send(self, node, calls, until_s):
        names = [c.name for c in calls]
        if not names or names[0] in HOUSEKEEPING:
            return await super()._send(node, calls, until_s)
        named = [sum(str(a).endswith(" -") for a in c.args) for c in calls]
        self.most_named = max(self.most_named, *named)
        turns = [int(c.args[1]) for c in calls if c.name == "turns"]
        self.most_turns = max(self.most_turns, *turns, 0)
        if "loads" in names and self.before_look_up:
            await self.before_look_up()
        if "reserve" in names and self.before_reserve:
            await self.before_reserve()
        replies = await super()._send(node, calls, until_s)
        ran = not isinstance(replies[0], NoScriptError)
        if ran:  # else a Redis that is new gets the scripts, and the calls once more
            self.round_trips.append(names)
            rows = [c.args[4:] for c in calls if c.name == "reserve"]
            self.num_wishes += sum(len(row) // len(ReserveRow._fields) for row in rows)
        if "reserve" in names and ran and self.answer_is_lost:
            raise TimeoutError
        if "match" in names and self.after_look_up:  # not those that only refresh the loads
            await self.after_look_up()
        return replies


class Replica(Router):
    """A router on a connection pool of its own, with its runner accessible."""

    def __init__(self, redis, keyspace=KEYS, **settings):
        chosen = RouterSettings(namespace=NAMESPACE, **{"seed": 7, "wait_queue": 0} | settings)
        self.runner = ScriptedRunner(redis)
        super().__init__(
            self.runner, keyspace, chosen, Fleet(redis, keyspace, TIMEOUT_S), telemetry=Telemetry()
        )

    def meanwhile(self, act):
        """To be done once, before the next reservation."""

        async def once():
            self.runner.before_reserve = None
            await act()

        self.runner.before_reserve = once

    def counted(self, name, **labels):
        return self.telemetry.registry.get_sample_value(f"kvroute_{name}_total", labels) or 0.0

    def conflicts(self):
        """The counts by reason, without zeros."""
        reasons = ("changed", "full", "lapsed")
        found = {r: self.counted("reserve_conflicts", reason=r) for r in reasons}
        return {reason: count for reason, count in found.items() if count}


@asynccontextmanager
async def running(redis_url, **settings):
    """A replica while it runs."""
    async with connect(redis_url) as redis, asyncio.TaskGroup() as tasks:
        replica = Replica(redis, **settings)
        task = tasks.create_task(replica.run())
        try:
            yield replica
        finally:
            task.cancel()


def request(request_id, policy="least_loaded", *, prompt=PROMPT, **options):
    _, chain = compute_hashes(prompt, BLOCK_SIZE)
    return RouteRequest(request_id, chain, len(prompt), policy, **options)


async def route_all(replica, *requests):
    return await asyncio.gather(*map(replica.route, requests), return_exceptions=True)


def placed(answers):
    """Counts decisions by worker id, and errors by name."""
    return Counter(
        a.worker.key.worker_id if isinstance(a, Decision) else type(a).__name__ for a in answers
    )


@pytest.fixture
async def workers(redis):
    """A fleet, without workers so far, on `one_redis_server`."""
    return FakeWorkers(redis)


@pytest.fixture
async def router(one_redis_server):
    async with running(one_redis_server.url) as replica:
        yield replica


async def test_a_worker_with_an_absurd_speed_makes_no_decision_fail(one_redis_server, workers):
    incarnation = await workers.register("w1")
    absurd = Speed(**dict.fromkeys(asdict(DEFAULT_SPEED), MAX_MEASURED))
    async with running(one_redis_server.url) as router:

        async def speed():
            return router.fleet.measured(incarnation).speed

        await workers.report("w1", ForwardPassMetrics(), absurd)
        await eventually(speed, absurd.__eq__)
        for n, policy in enumerate(POLICIES):
            decision = await router.route(request(f"r{n}", policy))
            assert decision.worker.key.worker_id == "w1"
    load = await workers.load("w1")
    assert load.requests == len(POLICIES)
    assert load.queue_s(0) <= len(POLICIES) * MAX_PREFILL_S


class TestRoundTrips:
    async def test_a_decision_costs_two(self, router, workers):
        await workers.register("w1")
        # Loads the scripts into Redis.
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        decision = await router.route(request("r1"))
        assert router.runner.round_trips == [["loads", "match"], ["reserve"]]
        assert decision.tries == 1

    async def test_a_long_prompt_with_the_prefix_of_an_earlier_one_costs_two(self, router, workers):
        await workers.register("w1")
        await workers.register("w2")
        system_prompt, rest = list(range(700 * BLOCK_SIZE)), [1] * (300 * BLOCK_SIZE)
        prompts = [[*system_prompt, n, *rest] for n in range(2)]
        for worker, prompt in zip(("w1", "w2"), prompts, strict=True):
            await workers.publish(worker, prompt)
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        for n, prompt in enumerate(prompts, 1):
            await router.route(request(f"r{n}", prompt=prompt))
        look_up = ["loads", "match"]
        assert router.runner.round_trips == [
            *(look_up, ["match"], ["reserve"]),
            *(look_up, ["reserve"]),
        ]

    async def test_a_decision_without_reservation_costs_one(self, router, workers):
        await workers.register("w1")
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        await router.route(request("r1", reserve=False))
        assert [trip for trip in router.runner.round_trips if trip] == [["loads", "match"]]

    async def test_a_refusal_costs_one_and_that_of_a_retry_two(self, router, workers):
        await workers.register("w1", max_requests=1)
        # Refusing the second loads the script into Redis.
        assert placed(await route_all(router, request("r0"), request("r1"))) == {
            "w1": 1,
            "AllWorkersBusy": 1,
        }
        # This loads that which releases.
        with pytest.raises(AllWorkersBusy):
            await router.route(request("r2", retry=True))
        router.runner.round_trips.clear()
        with pytest.raises(AllWorkersBusy):
            await router.route(request("r2"))
        assert router.runner.round_trips == [["loads", "match"]]
        router.runner.round_trips.clear()
        with pytest.raises(AllWorkersBusy):
            await router.route(request("r2", retry=True))
        # Releases what it may hold itself: that could be why it was refused.
        assert router.runner.round_trips == [["loads", "match"], ["release"]]

    async def test_decisions_in_a_batch_share_them(self, router, workers):
        await workers.register("w1")
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        await workers.redis.config_resetstat()
        answers = await route_all(router, *(request(f"r{n}") for n in range(1, 65)))
        assert placed(answers) == {"w1": 64}
        assert MAX_BATCH == 64
        # Sixteen prompts are looked up by one call.
        assert router.runner.round_trips == [["loads", *["match"] * 4], ["reserve"]]
        # By Redis's own count: six script runs, plus those of housekeeping.
        stats = await workers.redis.info("commandstats")
        assert 6 <= stats["cmdstat_evalsha"]["calls"] < 17

    async def test_one_request_more_than_a_batch_takes_another_two(self, router, workers):
        await workers.register("w1")
        await router.route(request("r0"))
        router.runner.round_trips.clear()
        router.runner.num_wishes = 0
        await route_all(router, *(request(f"r{n}") for n in range(1, 66)))
        assert [len(trip) for trip in router.runner.round_trips] == [5, 1, 2, 1]
        assert router.runner.num_wishes == 65


class TestOneReplica:
    async def test_decisions_made_together_see_each_other(self, router, workers):
        for name in ("w1", "w2", "w3"):
            await workers.register(name)
        answers = await route_all(router, *(request(f"r{n}") for n in range(12)))
        assert placed(answers) == {"w1": 4, "w2": 4, "w3": 4}
        assert [(await workers.load(n)).requests for n in ("w1", "w2", "w3")] == [4, 4, 4]

    async def test_predicted_prefill_time_is_reserved_whatever_the_policy(self, router, workers):
        policies = ("latency", "least_loaded", "round_robin")
        for name in policies:
            await workers.register(name)
        for name in policies:
            others = frozenset(policies) - {name}
            await router.route(request(f"r-{name}", name, exclude=others))
        prefill_us = {(await workers.load(name)).prefill_us for name in policies}
        assert len(prefill_us) == 1
        assert prefill_us.pop() > 0

    async def test_a_replica_never_conflicts_with_itself(self, router, workers):
        await workers.register("w1", max_requests=100)
        await workers.register("w2", max_requests=100)
        await workers.publish("w1", PROMPT)
        policies = ("latency", "blocks", "logit", "least_loaded", "random")
        for policy in policies:
            await route_all(router, *(request(f"{policy}{n}", policy) for n in range(30)))
        assert router.conflicts() == {}
        assert router.counted("decision_retries") == 0
        assert len(await workers.reserved()) == 150

    async def test_a_batch_stops_exactly_when_the_fleet_is_full(self, router, workers):
        await workers.register("w1", max_requests=2)
        await workers.register("w2", max_requests=3)
        answers = await route_all(router, *(request(f"r{n}") for n in range(8)))
        assert placed(answers) == {"w1": 2, "w2": 3, "AllWorkersBusy": 3}
        assert router.conflicts() == {}

    async def test_a_request_routed_again_is_not_refused_because_of_the_slot_it_holds(
        self, router, workers
    ):
        await workers.register("w1", max_requests=2)
        await route_all(router, request("a"), request("b"))
        asked = [request("a", retry=True), request("c"), request("b", retry=True)]
        answers = await route_all(router, *asked)
        # All three find w1 full; a and b then give up what they hold and are decided again.
        assert placed(answers) == {"w1": 2, "AllWorkersBusy": 1}
        assert len(await workers.reserved()) == 2
        for _ in range(2):
            held = set(await workers.reserved())
            asked = [request(name, retry=True) for name in sorted(held)]
            again = await route_all(router, *asked)
            assert placed(again) == {"w1": 2}
            assert set(await workers.reserved()) == held

    async def test_a_decision_without_reservation_takes_no_round_robin_turn(self, router, workers):
        for name in ("w1", "w2"):
            await workers.register(name)
        chosen = []
        for n in range(8):
            await router.route(request(f"look{n}", "round_robin", reserve=False))
            chosen.append(await router.route(request(f"r{n}", "round_robin")))
        assert placed(chosen) == {"w1": 4, "w2": 4}

    @pytest.mark.parametrize(("policy", "temperature"), [("power_of_two", 0.0), ("blocks", 1000.0)])
    async def test_a_random_draw_is_not_reported_as_load(
        self, one_redis_server, workers, policy, temperature
    ):
        for name in ("w1", "w2", "w3"):
            await workers.register(name)
        await workers.publish("w1", PROMPT)
        await workers.occupy("w2", "a")
        await workers.occupy("w3", "b")
        async with running(one_redis_server.url, temperature=temperature) as replica:
            looks = [
                await replica.route(request(f"r{n}", policy, reserve=False)) for n in range(30)
            ]
        # w1 is also the cheapest, so only a draw leads elsewhere.
        assert {(d.worker.key.worker_id == "w1", d.locality) for d in looks} == {
            (True, "kept"),
            (False, "tie"),
        }

    async def test_equal_workers_are_reported_as_tied(self, router, workers):
        await workers.register("w1")
        await workers.register("w2")
        assert (await router.route(request("r1"))).tied
        assert not (await router.route(request("r2"))).tied

    @pytest.mark.parametrize("policy", ["latency", "blocks", "logit"])
    async def test_a_worker_too_small_for_the_prompt_loses_its_locality_as_if_full(
        self, router, workers, policy
    ):
        await workers.register("w1", kv_total_blocks=2)
        await workers.register("w2")
        await workers.publish("w1", PROMPT[:8])
        decision = await router.route(request("r1", policy))
        assert (decision.worker.key.worker_id, decision.best.worker) == ("w2", "w1:0")
        assert decision.locality == "full"

    async def test_any_of_several_workers_with_the_longest_overlap_keeps_the_locality(
        self, router, workers
    ):
        for name in ("w1", "w2"):
            await workers.register(name)
            await workers.publish(name, PROMPT)
        for worker, other in (("w1", "w2"), ("w2", "w1")):
            await workers.occupy(other, f"on-{other}")
            decision = await router.route(request(f"r-{worker}"))
            assert decision.worker.key.worker_id == worker
            assert (decision.locality, decision.best.worker) == ("kept", f"{worker}:0")

    async def test_a_request_that_gets_no_worker_does_not_affect_the_rest_of_its_batch(
        self, router, workers
    ):
        await workers.register("w1")
        answers = await route_all(
            router, request("a"), request("b", exclude=frozenset({"w1"})), request("c")
        )
        assert [type(a) for a in answers] == [Decision, NoWorkers, Decision]
        assert set(await workers.reserved()) == {"a", "c"}

    async def test_a_request_beyond_max_queued_is_refused(self, one_redis_server, workers):
        await workers.register("w1", max_requests=2000)
        async with connect(one_redis_server.url) as redis:
            replica = Replica(redis)
            answers = asyncio.gather(
                *(replica.route(request(f"r{n}")) for n in range(MAX_QUEUED + 1)),
                return_exceptions=True,
            )
            # Nothing is decided until all requests are queued.
            await asyncio.sleep(0)
            async with asyncio.TaskGroup() as tasks:
                deciding = tasks.create_task(replica.run())
                assert placed(await answers) == {"w1": MAX_QUEUED, "RouterOverloaded": 1}
                deciding.cancel()
            assert isinstance(answers.result()[MAX_QUEUED], RouterOverloaded)
            policy = "least_loaded"
            assert replica.counted("decisions", policy=policy, outcome="overloaded") == 1
            assert replica.counted("decisions", policy=policy, outcome="routed") == MAX_QUEUED

    async def test_nothing_is_reserved_for_a_caller_that_has_gone(self, one_redis_server, workers):
        await workers.register("w1")
        async with connect(one_redis_server.url) as redis:
            replica = Replica(redis)
            async with asyncio.TaskGroup() as tasks:
                gone = tasks.create_task(replica.route(request("gone")))
                waits = tasks.create_task(replica.route(request("waits")))
                await asyncio.sleep(0)
                gone.cancel()
                deciding = tasks.create_task(replica.run())
                await waits
                deciding.cancel()
            assert await workers.reserved() == {"waits": "w1:0"}
            policy = "least_loaded"
            assert replica.counted("decisions", policy=policy, outcome="routed") == 1
            assert replica.counted("decisions", policy=policy, outcome="gone") == 1

    async def test_the_reservation_of_a_caller_that_goes_as_it_is_answered_is_released(
        self, router, workers
    ):
        await workers.register("w1")
        gone = asyncio.ensure_future(router.route(request("gone")))
        # This sees the reservation before the caller, which is woken a step later.
        while not router.counted("reservations", event="made"):  # noqa: ASYNC110 - at once
            await asyncio.sleep(0)
        assert not gone.done()
        gone.cancel()
        await eventually(workers.reserved, lambda found: found == {})
        assert gone.cancelled()

    async def test_reservations_of_callers_that_have_gone_are_released_before_a_replica_stops(
        self, one_redis_server, workers
    ):
        await workers.register("w1")
        async with running(one_redis_server.url) as replica:
            replica.abandon(await replica.route(request("r1")))
        assert await workers.reserved() == {}


async def test_a_changed_number_of_shards_costs_no_overlap(router, workers):
    await workers.register("w1")
    await workers.publish("w1", PROMPT)
    await router.route(request("r0"))
    root = request("r1").chain[0]
    router.fleet.shards = next(n for n in range(2, 64) if shard_of(root, n))
    assert (await router.route(request("r1"))).overlap.device == 2


class TestConflicts:
    async def test_two_replicas_never_overfill_a_worker_and_place_as_one_would(
        self, one_redis_server, workers
    ):
        await workers.register("w1", max_requests=8)
        await workers.register("w2", max_requests=8)
        async with (
            running(one_redis_server.url) as first,
            running(one_redis_server.url, seed=8) as second,
        ):
            # Both have looked at the empty fleet before either reserves.
            both = asyncio.Barrier(2)
            for replica in (first, second):
                replica.runner.after_look_up = both.wait
            answers = await asyncio.gather(
                route_all(first, *(request(f"a{n}") for n in range(12))),
                route_all(second, *(request(f"b{n}") for n in range(12))),
            )
            decisions = [a for some in answers for a in some if isinstance(a, Decision)]
            assert placed([a for some in answers for a in some]) == {
                "w1": 8,
                "w2": 8,
                "AllWorkersBusy": 8,
            }
            assert set(await workers.reserved()) == {d.request_id for d in decisions}
            loads = [await workers.load(name) for name in ("w1", "w2")]
            assert [load.requests for load in loads] == [8, 8]
            # Refused, counted and decided again.
            refused = sum(sum(replica.conflicts().values()) for replica in (first, second))
            again = sum(replica.counted("decision_retries") for replica in (first, second))
            tried = sum(replica.runner.num_wishes for replica in (first, second))
            assert refused == again >= 12
            assert tried == 16 + refused

    async def test_a_request_that_was_overtaken_is_decided_again_from_fresh_loads(
        self, router, workers
    ):
        await workers.register("w1")
        await workers.register("w2")
        await workers.publish("w1", PROMPT)
        await workers.occupy("w2", "z")
        router.meanwhile(lambda: workers.occupy("w1", "x", "y"))
        decision = await router.route(request("r1", explain=True))
        assert (decision.worker.key.worker_id, decision.tries) == ("w2", 2)
        assert [c.load.requests for c in decision.candidates] == [2, 1]
        assert router.conflicts() == {"changed": 1}
        assert router.counted("decision_retries") == 1
        assert router.runner.round_trips[-2:] == [["reserve"], ["reserve"]]

    async def test_a_request_planned_after_a_refused_one_is_decided_again_as_well(
        self, router, workers
    ):
        await workers.register("w1")
        await workers.register("w2", max_requests=0)
        # r1 saw no reservation on w1 and is refused. r2, planned after r1, expects one, and
        # there is one by then: x's instead of r1's.
        router.meanwhile(lambda: workers.occupy("w1", "x"))
        answers = await route_all(router, request("r1"), request("r2"))
        assert [a.tries for a in answers if isinstance(a, Decision)] == [2, 2]
        assert router.conflicts() == {"changed": 2}
        assert await workers.reserved() == dict.fromkeys(("r1", "r2", "x"), "w1:0")
        assert (await workers.load("w1")).requests == 3

    async def test_overlaps_already_found_still_count_in_the_next_try(self, router, workers):
        await workers.register("w1")
        await workers.register("w2")
        await workers.publish("w1", PROMPT)
        router.meanwhile(lambda: workers.occupy("w1", "x"))
        decision = await router.route(request("r1", "logit"))
        assert (decision.worker.key.worker_id, decision.tries) == ("w1", 2)
        assert decision.overlap.device == 2
        # Ten tokens less the eight cached, and four of x.
        assert (await workers.load("w1")).prefill_tokens == 6

    async def test_a_prompt_that_is_cached_whole_still_has_a_token_to_compute(
        self, router, workers
    ):
        await workers.register("w1")
        await workers.publish("w1", PROMPT[:8])
        decision = await router.route(request("r1", prompt=PROMPT[:8]))
        assert decision.overlap.device == 2
        assert (await workers.load("w1")).prefill_tokens == 1

    async def test_a_worker_that_left_meanwhile_is_not_chosen_again(self, router, workers):
        await workers.register("w1")
        await workers.register("w2")
        await workers.publish("w1", PROMPT)
        router.meanwhile(lambda: workers.retire("w1"))
        decision = await router.route(request("r1", "logit"))
        assert (decision.worker.key.worker_id, decision.tries) == ("w2", 2)
        assert router.conflicts() == {"lapsed": 1}

    async def test_a_worker_that_joined_meanwhile_may_be_chosen(self, router, workers):
        await workers.register("w1")

        async def join():
            await workers.occupy("w1", "x")
            await workers.register("w2")

        router.meanwhile(join)
        decision = await router.route(request("r1"))
        assert decision.worker.address == "http://w2-0:80"

    async def test_the_last_try_reserves_even_if_the_worker_has_changed(self, router, workers):
        await workers.register("w1", max_requests=MAX_TRIES + 1)
        rivals = (f"x{n}" for n in range(MAX_TRIES))

        async def overtake():
            await workers.occupy("w1", next(rivals))

        router.runner.before_reserve = overtake
        decision = await router.route(request("r1"))
        assert decision.tries == MAX_TRIES
        assert (await workers.load("w1")).requests == MAX_TRIES + 1
        assert router.conflicts() == {"changed": MAX_TRIES - 1}
        assert router.counted("decision_retries") == MAX_TRIES - 1

    async def test_even_the_last_try_overfills_no_worker(self, router, workers):
        await workers.register("w1", max_requests=MAX_TRIES)
        rivals = (f"x{n}" for n in range(MAX_TRIES))

        async def overtake():
            await workers.occupy("w1", next(rivals))

        router.runner.before_reserve = overtake
        with pytest.raises(
            AllWorkersBusy, match=f"no worker could be reserved in {MAX_TRIES} tries"
        ):
            await router.route(request("r1"))
        assert (await workers.load("w1")).requests == MAX_TRIES
        assert router.conflicts() == {"changed": MAX_TRIES - 1, "full": 1}
        assert router.counted("decision_retries") == MAX_TRIES - 1
        assert "r1" not in await workers.reserved()


@asynccontextmanager
async def beside(server, **settings):
    """Workers and a replica that share a Redis."""
    async with connect(server.url) as redis, running(server.url, **settings) as router:
        yield FakeWorkers(redis), router


class TestWithoutRedis:
    async def test_a_batch_is_spread_by_the_loads_last_seen(self, own_redis_server):
        async with beside(own_redis_server) as (workers, router):
            await workers.register("w1")
            await workers.register("w2")
            await workers.occupy("w1", "a", "b")
            await router.refresh()
            await asyncio.to_thread(own_redis_server.kill)
            answers = await route_all(router, *(request(f"r{n}", "logit") for n in range(6)))
            assert placed(answers) == {"w1": 2, "w2": 4}
            assert all(isinstance(a, Decision) and a.degraded and not a.reserved for a in answers)
            assert router.counted("degraded_decisions") == 6
            # Without Redis it is unknown what the workers hold.
            assert router.counted("isl_blocks") == 0
            assert router.counted("worker_routed_blocks", worker="w2:0", what="isl") == 0

    async def test_degraded_decisions_refuse_nobody_however_many_there_are(self, own_redis_server):
        async with beside(own_redis_server) as (workers, router):
            await workers.register("w1", max_requests=2)
            await workers.register("w2", max_requests=2)
            await router.refresh()
            await asyncio.to_thread(own_redis_server.kill)
            answers = await route_all(router, *(request(f"r{n}") for n in range(10)))
            assert placed(answers) == {"w1": 5, "w2": 5}

    async def test_a_degraded_decision_without_reservation_adds_no_load(self, own_redis_server):
        async with beside(own_redis_server) as (workers, router):
            await workers.register("w1")
            await workers.register("w2")
            await workers.occupy("w1", "a")
            await router.refresh()
            await asyncio.to_thread(own_redis_server.kill)
            looks = await route_all(router, *(request(f"r{n}", reserve=False) for n in range(6)))
            assert placed(looks) == {"w2": 6}
            assert router.counted("degraded_decisions") == 6
            assert router.counted("locality", reason="degraded") == 0

    async def test_a_caller_that_has_gone_meanwhile_counts_in_no_metric(self, router, workers):
        async def lose_the_answer_and_a_caller():
            gone = asyncio.ensure_future(router.route(request("r2")))
            await asyncio.wait([gone], timeout=0.01)
            gone.cancel()
            await asyncio.wait([gone])
            raise TimeoutError

        await workers.register("w1")
        await router.refresh()
        router.runner.after_look_up = lose_the_answer_and_a_caller
        assert (await router.route(request("r1"))).degraded
        assert router.counted("degraded_decisions") == 1
        assert router.counted("locality", reason="degraded") == 1

    async def test_redis_may_fail_between_lookup_and_reservation(self, own_redis_server):
        async with beside(own_redis_server) as (workers, router):
            await workers.register("w1")
            await workers.publish("w1", PROMPT)

            async def fail():
                await asyncio.to_thread(own_redis_server.kill)

            router.runner.before_reserve = fail
            decision = await router.route(request("r1"))
            assert (decision.worker.key.worker_id, decision.degraded) == ("w1", True)
            assert (decision.reserved, decision.overlap.total) == (False, 0)

    @pytest.mark.parametrize("hook", ["after_look_up", "before_reserve"])
    async def test_after_one_unanswered_call_lapsed_leases_are_tolerated_for_a_while(
        self, router, workers, hook
    ):
        async def lose():
            raise TimeoutError

        await workers.register("w1")
        await router.refresh()
        assert not router.fleet.recovers
        setattr(router.runner, hook, lose)
        assert (await router.route(request("r1"))).degraded
        assert router.fleet.recovers

    async def test_an_outage_is_logged_with_its_reason_and_its_end(self, router, workers, caplog):
        caplog.set_level(logging.INFO, "app.router.degraded")
        await workers.register("w1")
        await router.route(request("r0"))
        router.runner.answer_is_lost = True
        assert (await router.route(request("r1"))).degraded
        router.runner.answer_is_lost = False
        for name in ("r2", "r3"):
            assert (await router.route(request(name))).reserved
        told = [r.getMessage() for r in caplog.records if r.name == "app.router.degraded"]
        assert told == [
            "deciding without Redis: no answer within 5000 ms",
            "deciding with Redis again",
        ]

    async def test_a_reservation_whose_answer_was_lost_is_released(self, router, workers):
        await workers.register("w1")
        router.runner.answer_is_lost = True
        decision = await router.route(request("r1"))
        assert (decision.degraded, decision.reserved) == (True, False)
        await eventually(workers.reserved, lambda reserved: reserved == {})
        assert (await workers.load("w1")).requests == 0

    async def test_a_reservation_whose_answer_and_caller_were_lost_is_released(
        self, router, workers
    ):
        await workers.register("w1")
        router.runner.answer_is_lost = True
        gone = asyncio.ensure_future(router.route(request("gone")))
        stays = asyncio.ensure_future(router.route(request("stays")))

        async def hang_up():
            gone.cancel()
            await asyncio.wait([gone])

        router.runner.before_reserve = hang_up
        assert (await stays).degraded
        assert gone.cancelled()
        await eventually(workers.reserved, lambda reserved: reserved == {})

    async def test_a_request_routed_again_keeps_its_newer_reservation(
        self, one_redis_server, router, workers
    ):
        await workers.register("w1")
        router.runner.answer_is_lost = True
        given_up = await router.route(request("r1"))
        assert given_up.degraded
        async with running(one_redis_server.url) as other:
            again = await other.route(request("r1", retry=True))
            assert again.reserved
            router.abandon(given_up)
            # Releases are made in order, so the others have been made once this one has.
            router.abandon(await other.route(request("r2")))
            await eventually(workers.reserved, lambda reserved: "r2" not in reserved)
            assert await workers.reserved() == {"r1": "w1:0"}
            other.abandon(again)
            await eventually(workers.reserved, lambda reserved: reserved == {})

    async def test_a_paused_replica_does_not_take_over_the_reservation_of_a_later_try(
        self, one_redis_server, router, workers
    ):
        for name in ("w1", "w2"):
            await workers.register(name, max_requests=1)
        await router.refresh()
        async with running(one_redis_server.url) as other:

            async def retry_elsewhere():
                router.runner.after_look_up = None
                await asyncio.sleep(0.002)
                assert (await other.route(request("r1", retry=True))).reserved

            router.runner.after_look_up = retry_elsewhere
            with pytest.raises(Superseded):
                await router.route(request("r1", retry=True))
        held = await workers.reserved()
        assert set(held) == {"r1"}
        assert [(await workers.load(name)).total for name in ("w1", "w2")] in ([1, 0], [0, 1])

    async def test_a_late_try_that_finds_no_room_leaves_the_reservation_of_a_later_one(
        self, router, workers
    ):
        await workers.register("w1", max_requests=1)
        await router.route(request("r1"))
        with pytest.raises(AllWorkersBusy):
            await router.route(request("r1", began_ms=1, retry=True))
        assert await workers.reserved() == {"r1": "w1:0"}

    async def test_nothing_is_reserved_for_a_caller_that_hung_up_during_the_look_up(
        self, router, workers
    ):
        await workers.register("w1")
        asking = asyncio.ensure_future(router.route(request("r1")))

        async def hang_up():
            asking.cancel()

        router.runner.after_look_up = hang_up
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await workers.load("w1")).total == 0

    async def test_a_reservation_that_no_worker_confirms_ends_with_its_predicted_prefill(
        self, one_redis_server, workers
    ):
        await workers.register("w1")
        async with running(one_redis_server.url, prefill_ttl_s=0.2) as router:
            await router.route(request("fake"))
            names = (f"real-{number}" for number in count())

            async def confirmed():
                """A request's id; "": it was confirmed too late, on a busy machine."""
                name = next(names)
                await router.route(request(name))
                return name if await router.prefill_complete(name) else ""

            real = await eventually(confirmed)
            await eventually(workers.reserved, lambda reserved: reserved == {real: "w1:0"})

    async def test_requests_with_one_id_have_a_reservation_each_unless_one_is_a_retry(
        self, router, workers
    ):
        await workers.register("w1", max_requests=3)
        one, other = await route_all(router, request("r1"), request("r1"))
        assert isinstance(one, Decision)
        assert isinstance(other, Decision)
        assert one.reservation_id != other.reservation_id
        assert (await workers.load("w1")).requests == 2
        retried = await router.route(request("r1", retry=True))
        assert (await workers.load("w1")).requests == 2
        assert [await router.release(d.reservation_id) for d in (one, other, retried)] == [
            False,
            True,
            True,
        ]
        assert await workers.reserved() == {}

    async def test_a_request_that_its_balancer_sends_again_moves_its_reservation(
        self, router, workers
    ):
        await workers.register("w1")
        await router.route(request("r1", balancer_id="other"))
        for _ in range(2):
            decision = await router.route(request("r1", balancer_id="mine"))
            assert (await workers.load("w1")).requests == 2
        assert await router.release("r1")
        # Its place is free, but the reservation stays where it is.
        await router.route(request("r1", balancer_id="mine"))
        assert (await workers.load("w1")).requests == 1
        assert await router.release(decision.reservation_id)
        assert await workers.reserved() == {}

    async def test_a_worker_that_failed_is_found_by_the_id_of_the_reservation(
        self, router, workers
    ):
        for name in ("w1", "w2"):
            await workers.register(name)
        decision = await router.route(request("r1"))
        assert await router.prefill_complete(decision.reservation_id)
        failed = decision.reservation_id
        assert await router.release(failed, failure=REPORTED, caller="me")
        assert (await router.refresh()).marked("caller me").keys() == {decision.incarnation}

    async def test_a_failure_whose_caller_goes_while_it_is_told_ends_the_reservation_too(
        self, own_redis_server
    ):
        url = own_redis_server.url
        async with connect(url) as redis, running(url) as router:
            workers = FakeWorkers(redis)
            await workers.register("w1")
            assert (await router.route(request("r1"))).reserved
            with stopped(own_redis_server.pid):
                telling = asyncio.ensure_future(router.release("r1", failure=REPORTED))
                await asyncio.sleep(0)
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
            await eventually(workers.reserved, lambda reserved: reserved == {})

    async def test_lost_releases_and_first_tokens_are_told_once_redis_accepts_writes(
        self, own_redis_server
    ):
        url = own_redis_server.url
        async with connect(url) as redis, running(url) as other, asyncio.TaskGroup() as tasks:
            workers, router = FakeWorkers(redis), Replica(redis)
            await workers.register("w1")
            for name in ("r1", "r2", "r3"):
                await other.route(request(name))
            await router.refresh()
            # As the replica of an unreachable master, Redis keeps its data but refuses writes.
            await redis.execute_command("REPLICAOF", "127.0.0.1", free_port())
            for name in ("r2", "r3"):
                with pytest.raises(RedisUnavailable):
                    await router.prefill_complete(name)
            for name in ("r1", "r2"):
                with pytest.raises(RedisUnavailable):
                    await router.release(name)
            await redis.execute_command("REPLICAOF", "NO", "ONE")
            await eventually(
                lambda: other.route(request("r2", retry=True)), lambda decision: decision.reserved
            )
            catching_up = tasks.create_task(router.run())
            # Releases are made in order, so the others have been made once this one has.
            router.abandon(await other.route(request("r4")))
            await eventually(workers.reserved, lambda reserved: "r4" not in reserved)
            assert await workers.reserved() == {"r2": "w1:0", "r3": "w1:0"}
            # The first token of r2 was that of an earlier try.
            assert (await workers.load("w1")).decoding == 1
            catching_up.cancel()

    async def test_many_pending_releases_do_not_wait_for_the_next_maintenance_step(
        self, router, workers, monkeypatch
    ):
        await workers.register("w1", max_requests=1000)
        answers = await route_all(router, *(request(f"r{n}") for n in range(640)))
        for decision in answers:
            assert isinstance(decision, Decision)
            router.abandon(decision)
        # There are 64 in a step, of which one comes still.
        monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 3600.0)
        await eventually(workers.reserved, lambda reserved: reserved == {})

    async def test_requests_queued_meanwhile_do_not_wait_for_redis_again(self, own_redis_server):
        async with (
            connect(own_redis_server.url) as redis,
            running(own_redis_server.url) as router,
        ):
            await FakeWorkers(redis).register("w1")
            await router.refresh()
            await asyncio.to_thread(own_redis_server.kill)
            router.runner.round_trips.clear()
            answers = await route_all(router, *(request(f"r{n}") for n in range(3 * MAX_BATCH)))
            assert placed(answers) == {"w1": 3 * MAX_BATCH}
            assert len(router.runner.round_trips) == 1

    async def test_without_a_worker_ever_seen_requests_are_refused(self, own_redis_server):
        async with running(own_redis_server.url) as router:
            await asyncio.to_thread(own_redis_server.kill)
            with pytest.raises(NoWorkers, match="no worker has been seen yet"):
                await router.route(request("r1"))
            assert router.counted("degraded_decisions") == 0


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_a_replica_stops_at_whatever_moment_it_is_told_to(one_redis_server, steps):
    # Its first connections are being opened; a cancellation lost there is never repeated.
    app = create_app(RouterSettings(redis_url=one_redis_server.url, namespace=NAMESPACE))
    async with asyncio.timeout(5.0), app.router.lifespan_context(app):
        for _ in range(steps):
            await asyncio.sleep(0)


async def test_an_overlap_counts_as_far_as_the_engine_reuses_it(router, workers):
    await workers.register("large", reuse_blocks=2)
    await workers.register("small")
    prompt = PROMPT[:8] + PROMPT
    await workers.publish("large", prompt[:12])
    await workers.publish("small", prompt[:8])
    decision = await router.route(request("r1", "latency", prompt=prompt, explain=True))
    overlaps = {c.info.key.worker_id: c.overlap for c in decision.candidates}
    assert overlaps == {"large": TierOverlap(device=2), "small": TierOverlap(device=2)}


class TestPredictions:
    async def test_of_approximate_workers_routed_prompts_count_as_overlap_on_every_replica(
        self, one_redis_server, workers
    ):
        for name in ("w1", "w2"):
            await workers.register(name, trust=Trust.APPROXIMATE)
        settings = {"prediction_ttl_s": 3600.0}
        async with (
            running(one_redis_server.url, **settings) as first,
            running(one_redis_server.url, **settings) as second,
        ):
            cold = await first.route(request("r1", "latency"))
            assert cold.overlap == TierOverlap()

            async def look():
                return await second.route(request("look", "latency", reserve=False))

            warm = await eventually(look, lambda seen: seen.overlap.total > 0)
            assert warm.overlap == TierOverlap(device=2)
            assert warm.worker == cold.worker
            assert (warm.trust, warm.degraded) == (Trust.APPROXIMATE, False)

    async def test_a_worker_that_tells_what_it_caches_is_not_judged_by_what_was_routed_there(
        self, one_redis_server, workers
    ):
        await workers.register("exact")
        await workers.register("guessed", trust=Trust.APPROXIMATE)
        async with running(one_redis_server.url, prediction_ttl_s=3600.0) as replica:
            for name, other in (("exact", "guessed"), ("guessed", "exact")):
                excluded = frozenset({other})
                decision = await replica.route(request(name, "latency", exclude=excluded))
                assert decision.worker.key.worker_id == name

            async def look():
                asked = request("look", "latency", reserve=False, explain=True)
                return await replica.route(asked)

            def overlaps(decision):
                return {c.info.key.worker_id: c.overlap.total for c in decision.candidates}

            seen = await eventually(look, lambda seen: overlaps(seen)["guessed"] > 0)
            assert overlaps(seen) == {"exact": 0, "guessed": 2}
            await workers.publish("exact", PROMPT)
            excluded = frozenset({"guessed"})
            seen = await replica.route(request("look", "latency", reserve=False, exclude=excluded))
            assert (seen.overlap.total, seen.trust) == (2, Trust.EXACT)

    @pytest.mark.parametrize("engine", ["openai", "vllm 0.32.0"])
    async def test_answers_teach_what_an_approximate_worker_keeps_and_how_fast_it_is(
        self, one_redis_server, workers, engine
    ):
        await workers.register("w1", trust=Trust.APPROXIMATE, engine=engine)
        async with running(one_redis_server.url, prediction_ttl_s=3600.0) as replica:
            await replica.route(request("r1", "latency"))

            async def look():
                return await replica.route(request("look", "latency", reserve=False))

            seen = await eventually(look, lambda seen: seen.overlap.total == 2)
            forgotten = Answer(len(PROMPT), 0, 2, first_token_s=5.0, rest_s=1.0)
            for _ in range(20):
                replica.teach(seen, forgotten)
            assert (await look()).overlap.total == 0
            [measured] = (await replica.refresh()).measured
            is_learned = measured.speed.prefill_s_per_token > DEFAULT_SPEED.prefill_s_per_token
            assert is_learned == (engine == "openai")  # of vLLM, its agent knows better

    @pytest.mark.parametrize("by_request_id", [False, True])
    @pytest.mark.parametrize(
        "prompt", [PROMPT, list(range(IN_FLIGHT_TOKENS))], ids=["short", "long"]
    )
    async def test_what_was_released_before_its_first_token_no_longer_counts(
        self, one_redis_server, workers, by_request_id, prompt
    ):
        await workers.register("w1", trust=Trust.APPROXIMATE)
        settings, blocks = {"prediction_ttl_s": 3600.0}, len(prompt) // 4
        async with (
            running(one_redis_server.url, **settings) as first,
            running(one_redis_server.url, **settings) as second,
        ):

            async def overlap():
                asked = request("look", "latency", prompt=prompt, reserve=False, explain=True)
                (seen,) = (await first.route(asked)).candidates
                assert COMPUTING not in seen.terms  # which events tell when it ends
                return seen.overlap.total

            def name(decision):
                return decision.request_id if by_request_id else decision.reservation_id

            fake = await first.route(request("r1", "latency", prompt=prompt))
            await eventually(overlap, lambda total: total == blocks)
            assert await second.release(name(fake))
            await eventually(overlap, lambda total: total == 0)

            real = await first.route(request("r2", "latency", prompt=prompt))
            await eventually(overlap, lambda total: total == blocks)
            assert await second.prefill_complete(name(real))
            assert await second.release(name(real))
            fake = await first.route(request("r3", "latency", prompt=prompt))
            assert await second.release(name(fake))
            # Written in order, so what was to be withdrawn has been once this one counts.
            await second.route(request("r4", "latency", prompt=prompt[::-1]))

            async def other():
                seen = await first.route(
                    request("look", "latency", reserve=False, prompt=prompt[::-1])
                )
                return seen.overlap.total

            await eventually(other, lambda total: total == blocks)
            assert await overlap() == blocks

    async def test_a_caller_that_hangs_up_leaves_no_overlap(self, one_redis_server, workers):
        await workers.register("w1", trust=Trust.APPROXIMATE)
        async with running(one_redis_server.url) as replica:

            async def overlap():
                seen = await replica.route(request("look", "latency", reserve=False))
                return seen.overlap.total

            decision = await replica.route(request("r1", "latency"))
            await eventually(overlap, lambda total: total == 2)
            replica.abandon(decision)
            await eventually(overlap, lambda total: total == 0)

    @pytest.mark.parametrize("another_tells_nothing", [False, True])
    @pytest.mark.parametrize("has_first_token", [False, True])
    async def test_in_flight_requests_count_as_overlap_before_their_events_arrive(
        self, one_redis_server, workers, another_tells_nothing, has_first_token
    ):
        await workers.register("w1")
        other = Trust.APPROXIMATE if another_tells_nothing else Trust.EXACT
        await workers.register("w2", trust=other)
        prompt = list(range(IN_FLIGHT_TOKENS + 4 * 8))
        await workers.publish("w1", prompt[: 4 * 8])
        async with running(one_redis_server.url) as replica:
            await replica.refresh()
            first = await replica.route(request("r1", "latency", prompt=prompt))
            assert (first.worker.key.worker_id, first.overlap) == ("w1", TierOverlap(device=8))

            async def of_w1(policy="latency"):
                asked = request("look", policy, prompt=prompt, reserve=False, explain=True)
                seen = (await replica.route(asked)).candidates
                (found,) = [one for one in seen if one.info.key.worker_id == "w1"]
                return found

            async def foreseen():
                seen = await of_w1()
                assert (seen.overlap.total > 8) == (COMPUTING in seen.terms)
                return seen.overlap.total

            await eventually(foreseen, lambda blocks: blocks > 900)
            assert (await of_w1()).terms[COMPUTING] > 0.0
            assert (await of_w1("blocks")).overlap.total == 8
            # Once its first token is out, its worker's own events say what it holds.
            if has_first_token:
                await replica.prefill_complete("r1")
            else:
                await replica.release("r1")
            await eventually(foreseen, lambda blocks: blocks == 8)

    async def test_of_prompts_that_begin_alike_no_more_are_told_than_a_look_up_reads(
        self, one_redis_server, workers, redis, monkeypatch
    ):
        monkeypatch.setattr(in_flight, "MOST", 2)
        await workers.register("w1", max_requests=64)
        prompt = list(range(IN_FLIGHT_TOKENS))

        async def told():
            [key] = [key async for key in redis.scan_iter(match=KEYS["computing:"] + "*")]
            return await redis.hkeys(key)

        async with running(one_redis_server.url) as replica:
            await replica.refresh()
            for n in range(4):
                await replica.route(request(f"r{n}", "latency", prompt=[*prompt, *[n] * 5000]))
                await eventually(told, lambda found, n=n: len(found) == min(n + 1, 2))
            await replica.prefill_complete("r0")
            await eventually(told, lambda found: len(found) == 1)

    @pytest.mark.parametrize("splits", [False, True])
    async def test_what_a_worker_will_soon_have_computed_is_not_foreseen(
        self, one_redis_server, workers, splits
    ):
        role, protocol = (Role.PREFILL, "nixl") if splits else (Role.BOTH, "")
        await workers.register("w1", role=role, kv_transfer=protocol)
        if splits:
            await workers.register("d", role=Role.DECODE, kv_transfer=protocol)
        prompt = list(range(2 * IN_FLIGHT_TOKENS))
        held = prompt[: IN_FLIGHT_TOKENS + 4]
        await workers.publish("w1", held)
        async with running(one_redis_server.url, strict_roles=splits) as replica:
            await replica.refresh()

            async def overlap(prompt):
                asked = request("look", "latency", prompt=prompt, reserve=False, explain=True)
                return max(c.overlap.total for c in (await replica.route(asked)).candidates)

            decision = await replica.route(request("r1", "latency", prompt=prompt))
            assert (decision.source is not None) == splits
            # Written in order, so what comes first has been written once the second one counts.
            await replica.route(request("r2", "latency", prompt=prompt[::-1]))
            await eventually(lambda: overlap(prompt[::-1]), lambda blocks: blocks > 0)
            assert await overlap(prompt) == len(held) // 4

    async def test_a_split_prompt_in_flight_counts_as_its_source_s_alone(
        self, one_redis_server, workers
    ):
        await workers.register("p", role=Role.PREFILL, kv_transfer="nixl")
        await workers.register("d", role=Role.DECODE, kv_transfer="nixl")
        prompt = list(range(IN_FLIGHT_TOKENS))
        async with running(one_redis_server.url, strict_roles=True) as replica:
            await replica.refresh()
            first = await replica.route(request("r1", "latency", prompt=prompt))
            assert first.source is not None

            async def look():
                asked = request("look", "latency", prompt=prompt, reserve=False, explain=True)
                seen = await replica.route(asked)
                return {one.info.key.worker_id: one.overlap.total for one in seen.candidates}

            await eventually(look, lambda overlaps: overlaps == {"p": 1024, "d": 0})

    async def test_a_prefix_on_its_way_counts_as_the_worker_s_that_fetches_it(
        self, one_redis_server, workers
    ):
        for name, max_requests in (("w1", 1), ("w2", 8)):
            await workers.register(name, kv_transfer="kvroute", max_requests=max_requests)
        prompt = list(range(IN_FLIGHT_TOKENS + 4))
        await workers.publish("w1", prompt)
        async with running(one_redis_server.url) as replica:
            await replica.route(request("busy", "latency", prompt=prompt[:8]))
            fetched = await replica.route(request("r1", "latency", prompt=prompt))
            assert fetched.source is not None
            assert (fetched.source.kind, fetched.worker.key.worker_id) == ("fetch", "w2")

            async def look():
                seen = await replica.route(
                    request("look", "latency", prompt=prompt, reserve=False, explain=True)
                )
                return {one.info.key.worker_id: one.overlap.total for one in seen.candidates}

            await eventually(look, lambda overlaps: overlaps["w2"] > 900)

    async def test_an_answer_whose_overlap_fell_short_says_so(
        self, one_redis_server, router, workers, redis
    ):
        await workers.register("w1")
        # So long that the block where the overlap ends is found in a second round trip.
        prompt = list(range(4 * 2000))
        await workers.publish("w1", prompt[: 4 * 1005])
        whole = await router.route(request("r1", prompt=prompt, reserve=False))
        assert (whole.overlap.total, whole.degraded, whole.trust) == (1005, False, "exact")

        async def spoil():
            async for bucket in redis.scan_iter(match=KEYS.of_shard(0)["blocks:"] + "*"):
                await redis.set(bucket, "spoilt")

        # One that has not yet learnt where owners change.
        async with running(one_redis_server.url) as fresh:
            await fresh.refresh()
            fresh.runner.after_look_up = spoil
            short = await fresh.route(request("r2", prompt=prompt))
        assert 0 < short.overlap.total < 1005
        assert (short.degraded, short.reserved, short.trust) == (True, True, "bound")

    @pytest.mark.parametrize("trust", [Trust.BOUND, Trust.APPROXIMATE, Trust.LOAD_ONLY])
    async def test_a_decision_is_trusted_no_further_than_its_worker(self, router, workers, trust):
        await workers.register("w1")
        await workers.register("w2")
        await workers.publish("w2", PROMPT)

        async def seen(of):
            excluded = frozenset({"w1", "w2"} - {of})
            asked = request("look", "latency", reserve=False, exclude=excluded)
            decision = await router.route(asked)
            return decision.overlap.total, decision.trust

        assert await seen("w2") == (2, Trust.EXACT)
        await workers.renew("w2", trust=trust)
        assert await seen("w2") == (0 if trust is Trust.LOAD_ONLY else 2, trust)
        assert await seen("w1") == (0, Trust.EXACT)
        await workers.renew("w2", trust=Trust.EXACT)
        assert await seen("w2") == (2, Trust.EXACT)

    async def test_by_default_only_published_blocks_count_as_overlap(self, router, workers):
        await workers.register("w1")
        await router.route(request("r1"))
        assert (await router.route(request("r2"))).overlap == TierOverlap()
        assert not [name for trip in router.runner.round_trips for name in trip if "pre" in name]
