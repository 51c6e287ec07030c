"""`kvroute agent` beside an engine: routers know what it holds, and whether it serves."""

import signal
from contextlib import asynccontextmanager

import httpx

from tests.e2e.engines import Process, SharedPrompts, agent, complete, engine, overlap
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

BLOCK = 16


@asynccontextmanager
async def client_of(process):
    async with httpx.AsyncClient(base_url=process.url, timeout=30) as client:
        yield client


async def serving(router):
    answer = (await router.get("/v1/workers")).json()
    return sorted(f"{worker['worker_id']}:{worker['dp_rank']}" for worker in answer["workers"])


async def until_serving(router, *expected):
    async def look():
        return await serving(router)

    await eventually(look, lambda seen: seen == list(expected))


async def check(router, engine, prompts, number):
    """Raises AssertionError unless the engine reuses what the router says that it holds."""
    for _ in range(number):
        prompt = prompts.next()
        # The last token is always computed, and with it its block.
        most = (len(prompt) - 1) // BLOCK

        async def look(prompt=prompt, most=most):
            return min(await overlap(router, prompt), most)

        before = await look()
        assert await complete(engine, "m", prompt) == before * BLOCK
        await eventually(look, lambda seen, most=most: seen == most)


async def until_known(router, prompt, worker_id="e"):
    """A new agent registers before it has shown all that its engine holds."""

    async def look():
        return await overlap(router, prompt, worker_id)

    await eventually(look, lambda seen: seen >= (len(prompt) - 1) // BLOCK)


async def test_overlap_is_what_the_engine_reuses_over_restarts_of_either(
    one_redis_server, tmp_path
):
    url, prompts = one_redis_server.url, SharedPrompts(1)
    async with started_replica(url) as router:
        with engine(kv_blocks=256) as first:
            port = first.url.rpartition(":")[2]
            async with client_of(first) as http:
                prompts.next()
                await complete(http, "m", prompts.last)
                for number in (signal.SIGKILL, signal.SIGTERM):
                    with agent(first.url, url, tmp_path) as beside:
                        await until_serving(router, "e:0")
                        await until_known(router, prompts.last)
                        await check(router, http, prompts, 15)
                        beside.end(number)
                    # One that is killed leaves a well engine in service; one that ends, does not.
                    await until_serving(router, *(["e:0"] if number == signal.SIGKILL else []))
                with agent(first.url, url, tmp_path):
                    await until_serving(router, "e:0")
                    await until_known(router, prompts.last)
                    await check(router, http, prompts, 15)
                    first.end(signal.SIGKILL)
                    await until_serving(router)
                    with engine(port=int(port), kv_blocks=256) as second:
                        await until_serving(router, "e:0")
                        async with client_of(second) as again:
                            assert await overlap(router, prompts.next()) == 0
                            await check(router, again, prompts, 15)


async def test_an_engine_that_forgets_all_is_believed(one_redis_server, tmp_path):
    prompt = list(range(100, 180))
    async with started_replica(one_redis_server.url) as router:
        with engine() as process, agent(process.url, one_redis_server.url, tmp_path) as beside:
            await until_serving(router, "e:0")
            async with client_of(process) as http, client_of(beside) as agent_http:

                async def look():
                    return await overlap(router, prompt)

                await complete(http, "m", prompt)
                await eventually(look, lambda seen: seen == 5)
                assert (await http.post("/reset_prefix_cache")).json()["success"]
                await eventually(look, lambda seen: seen == 0)
                metrics = (await agent_http.get("/metrics")).text
                assert 'kvroute_agent_engine_state{state="serving",worker="e"} 1.0' in metrics
                assert 'kvroute_agent_unknown_cache_share{rank="0",worker="e"} 0.0' in metrics
                assert (await agent_http.get("/health")).json() == {"engine": "serving"}


async def test_agents_of_many_engines_know_what_each_holds_and_take_over_from_one_that_dies(
    one_redis_server, tmp_path
):
    url, prompt, listed = one_redis_server.url, SharedPrompts(2).next(), tmp_path / "engines.toml"
    flags = [
        *("agent", f"--engines={listed}", f"--redis-url={url}", "--port=0"),
        f"--namespace={NAMESPACE}",
    ]
    async with started_replica(url) as router:
        with engine() as a, engine() as b:
            listed.write_text(f'[a]\nengine-url = "{a.url}"\n[b]\nengine-url = "{b.url}"\n')
            with Process(*flags, f"--memory-folder={tmp_path / 'dying'}").ending() as dying:
                await until_serving(router, "a:0", "b:0")
                async with client_of(a) as http, client_of(dying) as agent_http:
                    await complete(http, "m", prompt)
                    await until_known(router, prompt, "a")
                    assert await overlap(router, prompt, "b") == 0
                    health = (await agent_http.get("/health")).json()
                    assert health == {
                        "engines": {n: {"engine": "serving"} for n in "ab"},
                        "findings": [],
                    }
                    metrics = (await agent_http.get("/metrics")).text
                    assert 'kvroute_agent_engine_state{state="serving",worker="b"} 1.0' in metrics
                    assert 'kvroute_agent_engines{what="followed"} 2.0' in metrics
                dying.end(signal.SIGKILL)
            with Process(*flags, f"--memory-folder={tmp_path / 'heir'}").ending() as heir:

                async def states():
                    workers = (await router.get("/v1/workers")).json()["workers"]
                    return [worker["state"] for worker in workers]

                async with client_of(heir) as agent_http:

                    async def followed():
                        return len((await agent_http.get("/health")).json()["engines"])

                    await eventually(followed, lambda number: number == 2)
                await eventually(states, lambda seen: seen == ["serving"] * 2)
                # The index is told again, by one that knew nothing.
                await until_known(router, prompt, "a")
            # Nobody has said that the engines end.
            await until_serving(router, "a:0", "b:0")


def test_an_agent_without_an_engine_to_follow_says_so():
    from click.testing import CliRunner

    from app.cli import main

    result = CliRunner().invoke(main, ["agent"])
    assert result.exit_code == 1
    assert "--engine-url: where does the engine listen?" in result.output
    both = ["agent", "--engine-url=http://a:1", "--engines=x.toml"]
    assert "--engine-url and --engines: not together" in CliRunner().invoke(main, both).output
