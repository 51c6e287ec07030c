"""An agent follows an engine that falls ill on demand: what routers see of it meanwhile."""

import asyncio
import itertools
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
import zmq.asyncio

from app.core.errors import NamespaceMissing
from app.core.keys import Keyspace
from app.core.registration import decode_info, decode_metrics
from app.core.settings.agent import EngineAgentSettings
from app.core.trust import Trust
from app.core.types import Incarnation
from app.ops.worker_checks import engines as of_engines
from app.ops.workers import everyone
from app.router.fleet import Fleet
from app.state import reservations
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from tests.fakes.faults import HANG_S, WELL, Faults
from tests.workers.agent.harness import info
from workers.agent.agent import Agent, AgentSettings
from workers.bridge import follower as following
from workers.bridge import health
from workers.bridge.follower import EngineFollower

KEYS = Keyspace("follower")
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Engines are looked at more often than they are as a rule."""
    monkeypatch.setattr(following, "POLL_S", 0.02)
    monkeypatch.setattr(following, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(following, "UNFIT_S", 0.1)


class Followed:
    """An engine, its agent, and what routers see of it beside another worker."""

    def __init__(self, redis, engine, follower):
        self.redis = redis
        self.engine, self.follower = engine, follower
        self.runner = ScriptRunner(redis, 5.0)
        self.http = follower._session

    async def live(self):
        with suppress(NamespaceMissing):
            loads = (await self.runner.one(reservations.loads(KEYS))).loads
            told = [await self.redis.hget(KEYS["workers"], str(inc)) for inc in loads]
            return sorted(str(decode_info(one).key) for one in told if one)  # else replaced
        return []

    async def _info(self, inc):
        return decode_info(await self.redis.hget(KEYS["workers"], str(inc)))

    async def registered(self):
        """What the agent says of its worker, which is registered."""
        return await self._info(Incarnation(int(await self.incarnation() or 0)))

    async def incarnation(self):
        return await self.redis.hget(KEYS["current"], "e:0")

    async def until(self, *live):
        await eventually(self.live, lambda seen: seen == sorted(live))

    async def until_state(self, state):
        await eventually(lambda: asyncio.sleep(0, self.follower.state), lambda seen: seen == state)

    async def late_s(self):
        """As it last reported."""
        for _, entry in await self.redis.xrevrange(KEYS["metrics"], count=50):
            if entry[b"worker"] == b"e:0":
                return decode_metrics(entry)[0].late_s
        return 0.0

    async def asked(self, path, more=3):
        """Until the engine has been asked there so many times more."""
        before = self.engine.requests[path]

        async def look():
            return self.engine.requests[path] - before

        await eventually(look, lambda number: number >= more)

    def begin(self, max_tokens=1000):
        """A stream that is never read."""
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}

        async def ask():
            with suppress(aiohttp.ClientError):
                async with self.http.post(f"{self.engine.url}/v1/completions", json=body) as answer:
                    await answer.read()

        return asyncio.ensure_future(ask())


@asynccontextmanager
async def following_at(redis, folder, engine_url, worker_id="e", **changes):
    lease = {"lease_ttl_s": 0.6}
    settings = EngineAgentSettings(engine_url=engine_url, worker_id=worker_id, **lease | changes)
    async with aiohttp.ClientSession() as http:
        runner, context = ScriptRunner(redis, 5.0), zmq.asyncio.Context.instance()
        follower = EngineFollower(settings, KEYS, runner, http, context, folder)
        running = asyncio.ensure_future(follower.run())
        try:
            yield follower
        finally:
            assert not running.done(), running.exception()
            running.cancel()
            await asyncio.wait([running])


@asynccontextmanager
async def followed(redis, folder, *, until="serving", faults=WELL, **changes):
    async with fake_engine(token_s=0.01, max_model_len=100) as engine:
        engine.faults = faults
        async with following_at(redis, folder, engine.url, **changes) as follower:
            seen = Followed(redis, engine, follower)
            await seen.until_state(until)
            if until == "serving":
                await seen.until("e:0")
            yield seen


async def join(redis):
    """Another worker, which is always well."""
    settings = AgentSettings(LONG_S, 128)
    await Agent(ScriptRunner(redis, 5.0), KEYS, info("other"), settings, lambda: None).start()


def shown(value):
    """For the name of a test: of faults, those that there are."""
    if not isinstance(value, Faults):
        return "said"
    changed = {name: said for name, said in asdict(value).items() if said != getattr(WELL, name)}
    return " ".join(f"{name}={said}" for name, said in changed.items())


@pytest.mark.parametrize(
    "faults",
    [
        Faults(health_s=0.6),
        Faults(health_s=HANG_S),
        Faults(health_status=403),
        Faults(health_status=0),
        Faults(metrics_status=500),
        Faults(metrics_s=HANG_S),
        Faults(metrics_status=401),
        Faults(lists_models=False),
        Faults(models_status=403),
        Faults(models_status=500),
    ],
    ids=shown,
)
async def test_an_engine_that_works_keeps_its_worker(redis, tmp_path, faults):
    async with followed(redis, tmp_path) as engine:
        await join(redis)
        before = await engine.incarnation()
        stream = engine.begin()
        engine.engine.faults = faults
        await engine.asked("/metrics" if faults.health_s else "/health", 20)
        await engine.until("e:0", "other:0")
        assert await engine.incarnation() == before
        stream.cancel()


async def test_an_engine_whose_answers_are_late_is_slow(redis, tmp_path):
    async with followed(redis, tmp_path) as engine:
        engine.engine.faults = Faults(health_s=0.7)
        await eventually(engine.late_s, lambda late_s: 0.5 < late_s < 5)
        engine.engine.faults = WELL
        await eventually(engine.late_s, lambda late_s: late_s == 0.0)
        await engine.until("e:0")


async def test_an_engine_that_computes_nothing_of_what_it_has_is_found_out(redis, tmp_path):
    async with followed(redis, tmp_path, stall_s=0.3) as engine:
        await join(redis)
        before = await engine.incarnation()
        streams = [engine.begin(), engine.begin()]
        await engine.asked("/metrics")
        engine.engine.faults = Faults(how="stall")
        await engine.until("other:0")
        assert engine.follower.state == "ill"
        assert engine.follower.why == "has requests, and computes nothing of them"
        await eventually(engine.late_s, lambda late_s: late_s > 0.5)
        engine.engine.faults = WELL
        await engine.until("e:0", "other:0")
        assert await engine.incarnation() == before
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize(
    "faults", [Faults(health_status=0, metrics_status=0), Faults(health_status=503)], ids=shown
)
async def test_an_engine_that_says_nothing_or_that_it_is_not_well_is_found_out(
    redis, tmp_path, monkeypatch, faults
):
    monkeypatch.setattr(health, "SILENT_S", 0.3)
    async with followed(redis, tmp_path) as engine:
        await join(redis)
        engine.engine.faults = faults
        await engine.until("other:0")
        engine.engine.faults = WELL
        await engine.until("e:0", "other:0")


async def test_the_last_worker_stays_in_service_whatever_its_agent_thinks(redis, tmp_path):
    async with followed(redis, tmp_path) as engine:
        engine.engine.faults = Faults(health_status=503)
        await engine.until_state("ill")

        async def told():
            return (await engine.registered()).ill

        assert await eventually(told) == "says that it is not well"
        await engine.until("e:0")


async def test_an_engine_that_is_gone_leaves_and_is_back_with_its_next_life(redis, tmp_path):
    async with followed(redis, tmp_path, lease_ttl_s=LONG_S) as engine:
        before = await engine.incarnation()
        engine.engine.faults = Faults(away_s=5.0)  # longer than a busy machine overlooks
        await engine.until_state("unavailable")
        await engine.until("e:0")
        assert await engine.incarnation() != before


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (Faults(models_status=403), "/v1/models answers 403: give the agent --engine-api-key"),
        (Faults(models_status=401), "/v1/models answers 401"),
        (Faults(lists_models=False), "the engine lists no model at /v1/models"),
        (Faults(metrics_status=403), "/metrics answers 403"),
    ],
    ids=shown,
)
async def test_an_engine_that_cannot_be_followed_is_looked_at_again(redis, tmp_path, faults, why):
    async with followed(redis, tmp_path, faults=faults, until="unfit") as engine:
        assert why in engine.follower.why
        engine.engine.faults = WELL
        await engine.until("e:0")
        assert engine.follower.why == ""


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_engine_whose_blocks_do_not_fit_the_namespace_is_approximate(
    redis, tmp_path, monkeypatch, is_late
):
    """is_late: another lays the namespace out after the engine was looked at."""
    start = Agent.start

    async def lay_out(agent=None):
        await redis.hset(KEYS["meta"], mapping={"block_size": 7, "shards": 1})
        if agent is not None:
            await start(agent)

    if is_late:
        monkeypatch.setattr(Agent, "start", lay_out)
    else:
        await lay_out()
    async with followed(redis, tmp_path) as engine:
        info = await engine.registered()
        assert (info.trust, info.block_size) == (Trust.APPROXIMATE, 7)
        assert "blocks of 16 tokens are not whole blocks of the 7" in info.trust_cause


async def test_what_an_engine_says_but_once_is_no_change(redis, tmp_path):
    async with followed(redis, tmp_path, lease_ttl_s=LONG_S) as engine:
        before = await engine.incarnation()
        engine.engine.faults = Faults(max_model_len=50)
        await engine.asked("/v1/models", 1)
        engine.engine.faults = WELL
        await engine.asked("/v1/models", 5)
        assert await engine.incarnation() == before
        engine.engine.faults = Faults(max_model_len=50)

        await eventually(engine.incarnation, lambda inc: inc not in (None, before))
        info = await engine.registered()
        assert info.max_model_len == 50


def card(name, **more):
    return {"id": name, "root": "m", "parent": None, "max_model_len": 100} | more


def adapters(number):
    return [card(f"a{n}", root=f"/a/{n}", parent="m") for n in range(number)]


@pytest.mark.parametrize(
    ("cards", "num_models", "num_adapters", "finding"),
    [
        ([card("m"), *adapters(256)], 1, 256, ""),
        ([card("m"), *adapters(257)], 1, 256, "1 of 257 adapters are left out: at most 256"),
        ([card("m"), card("x" * 256, parent="m")], 1, 1, ""),
        ([card("m"), card("x" * 300, parent="m"), *adapters(2)], 1, 2, "1 of 3 adapters are"),
        ([card("m"), card("a\u00a0b", parent="m"), *adapters(1)], 1, 1, "1 of 2 adapters are"),
        ([card("m"), *(card(f"m{n}") for n in range(299))], 256, 0, "44 of 300 models are"),
        ([card("m"), {"object": "model"}, card(None), "x", card(7)], 2, 0, ""),
        ([card("m"), card("n", max_model_len="unlimited"), card("o", max_model_len=-1)], 3, 0, ""),
        ([card("m", max_model_len=1e400)], 1, 0, ""),
    ],
)
async def test_an_engine_that_says_too_much_is_a_worker_without_the_surplus(
    redis, tmp_path, caplog, cards, num_models, num_adapters, finding
):
    async with followed(redis, tmp_path) as seen:
        routers = [Fleet(redis, KEYS, timeout_s=2) for _ in range(2)]
        old, new = routers
        await old.view(await seen.runner.one(reservations.loads(KEYS)))
        seen.engine.says["/v1/models"] = orjson.dumps({"data": cards}).replace(
            b"Infinity", b"1e400"
        )

        async def by(router):
            with suppress(NamespaceMissing):
                await router.view(await seen.runner.one(reservations.loads(KEYS)))
            return [(len(info.models), len(info.adapters)) for info in router.infos]

        for router in routers:
            await eventually(lambda router=router: by(router), [(num_models, num_adapters)].__eq__)
        told = (await seen.registered()).findings
        assert [text[: len(finding)] for text in told] == [finding] * bool(finding)
        assert old.infos == new.infos
        assert "ignoring" not in caplog.text
        assert caplog.text.count("are left out") <= bool(finding)


@pytest.mark.parametrize("tells", ["to the microsecond", "to 10 ms", "nothing"])
async def test_an_engine_under_two_ids_gets_its_requests_by_one(redis, tmp_path, tells):
    """The second id is of another name of its address; another engine began at that moment."""
    async with fake_engine(token_s=0.01) as one, fake_engine(token_s=0.01) as other:
        for engine in (one, other) if tells != "to the microsecond" else ():
            engine.started_s = 1795479223.91
            if tells == "nothing":
                engine.says = {path: engine.says[path] for path in ("/v1/models", "/health")}
        alias = one.url.replace("127.0.0.1", "localhost")
        async with (
            following_at(redis, tmp_path, one.url) as first,
            following_at(redis, tmp_path, other.url, "other"),
        ):
            seen = Followed(redis, one, first)
            await eventually(lambda: redis.keys("*:engines:*"), lambda known: len(known) == 2)
            async with following_at(redis, tmp_path, alias, "copy") as copy:
                text = "has the same engine as worker e:0, which gets the requests"

                async def found():
                    told = [status.info for status in await everyone(seen.redis, KEYS)]
                    check = of_engines(info for info in told if info)
                    return check.ok, check.found

                await eventually(found, lambda check: check == (False, f"copy:0 {text}"))
                assert (copy.state, copy.why) == ("ill", text)
                await seen.until("e:0", "other:0")


@asynccontextmanager
async def service(*engines):
    """A URL of which each connection leads to the next of some engines, and these."""
    behind, number = list(engines), itertools.count()

    async def pipe(reader, writer):
        with suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
        writer.close()

    async def lead(reader, writer):
        url = urlsplit(behind[next(number) % len(behind)].url)
        there, back = await asyncio.open_connection(url.hostname, url.port)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    server = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", behind
    finally:
        server.close()


async def test_several_engines_behind_one_address_are_told_and_end_no_worker(
    redis, tmp_path, caplog
):
    async with (
        fake_engine(token_s=0.01) as a,
        fake_engine(token_s=0.01) as b,
        service(a) as (url, behind),
        following_at(redis, tmp_path, url) as follower,
    ):
        seen = Followed(redis, a, follower)
        await seen.until("e:0")
        incarnation = await seen.incarnation()

        async def rung():
            told = await seen.registered()
            return told.trust, told.trust_cause.partition(":")[0]

        await eventually(rung, lambda told: told == ("exact", ""))
        behind.append(b)
        shared = ("approximate", "several engines answer at one address")
        await eventually(rung, lambda told: told == shared)
        for _ in range(20):
            await seen.asked("/metrics", 1)
            assert await seen.live() == ["e:0"]
        assert await seen.incarnation() == incarnation
        assert "approximate: several engines answer at one address" in caplog.text
        # The first one is gone: that is another engine.
        behind.remove(a)
        await eventually(seen.incarnation, lambda now: now not in (None, incarnation))
        await eventually(rung, lambda told: told == ("exact", ""))
        assert caplog.text.count("several engines") == 1
