"""A fleet in this process: the agent of simulated engines that a source tells of."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import zmq.asyncio

from app.core.errors import NamespaceMissing, RedisUnavailable
from app.core.keys import Keyspace
from app.core.registration import decode_info
from app.core.settings.agent import EngineAgentSettings
from app.state import reservations
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from workers.bridge.follower import EngineFollower
from workers.discovery.engine import DiscoveredEngine, Engines, Members, settings_of
from workers.discovery.fleet import EngineClaims, EngineFleet

KEYS = Keyspace("discovery")
LONG_S = 60.0


@dataclass(slots=True)
class Told:
    """A source that tells what a test has it tell."""

    engines: Engines = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, engines):
        self.engines = engines
        self.changed.set()

    async def __call__(self, tell):
        members = Members()
        while True:
            self.changed.clear()
            members.engines = dict(self.engines)
            tell(members)
            await self.changed.wait()


def settings(**changes):
    return EngineAgentSettings(**({"lease_ttl_s": LONG_S, "drain_s": LONG_S} | changes))


def engine(worker_id, url, **flags):
    return DiscoveredEngine(settings_of(settings(), worker_id, url, flags))


@asynccontextmanager
async def engines(number):
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(fake_engine(token_s=0.01, max_model_len=100))
            for _ in range(number)
        ]


@asynccontextmanager
async def running(redis, folder, source, *, lease_s=LONG_S, gone_s=0.0):
    """At the end it takes its engines out of service."""
    async with aiohttp.ClientSession() as http:
        context = zmq.asyncio.Context.instance()
        runner = ScriptRunner(redis, 5.0)

        def begin(of_engine):
            return EngineFollower(of_engine, KEYS, runner, http, context, folder)

        claims = EngineClaims(runner, KEYS, "test", lease_s)
        fleet = EngineFleet(source, claims, begin, gone_s)
        task = asyncio.create_task(fleet.run())
        try:
            yield fleet
        finally:
            if task.done():
                task.result()
            task.cancel()
            await asyncio.wait([task])


async def live(redis):
    """The workers that are routed to, by id."""
    client = redis
    found = {}
    with suppress(NamespaceMissing, RedisUnavailable):
        for inc in (await ScriptRunner(redis, 5.0).one(reservations.loads(KEYS))).loads:
            if told := await client.hget(KEYS["workers"], str(inc)):  # else replaced meanwhile
                info = decode_info(told)
                found[info.key.worker_id] = info
    return found


async def until_live(redis, *workers):
    return await eventually(lambda: live(redis), lambda seen: sorted(seen) == sorted(workers))
