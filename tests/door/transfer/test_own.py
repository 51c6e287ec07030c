"""Prompts that our own engines hand on to each other, as processes, behind one door."""

import asyncio
import re
import signal
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from types import MappingProxyType

import httpx
import pytest

from tests.door.conftest import MODEL, models, replica, until_serving, worker, worker_here
from tests.door.test_failures import nothing_reserved
from tests.eventually import eventually

ROLES = {"p": "prefill", "d": "decode"}


@asynccontextmanager
async def fleet(
    url, roles, policy="latency", kv_lease_s=30.0, of_each=MappingProxyType({}), **options
):
    """A door before workers of those roles, as processes. of_each: options of some, by name."""
    with ExitStack() as opened:
        workers = {
            name: opened.enter_context(
                worker(
                    url,
                    name,
                    **{"role": role, "kv_transfer": "kvroute", **options, **of_each.get(name, {})},
                )
            )
            for name, role in roles.items()
        }
        async with replica(url, policy=policy, kv_lease_s=kv_lease_s) as door:
            await until_serving(door, len(roles))
            yield door, workers


@asynccontextmanager
async def fleet_here(url, roles, policy="latency", kv_lease_s=30.0, **options):
    """A door before workers of those roles in this process, and their URLs."""
    async with AsyncExitStack() as opened:
        urls = {
            name: await opened.enter_async_context(
                worker_here(url, name, role=role, kv_transfer="kvroute", **options)
            )
            for name, role in roles.items()
        }
        async with replica(url, policy=policy, kv_lease_s=kv_lease_s) as door:
            await until_serving(door, len(roles))
            yield door, urls


async def ask(door, prompt, **more):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    return await door.post("/v1/completions", json=body)


def cached(answer):
    details = answer.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]


async def overlap_of(door, prompt, name):
    """Blocks of the prompt that the index says a worker holds."""
    asked = {"token_ids": prompt, "explain": True, "reserve": False}
    decision = (await door.post("/v1/route", json=asked)).json()
    stated = {one["worker_id"]: one["overlap_blocks"]["device"] for one in decision["candidates"]}
    return stated[name]


async def test_a_split_prompt_is_computed_by_its_source_and_cached_at_both(one_redis_server, redis):
    prompt = list(range(5, 175))  # ten blocks and ten tokens
    async with fleet_here(one_redis_server.url, ROLES, policy="least_loaded") as (door, _):
        said = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 50}]}
        chat = await door.post("/v1/chat/completions", json=said | {"max_tokens": 8})
        for answer in (chat, await ask(door, prompt)):
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvroute-source"] == "p:0"
            assert answer.headers["x-kvroute-worker"] == "d:0"
            assert cached(answer) == 0, "nobody had it cached"
        for name in ROLES:
            await eventually(
                lambda name=name: overlap_of(door, prompt, name),
                lambda blocks: blocks == 10,
            )
        assert cached(await ask(door, [*prompt, 1])) == 160
        await nothing_reserved(redis)


async def test_a_prompt_is_never_handed_on_to_another_namespace(one_redis_server):
    """Two revisions of a model share its name, in a namespace each."""
    url, namespaces = one_redis_server.url, ("old", "new")
    async with AsyncExitStack() as opened:
        for namespace in namespaces:
            for name, role in ROLES.items():
                about = {"role": role, "kv_transfer": "kvroute", "namespace": namespace}
                await opened.enter_async_context(worker_here(url, f"{namespace}-{name}", **about))
        weights = {"namespace_weights": "old=1,new=1", "policy": "least_loaded"}
        door = await opened.enter_async_context(replica(url, **weights))

        expected = {(f"{each}-p:0", f"{each}-d:0") for each in namespaces}
        seen = set[tuple[str, str]]()

        async def pairs():
            """Who computed a prompt, and who went on with it."""
            for n in range(20):
                headers = (await ask(door, [n] * 170)).headers
                seen.add((headers["x-kvroute-source"], headers["x-kvroute-worker"]))
            return seen

        await eventually(lambda: models(door), bool)
        assert await eventually(pairs, lambda found: found >= expected) == expected


@pytest.mark.slow
async def test_a_prompt_computed_on_two_ranks_is_gone_on_from_on_one(one_redis_server, redis):
    prompt = [n * 7 % 251 for n in range(170)]
    options = {
        "engine": "torch",
        "model": "tiny",
        "device": "cpu",
        "threads": 1,
        "prefill_chunk": 32,
        "kv_pool_tokens": 1024,
    }
    ranks = {"p": {"tp_size": 2}, "d": {"tp_size": 1}}
    async with fleet(
        one_redis_server.url, ROLES, policy="least_loaded", of_each=ranks, **options
    ) as (door, workers):
        registered = (await door.get("/v1/workers")).json()["workers"]
        assert {each["worker_id"]: each["tp_size"] for each in registered} == {"p": 2, "d": 1}
        split = await ask(door, prompt, temperature=0)
        assert split.status_code == 200, split.text
        assert split.headers["x-kvroute-source"] == "p:0"
        assert split.headers["x-kvroute-worker"] == "d:0"
        for name in ROLES:
            await eventually(
                lambda name=name: overlap_of(door, prompt, name),
                lambda blocks: blocks == 10,
            )
        again = await ask(door, prompt, temperature=0)
        assert cached(again) == 160
        assert again.json()["choices"] == split.json()["choices"]
        async with httpx.AsyncClient(base_url=workers["d"].url) as target:
            counted = (await target.get("/metrics")).text
        assert 'kv_block_events_total{event="fetched"} 10.0' in counted
        await nothing_reserved(redis)
        listed = (await door.get("/v1/workers")).json()["workers"]
        assert [one["kv_lease_s"] for one in listed] == [30.0, 30.0]


async def test_a_full_workers_prefix_is_fetched_and_the_rest_computed(one_redis_server, redis):
    prefix = list(range(5, 5 + 4000))
    both = {"a": "both", "b": "both"}
    async with fleet_here(one_redis_server.url, both, max_requests=1) as (door, _):
        first = await ask(door, prefix)
        holder = first.headers["x-kvroute-worker"].removesuffix(":0")
        other = next(iter(both.keys() - {holder}))
        await eventually(lambda: overlap_of(door, prefix, holder), lambda blocks: blocks == 250)
        await nothing_reserved(redis)
        held = await door.post("/v1/route", json={"token_ids": prefix, "exclude": [f"{other}:0"]})
        assert held.json()["worker_id"] == holder

        longer = await ask(door, prefix + [7] * 100)

        assert longer.headers["x-kvroute-worker"] == f"{other}:0"
        assert longer.headers["x-kvroute-source"] == f"{holder}:0"
        assert cached(longer) == 4000
        await door.delete(f"/v1/requests/{held.json()['reservation_id']}")
        await eventually(lambda: overlap_of(door, prefix, other), lambda blocks: blocks == 250)
        again = await ask(door, prefix)
        assert again.json()["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]
        await nothing_reserved(redis)


async def test_a_killed_source_or_target_costs_no_request(one_redis_server, redis):
    roles = ROLES | {"e": "decode"}
    async with fleet(one_redis_server.url, roles, policy="least_loaded") as (door, workers):
        prompts = [[number, *range(1000)] for number in range(12)]
        asking = [asyncio.create_task(ask(door, prompt)) for prompt in prompts]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        workers["d"].end(signal.SIGKILL)
        answers = await asyncio.gather(*asking)
        workers["p"].end(signal.SIGKILL)
        answers += [await ask(door, [99, *range(1000)])]
        assert [answer.status_code for answer in answers] == [200] * 13
        assert "x-kvroute-source" not in answers[-1].headers
        alone = await ask(door, prompts[0])
        assert alone.json()["choices"][0]["text"] == answers[0].json()["choices"][0]["text"]
        await nothing_reserved(redis)


async def test_a_client_gone_between_the_steps_leaves_nothing(one_redis_server, redis, monkeypatch):
    monkeypatch.setattr("workers.main.KEEP_S", 2.0)
    async with fleet_here(
        one_redis_server.url,
        ROLES,
        policy="least_loaded",
        kv_lease_s=2.0,
        link_gbit=0.001,
        speedup=1,
    ) as (door, workers):
        asking = asyncio.create_task(ask(door, list(range(500))))
        await eventually(lambda: keeps_blocks(workers["p"]))
        asking.cancel()
        await nothing_reserved(redis, within_s=20.0)


async def keeps_blocks(source):
    """Whether it has computed a prompt, and waits for it to be fetched."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{source}/metrics")).text
    used = re.search(r'^kvroute_engine_kv_blocks\{what="used"\} (\S+)$', text, re.MULTILINE)
    running = re.search(r'^kvroute_engine_requests\{state="running"\} (\S+)$', text, re.MULTILINE)
    assert used is not None
    assert running is not None
    return float(used[1]) > 0 and float(running[1]) == 0
