"""Planners on a real Redis, with a connector that starts and stops real agents."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import orjson
import pytest
from prometheus_client import generate_latest

from app.core.keys import MODELS
from app.core.loads import Reservation
from app.core.outcomes import Ending
from app.core.roles import Role
from app.core.settings.planner import PlannerSettings
from app.core.types import Incarnation, SequenceHash, WorkerKey
from app.planner import loop
from app.planner.connectors.base import Advise, ConnectorError
from app.planner.lease import RENEWALS
from app.planner.loop import Planner
from app.planner.metrics import PlannerMetrics
from app.planner.observe import Observer
from app.planner.predict import replay_of
from app.planner.rules.replay import ReplayTooLong
from app.planner.rules.state import (
    USUAL_STARTUP_S,
    Pools,
    Proposal,
    Reason,
    Rules,
)
from app.router.fleet import Fleet
from app.state import decisions, leases, planner, reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import BLOCK_SIZE, KEYS, NAMESPACE, FakeWorkers, fake_agent, running
from tests.lua.conftest import A, B
from tests.state.test_decisions import record

SETTINGS = PlannerSettings(
    namespace=NAMESPACE,
    scaling_policy="threshold",
    interval_s=0.2,
    min_workers=1,
    max_workers=3,
    grace_intervals=1,
    lease_s=30.0,  # an order ends with it, and an agent's start takes long on a busy machine
)


class Agents:
    """Has agents run in this process. broken: every order fails. absent: none ever registers."""

    def __init__(self, runner, stack):
        self.broken = self.absent = False
        self.orders = []
        self.prefills = set()
        self.runner, self._stack = runner, stack
        self._made = 0
        self._stops = {}

    async def add(self, role, count, desired, reason):
        self.orders.append(f"add {count}{_of(role)}")
        if self.broken:
            raise ConnectorError("no room")
        for _ in range(0 if self.absent else count):
            name = f"a{self._made}"
            self._made += 1
            if role is Role.PREFILL:
                self.prefills.add(name)
            own = await self._stack.enter_async_context(AsyncExitStack())
            fake = fake_agent(
                self.runner, KEYS, name, role=role, kv_transfer="kvroute", models=("m",)
            )
            agent = await own.enter_async_context(running(fake))
            own.push_async_callback(agent.stop)
            self._stops[name] = own

    async def remove(self, worker, role, desired):
        self.orders.append(f"remove {worker}{_of(role)}")
        if self.broken:
            raise ConnectorError("will not")
        stop = self._stops.pop(worker)
        key = WorkerKey(worker)
        left = await self.runner.one(leases.drain(KEYS, key))
        assert left == 0, f"{worker} still has {left} requests"
        await stop.aclose()


def _of(role):
    return "" if role is Role.BOTH else f" {role}"


@asynccontextmanager
async def planning(url, connector, settings=SETTINGS, metrics=None):
    async with connect(url) as redis:
        runner = ScriptRunner(redis, timeout_s=1.0)
        fleet = Fleet(redis, KEYS, 1.0)
        observer = Observer(fleet, redis, runner, KEYS)
        metrics = metrics or PlannerMetrics(NAMESPACE)
        one = Planner(settings, observer, runner, connector, metrics)
        tasks = [asyncio.create_task(fleet.measurements.follow()), asyncio.create_task(one.run())]
        try:
            yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                assert task.cancelled(), task.exception()


@pytest.fixture
async def agents(redis):
    async with AsyncExitStack() as stack:
        yield Agents(ScriptRunner(redis, timeout_s=5.0), stack)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(loop, "TICK_S", 0.05)
    monkeypatch.setattr(loop, "SETTLE_S", 0.5)
    monkeypatch.setattr(loop, "MARGIN_S", 0.1)


async def workers(redis):
    found = await redis.hkeys(KEYS["current"])
    return sorted(key.decode().partition(":")[0] for key in found)


async def last(redis):
    found = await planner.proposals(redis, KEYS, 1)
    return found[0] if found else {}


async def num_proposals(redis):
    return len(await planner.proposals(redis, KEYS, 1000))


async def reasons(redis):
    return {proposal["reason"] for proposal in await planner.proposals(redis, KEYS, 100)}


async def test_a_fleet_grows_to_its_minimum_and_with_its_queues_and_shrinks_when_idle(
    one_redis_server, redis, agents
):
    async with planning(one_redis_server.url, agents):
        await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])
        [inc] = (await agents.runner.one(reservations.loads(KEYS))).loads
        wishes = [wish_for(f"r{n}", inc) for n in range(6)]
        assert await agents.runner.one(reservations.reserve(KEYS, wishes, ttl_ms=60_000)) == [
            None
        ] * len(wishes)
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 3)
        assert "prefill_queue" in await reasons(redis)
        recorded = await redis.hget(KEYS["planner"], "state")
        assert 0 < orjson.loads(recorded)["startup_s"] < USUAL_STARTUP_S
        await eventually(lambda: reasons(redis), lambda seen: "at_budget" in seen)
        for wish in wishes:
            await release(agents.runner, wish.request_id)
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 1)
        assert "low_load" in await reasons(redis)
    assert len([order for order in agents.orders if order.startswith("remove")]) == 2


async def test_pools_are_begun_with_one_worker_each_and_grow_by_their_own_signals(
    one_redis_server, redis, agents
):
    metrics = PlannerMetrics(NAMESPACE)
    async with planning(one_redis_server.url, agents, replace(SETTINGS, roles=True), metrics):
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 2)
        assert sorted(agents.orders) == ["add 1 decode", "add 1 prefill"]
        prefills = {name: inc for name, inc in await incarnations(redis) if name in agents.prefills}
        [(_, inc)] = prefills.items()
        wishes = [wish_for(f"r{n}", inc) for n in range(6)]
        await agents.runner.one(reservations.reserve(KEYS, wishes, ttl_ms=60_000))
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 3)
        assert agents.orders[2:] == ["add 1 prefill"]
        shown = await redis.hgetall(KEYS["planner"])
        assert (shown[b"desired_prefill"], shown[b"desired_decode"]) == (b"2", b"1")
        told = f'desired_workers_of_role{{namespace="{NAMESPACE}",role="prefill"}} 2.0'
        assert told in generate_latest(metrics.registry).decode()


async def test_a_worker_makes_room_for_one_of_the_other_role(
    one_redis_server, redis, agents, monkeypatch
):
    async with planning(one_redis_server.url, agents, replace(SETTINGS, roles=True)) as first:
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 2)
        await first.leave()
    [leaves] = agents.prefills
    del agents.orders[:]

    def swap(name, state, *_):
        now, wanted = state.pools, Pools(0, 2)
        victim = None if now == wanted else leaves
        reason = Reason.OTHER_ROLE
        return Proposal(state.now_s, name, now.size, 2, reason, victim, {}, (), now, wanted)

    monkeypatch.setattr(loop, "propose", swap)
    async with planning(one_redis_server.url, agents, SETTINGS):
        await eventually(lambda: workers(redis), lambda seen: len(seen) == 2 and leaves not in seen)
    assert agents.orders == [f"remove {leaves} prefill", "add 1 decode"]


async def test_a_model_that_sleeps_stays_known_and_wakes_when_somebody_waits(
    one_redis_server, redis, agents
):
    settings = replace(SETTINGS, min_workers=0, idle_s=0.2)
    async with planning(one_redis_server.url, agents, settings):
        # Routers would not know a model that never had a worker.
        await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])
        await eventually(lambda: workers(redis), lambda seen: not seen)
        assert await redis.hget(KEYS["planner"], "wakes") == b"1"
        await redis.delete(MODELS)
        await eventually(lambda: redis.hget(MODELS, "m"), lambda entry: entry is not None)
        assert agents.orders == ["add 1", "remove a0"]
        # Who has just come may hang up at once.
        seconds, _ = await redis.time()
        await redis.zadd(KEYS["waiting:normal:"], {"r-1 16 -": 1000 * (seconds + 3600)})
        await redis.zadd(KEYS["flows"], {"normal:": 1})
        before = await num_proposals(redis)
        await eventually(lambda: num_proposals(redis), lambda number: number > before + 1)
        assert agents.orders == ["add 1", "remove a0"]
        await redis.zadd(KEYS["waiting:normal:"], {"r-2 16 -": 1000 * (seconds - 60)})
        await eventually(lambda: workers(redis), lambda seen: seen == ["a1"])
        assert "woken" in await reasons(redis)
        # While somebody waits, none leaves.
        await redis.delete(KEYS["flows"], KEYS["waiting:normal:"])
        await eventually(lambda: workers(redis), lambda seen: not seen)


async def incarnations(redis):
    found = await redis.hgetall(KEYS["current"])
    return [(key.decode().partition(":")[0], Incarnation(int(inc))) for key, inc in found.items()]


def wish_for(request_id, inc):
    return Reservation(request_id, 100, 60_000_000, 3, incarnation=inc, max_requests=256)


async def release(runner, request_id):
    await runner.one(reservations.release(KEYS, [reservations.Release(request_id)]))


async def test_who_advises_changes_nothing(one_redis_server, redis):
    async with planning(one_redis_server.url, Advise()):
        found = await eventually(lambda: last(redis))
        assert (found["size"], found["desired"], found["reason"]) == (0, 1, "below_minimum")
        shown = await redis.hgetall(KEYS["planner"])
        assert shown[b"desired"] == b"1"
        await asyncio.sleep(0.5)
        assert await workers(redis) == []


async def test_one_of_two_planners_leads_and_the_other_takes_over(one_redis_server, redis, agents):
    url, settings = one_redis_server.url, replace(SETTINGS, lease_s=6.0)
    async with planning(url, agents, settings) as second:
        async with planning(url, agents, settings) as first:
            await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])
            assert first.leads != second.leads
            until_ms = int(await redis.hget(KEYS["planner"], "until_ms"))
            seconds, _ = await redis.time()
            assert 0 < until_ms - 1000 * seconds <= 7000, "not held for longer than its lease"
            leads = first if first.leads else second
            await leads.leave()
        await eventually(lambda: _true(second.leads))
        # It knows what was there, and does not begin anew.
        await asyncio.sleep(1.0)
        assert await workers(redis) == ["a0"]


async def _true(value):
    return value


async def test_a_planner_that_was_frozen_changes_nothing(one_redis_server, redis, agents):
    async with planning(one_redis_server.url, agents) as frozen:
        await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])
        before = list(agents.orders)
        # Another one leads now, as if this one had slept through its lease.
        await redis.hset(KEYS["planner"], mapping={"holder": "other", "token": 99})
        until_ms = (await redis.time())[0] * 1000 + 60_000
        await redis.hset(KEYS["planner"], "until_ms", until_ms)
        [inc] = (await agents.runner.one(reservations.loads(KEYS))).loads
        wishes = [wish_for(f"r{n}", inc) for n in range(6)]
        await agents.runner.one(reservations.reserve(KEYS, wishes, ttl_ms=60_000))
        await eventually(lambda: _true(not frozen.leads))
        assert agents.orders == before


async def test_a_planner_leads_on_while_a_replay_takes_longer_than_its_lease(
    one_redis_server, redis, monkeypatch
):
    replaying, is_renewed = threading.Event(), threading.Event()

    def slow(*given, **more):
        replaying.set()
        assert is_renewed.wait(30)
        return replay_of(*given, **more)

    async def lease():
        found = await redis.hmget(KEYS["planner"], "until_ms", "token")
        return tuple(found)

    monkeypatch.setattr(loop, "replay_of", slow)
    settings = replace(SETTINGS, scaling_policy="slo", lease_s=1.0)
    async with (
        running(fake_agent(ScriptRunner(redis, timeout_s=5.0), KEYS, "a")),
        planning(one_redis_server.url, Advise(), settings),
    ):
        assert await asyncio.to_thread(replaying.wait, 30)
        token = (await lease())[1]
        for _ in range(2 * RENEWALS):
            before = await lease()
            await eventually(lease, lambda found, before=before: found != before)
        is_renewed.set()
        await eventually(lambda: last(redis))
        assert (await lease())[1] == token


@pytest.mark.parametrize(
    "state",
    [
        '{"pending": {"both": [1e300, -5, "nan"]}, "leaving": "w0", "leaving_since_s": "nan"}',
        f'{{"pending": {{"both": [{"1," * 1000}1]}}}}',
        '{"pending": 7}',
        '{"pending": {"neither": [1]}}',
        '{"successor": "neither"}',
        '{"leaving": "gone", "known": null}',
        '{"pending": {"both": [1]}, "startup_s": "nan"}',
    ],
)
async def test_a_state_that_no_planner_would_record_changes_nothing(
    one_redis_server, redis, agents, state
):
    await redis.hset(KEYS["planner"], "state", state)
    async with planning(one_redis_server.url, agents):
        found = await eventually(lambda: last(redis))
        assert (found["size"], found["desired"]) == (0, 1)
        await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])


async def test_a_worker_that_never_comes_is_given_up(one_redis_server, redis, agents):
    agents.absent = True
    settings = replace(SETTINGS, startup_deadline_s=1.0)
    async with planning(one_redis_server.url, agents, settings):

        async def orders():
            return len(agents.orders)

        await eventually(orders, lambda seen: seen == 1)
        # It is counted as coming meanwhile, and asked for again only after the deadline.
        await asyncio.sleep(0.6)
        assert agents.orders == ["add 1"]
        await eventually(orders, lambda seen: seen == 2)


async def test_an_order_that_fails_is_given_again_with_the_next_proposal(
    one_redis_server, redis, agents
):
    agents.broken = True
    async with planning(one_redis_server.url, agents):

        async def orders():
            return len(agents.orders)

        await eventually(orders, lambda seen: seen >= 2)
        assert await workers(redis) == []
        agents.broken = False
        await eventually(lambda: workers(redis), lambda seen: seen == ["a0"])


async def test_a_redis_that_is_away_or_has_lost_all_leaves_the_fleet_as_it_was(
    own_redis_server, monkeypatch
):
    monkeypatch.setattr(loop, "SETTLE_S", 2.0)  # agents register again within so long
    url = own_redis_server.url
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(url))
        agents = Agents(ScriptRunner(redis, timeout_s=1.0), stack)
        async with planning(url, agents, replace(SETTINGS, min_workers=2)) as one:
            await eventually(lambda: workers(redis), lambda seen: len(seen) == 2)
            own_redis_server.kill()

            async def problem():
                return one.problem

            await eventually(problem)
            own_redis_server.start()
            await eventually(lambda: workers(redis), lambda seen: len(seen) == 2)
            await eventually(lambda: last(redis), lambda seen: seen.get("size") == 2)
        assert agents.orders == ["add 2"]


async def test_values_of_workers_are_shown(one_redis_server, redis):
    await FakeWorkers(redis).register("w0")
    async with planning(one_redis_server.url, Advise()) as one:
        await eventually(lambda: last(redis))
        shown = await redis.hget(KEYS["planner"], "values")
        assert shown == b"{}"
        assert not one.problem


async def test_records_that_no_worker_could_have_answered_are_counted_and_left_out(
    one_redis_server, redis
):
    """Of a pool of 1,000 blocks of 4 tokens."""
    runner = ScriptRunner(redis, timeout_s=5.0)
    now_ms = (await redis.time())[0] * 1000
    bad = {"endless": {"isl_tokens": 8}, "huge": {"isl_tokens": 10**12, "full_blocks": 10**12 // 4}}
    for name, fields in {"good": {"isl_tokens": 8}, **bad}.items():
        one = msgspec.structs.replace(record(name, [A, B]), at_ms=now_ms, worker="a:0", **fields)
        await runner.one(decisions.record(KEYS, one, kept=100))
    late = msgspec.structs.replace(
        record("late", [A, B]), at_ms=now_ms + 10**15, worker="a:0", isl_tokens=8
    )
    await runner.one(decisions.record(KEYS, late, kept=100))
    told = {"endless": Ending(500_000, 5), "good": Ending(3, 10**9)}
    for name, ending in told.items():
        await runner.one(decisions.record_ending(KEYS, name, ending, kept=100))
    settings, metrics = replace(SETTINGS, scaling_policy="slo"), PlannerMetrics(NAMESPACE)
    async with (
        running(fake_agent(runner, KEYS, "a")),
        planning(one_redis_server.url, Advise(), settings, metrics) as one_planner,
    ):
        found = await eventually(lambda: last(redis), lambda seen: seen.get("candidates"))
        assert found["inputs"]["requests"] == 1
        assert found["inputs"]["known"] == 0  # its first token came after its end
        assert not one_planner.problem

        async def scraped():
            return generate_latest(metrics.registry).decode()

        left_out = 'kvroute_planner_unreplayable_decisions{namespace="test"} 3.0'
        await eventually(scraped, lambda text: left_out in text)


@pytest.mark.parametrize(("prompt_tokens", "block_tokens"), [(40, 4), (512, 4), (3000, 32)])
async def test_prompts_are_replayed_in_128_blocks_at_most(redis, prompt_tokens, block_tokens):
    runner = ScriptRunner(redis, timeout_s=5.0)
    asked = record("long", [SequenceHash(n) for n in range(prompt_tokens // BLOCK_SIZE)])
    now_ms = (await redis.time())[0] * 1000
    about = {"at_ms": now_ms, "worker": "a:0", "policy": "blocks"}
    asked = msgspec.structs.replace(asked, isl_tokens=prompt_tokens, **about)
    await FakeWorkers(redis).register("a")
    await runner.one(decisions.record(KEYS, asked, kept=100))
    observer = Observer(Fleet(redis, KEYS, 1.0), redis, runner, KEYS)
    await observer.sample()
    [found], tokens = await observer.recent(Rules())
    assert (tokens, observer.policy) == (block_tokens, "blocks")
    assert len(found.request.blocks) == prompt_tokens // block_tokens


@pytest.mark.parametrize(
    ("interval_s", "replay_s", "most", "is_slow", "expected"),
    [
        (0.2, 8.0, 4096, lambda size, _: size > 500, [4096, 2048, 1024, 512, 256]),
        # 300 had been asked for of late, and no replay ends in half of an interval: half of that
        # is played next, and the least in a whole interval.
        (5.0, 0.0, 300, lambda _, is_over: is_over(), [4096, 150, 75, 37, 32]),
    ],
)
async def test_a_replay_that_takes_too_long_plays_fewer_decisions(
    one_redis_server, redis, monkeypatch, interval_s, replay_s, most, is_slow, expected
):
    played = []

    def slow(observer, state, rules, *given, **more):
        played.append(rules.window_requests)
        if is_slow(rules.window_requests, more["is_over"]):
            raise ReplayTooLong(min(most, rules.window_requests))
        return replay_of(observer, state, rules, *given, **more)

    monkeypatch.setattr(loop, "REPLAY_S", replay_s)
    monkeypatch.setattr(loop, "replay_of", slow)
    settings = replace(SETTINGS, scaling_policy="slo", interval_s=interval_s)
    async with (
        running(fake_agent(ScriptRunner(redis, timeout_s=5.0), KEYS, "a")),
        planning(one_redis_server.url, Advise(), settings) as one,
    ):
        await eventually(lambda: last(redis), lambda seen: seen.get("candidates"))
        assert not one.problem
    assert played[:5] == expected


async def test_decisions_are_replayed_with_what_came_of_them(one_redis_server, redis):
    runner = ScriptRunner(redis, timeout_s=5.0)
    async with (
        running(fake_agent(runner, KEYS, "a")),
        started_replica(one_redis_server.url) as door,
    ):
        fleet = Fleet(redis, KEYS, 1.0)
        observer = Observer(fleet, redis, runner, KEYS)

        async def routed(name):
            body = {"token_ids": [1] * 40, "request_id": name}
            return (await door.post("/v1/route", json=body)).status_code

        await eventually(lambda: routed("r0"), lambda status: status == 200)
        await routed("r1")
        await door.delete("/v1/requests/r1?output_tokens=7&ttft_ms=120")

        async def known():
            await observer.sample()
            recent, _ = await observer.recent(Rules())
            return {asked.request.request_id: asked for asked in recent}

        def is_complete(found):
            return set(found) == {"r0", "r1"} and found["r1"].came is not None

        found = await eventually(known, is_complete)
        assert found["r0"].came is None
        assert found["r0"].request.max_tokens != 7
        assert found["r1"].request.max_tokens == 7
        came = found["r1"].came
        assert came is not None
        assert came.ttft_s == 0.12
        assert 0 <= came.token_s < 5
