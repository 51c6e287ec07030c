"""Trust falls by what an engine lacks or its agent finds out; the worker stays."""

from functools import partial
from itertools import count

import pytest

from tests.e2e.engines import agent_here
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fakes.engine import BLOCK_SIZE, fake_engine
from workers.bridge.events.events import AllBlocksCleared, BlockStored

LEASE_S = 1.0
"""Agents say every third of it where they are."""


def prompt(number, blocks=5):
    return [number, *range(1000, 1000 + blocks * BLOCK_SIZE)]


class Fleet:
    """Engines by the name of their worker, and a router."""

    def __init__(self, router, **engines):
        self.router, self.engines = router, engines

    async def ask(self, ids):
        """Returns the worker of a request, its predicted blocks there, and their trust."""
        asked = {"model": "m", "prompt": ids, "max_tokens": 1}
        answer = await self.router.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        name, overlap, trust = (
            answer.headers[f"x-kvroute-{about}"] for about in ("worker", "overlap", "trust")
        )
        return name.partition(":")[0], int(overlap.partition("/")[0]), trust

    async def look(self, name, ids):
        others = [other for other in self.engines if other != name]
        asked = {"token_ids": ids, "reserve": False, "exclude": others}
        answer = (await self.router.post("/v1/route", json=asked)).json()
        return sum(answer.get("overlap_blocks", {}).values()), answer.get("trust", "")

    async def rungs(self):
        answer = (await self.router.get("/v1/workers")).json()
        return {w["worker_id"]: (w["trust"], w["trust_cause"]) for w in answer["workers"]}

    async def until(self, name, trust):
        """The cause, once the worker is there on this rung."""
        rungs = await eventually(self.rungs, lambda now: now.get(name, ("",))[0] == trust)
        return rungs[name][1]


def without_prefix_caching(engine):
    told = engine.says["/metrics"]
    engine.says["/metrics"] = lambda: told().replace(b'caching="True"', b'caching="False"')


def of_sglang(**changes):
    def change(engine):
        engine.says["/server_info"] |= changes

    return change


def with_pages_of_one_token(engine):
    engine.says["/server_info"]["kv_events"] |= {"block_size": 1}


def that_connects(engine):
    sources = engine.events.told
    sources["0"]["endpoint"] = "tcp://127.0.0.1:5557"
    engine.says["/kv_event_sources"] = sources


@pytest.mark.parametrize(
    ("kind", "lack", "trust", "cause"),
    [
        ("vllm", without_prefix_caching, "load_only", "an encoder cannot"),
        ("vllm", that_connects, "approximate", "connects to tcp://127.0.0.1:5557"),
        ("sglang", of_sglang(disable_radix_cache=True), "load_only", "--disable-radix-cache"),
        ("sglang", of_sglang(disaggregation_mode="decode"), "load_only", "only decodes"),
        ("sglang", with_pages_of_one_token, "approximate", "one token each"),
        ("sglang", of_sglang(), "exact", ""),
    ],
)
async def test_what_an_engine_lacks_lowers_its_trust_and_it_serves(
    one_redis_server, tmp_path, kind, lack, trust, cause
):
    url = one_redis_server.url
    async with fake_engine(kind=kind) as lacking, fake_engine(kind=kind) as other:
        lack(lacking)
        async with (
            agent_here(lacking.url, url, tmp_path, "lacking", lease_ttl_s=LEASE_S),
            agent_here(other.url, url, tmp_path, "other", lease_ttl_s=LEASE_S),
            started_replica(url, show_decision=True) as router,
        ):
            fleet = Fleet(router, lacking=lacking, other=other)
            assert cause in await fleet.until("lacking", trust)
            await fleet.until("other", "exact")
            asked = [await fleet.ask(prompt(number)) for number in range(8)]
            assert {name for name, _, _ in asked} == {"lacking", "other"}
            (number, *_) = (n for n, (name, _, _) in enumerate(asked) if name == "lacking")
            seen = (0 if trust == "load_only" else 5), trust
            assert await eventually(lambda: fleet.look("lacking", prompt(number)), seen.__eq__)


@pytest.mark.parametrize("replays", [True, False])
async def test_an_agent_that_hears_nothing_any_more_is_approximate_until_it_does(
    one_redis_server, tmp_path, replays
):
    url, cleared = one_redis_server.url, AllBlocksCleared()
    async with fake_engine() as a, fake_engine() as b:
        for engine in () if replays else (a, b):
            engine.says["/kv_event_sources"]["0"]["replay_endpoint"] = None
        async with (
            agent_here(a.url, url, tmp_path, "a", lease_ttl_s=LEASE_S),
            agent_here(b.url, url, tmp_path, "b", lease_ttl_s=LEASE_S),
            started_replica(url, show_decision=True) as router,
        ):
            fleet = Fleet(router, a=a, b=b)

            async def trusts(*publish):
                for engine in (a, b):
                    engine.events.publish(publish)
                return {trust for trust, _ in (await fleet.rungs()).values()}

            if not replays:
                assert "nothing is heard" in await fleet.until("a", "approximate")
            await eventually(partial(trusts, *() if replays else (cleared,)), {"exact"}.__eq__)

            for engine in (a, b):
                engine.events.answers = False
                engine.events.cut()
            numbers = count(100)

            async def after_one_more():
                await fleet.ask(prompt(next(numbers)))
                return await trusts()

            await eventually(after_one_more, {"approximate"}.__eq__)
            # One prompt, again and again, stays where it was computed.
            first, *more = [await fleet.ask(prompt(1)) for _ in range(6)]
            assert {(name, trust) for name, _, trust in more} == {(first[0], "approximate")}
            assert more[-1][1] == 5

            for engine in (a, b):
                engine.events.answers = True
                engine.events.mend()
            if replays:
                await eventually(trusts, {"exact"}.__eq__)
                assert await fleet.look(first[0], prompt(1)) == (5, "exact")
            else:
                # What came meanwhile is lost, until all is gone.
                stored = BlockStored([1], None, [1] * BLOCK_SIZE, BLOCK_SIZE)
                await eventually(partial(trusts, stored), {"bound"}.__eq__)
                await eventually(partial(trusts, cleared), {"exact"}.__eq__)


async def test_an_heir_is_not_exact_before_it_knows_what_the_engine_holds(
    one_redis_server, tmp_path
):
    url = one_redis_server.url
    async with fake_engine() as engine, started_replica(url, show_decision=True) as router:
        fleet = Fleet(router, a=engine)
        async with agent_here(engine.url, url, tmp_path / "1", "a", lease_ttl_s=LEASE_S):
            await fleet.until("a", "exact")
            for number in range(200):
                engine.events.publish(engine.cache.store(prompt(number, 50)))
            await eventually(lambda: fleet.look("a", prompt(199, 50)), (50, "exact").__eq__)
        engine.events.answers = False
        async with agent_here(engine.url, url, tmp_path / "2", "a", lease_ttl_s=LEASE_S):
            seen = set[tuple[int, str]]()

            async def look():
                held = await fleet.look("a", prompt(199, 50))
                seen.add(held)
                return held[1]

            assert "can the agent reach it" in await fleet.until("a", "approximate")
            engine.events.answers = True
            await eventually(look, lambda trust: trust == "exact")
            assert {held for held in seen if held[1] == "exact"} == {(50, "exact")}
            assert any(trust == "approximate" for _, trust in seen)


async def test_a_chunk_below_the_device_counts_as_a_whole_or_not_at_all(one_redis_server, tmp_path):
    url, ids, names = one_redis_server.url, prompt(1, 8)[: 8 * BLOCK_SIZE], list(range(21, 29))
    async with fake_engine() as engine, started_replica(url) as router:
        fleet = Fleet(router, a=engine)

        async def promised():
            prompts = [[*ids[: blocks * BLOCK_SIZE], *[9] * 20] for blocks in (3, 4, 7, 8)]
            return [(await fleet.look("a", one))[0] for one in prompts]

        async with agent_here(engine.url, url, tmp_path, "a", lease_ttl_s=LEASE_S):
            await fleet.until("a", "exact")
            for at in (0, 4):
                tokens = ids[at * BLOCK_SIZE : (at + 4) * BLOCK_SIZE]
                parent = names[at - 1] if at else None
                chunk = BlockStored(names[at : at + 4], parent, tokens, BLOCK_SIZE, medium="CPU")
                engine.events.publish([chunk])
            await eventually(promised, [0, 4, 4, 8].__eq__)
        # Another agent has what this one knew.
        async with agent_here(engine.url, url, tmp_path, "a", lease_ttl_s=LEASE_S):
            await eventually(promised, [0, 4, 4, 8].__eq__)
            device = BlockStored(names[:6], None, ids[: 6 * BLOCK_SIZE], BLOCK_SIZE)
            engine.events.publish([device])
            await eventually(promised, [3, 4, 6, 8].__eq__)
