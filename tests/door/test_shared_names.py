"""One name of a model, served by the workers of several namespaces."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from aiohttp import web

from app.core.keys import DATA_VERSION, Keyspace
from app.core.settings.kinds import parse_sharing
from app.ops.namespaces import delete_namespace
from app.state import leases, models
from app.state.scripts import ScriptRunner
from tests.door.conftest import changing_replica, completing, replica
from tests.door.conftest import models as models_of
from tests.eventually import eventually

Door = httpx.AsyncClient


@asynccontextmanager
async def fleet(redis, *namespaces):
    """A worker of model `m` in each; its engine says which namespace it is of. They claim the name
    in that order."""
    async with AsyncExitStack() as stack:
        workers = {}
        for name in namespaces:

            async def complete(_, name=name):
                return web.json_response({"choices": [{"text": name}], "tokens": [], "from": name})

            engine = completing(
                redis, name, complete, path="/{any:.*}", keys=Keyspace(name), adapters=("sql",)
            )
            workers[name] = await stack.enter_async_context(engine)
            await ScriptRunner(redis, 5.0).one(models.announce(name, ["m", "sql"]))
        yield workers


async def asked(door, session="", model="m"):
    """The namespace whose worker answers."""
    body = {"model": model, "prompt": [1, 2]}
    headers = {"x-session-id": session} if session else {}
    answer = await door.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def counts(door, number=40):
    return Counter(await asyncio.gather(*(asked(door) for _ in range(number))))


async def all_from(door, namespace):
    """Returns once that one answers."""

    async def answers():
        body = {"model": "m", "prompt": [1, 2]}
        posts = [door.post("/v1/completions", json=body) for _ in range(20)]
        return {(one.status_code, namespace in one.text) for one in await asyncio.gather(*posts)}

    await eventually(answers, lambda found: found == {(200, True)})


async def until_both(door, *namespaces):
    await eventually(lambda: models_of(door), bool)
    await eventually(lambda: counts(door), lambda found: found.keys() == {*namespaces})


async def missing(door):
    said = (await door.get("/readiness")).json()["missing"]
    return [remark for remark in said if not remark.startswith(("workers: ", "tokenizer"))]


async def test_requests_are_spread_by_weights_that_change_while_a_router_runs(
    one_redis_server, redis
):
    url = one_redis_server.url
    async with (
        fleet(redis, "old", "new"),
        changing_replica(url, namespace_weights="old=3,new=1") as (door, change),
    ):
        await until_both(door, "old", "new")
        assert 10 < (await counts(door, 120))["new"] < 55
        assert await missing(door) == []
        change(namespace_weights="old=0,new=1")
        assert await counts(door) == {"new": 40}
        change(namespace_weights="old=1,new=0")
        assert await counts(door) == {"old": 40}
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            body = {"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "x"}]}
            assert (await door.post(path, json=body)).json()["from"] == "old"


async def test_a_replica_that_has_just_started_knows_its_models(one_redis_server, redis):
    async with fleet(redis, "old", "new"):
        for _ in range(3):
            async with replica(one_redis_server.url) as door:
                assert await asked(door) == "old"
        async with replica(one_redis_server.url) as door:
            assert await models_of(door) == ["m", "sql"]


async def test_a_session_stays_where_it_began(one_redis_server, redis):
    url, names = one_redis_server.url, [f"s{n}" for n in range(10)]
    async with fleet(redis, "old", "new") as workers:
        weights = {"namespace_weights": "old=1,new=0"}
        async with changing_replica(url, **weights) as (door, change):
            await all_from(door, "old")
            assert {await asked(door, name) for name in names} == {"old"}
            change(namespace_weights="old=0,new=1")
            assert {await asked(door, name) for name in names} == {"old"}
            assert {await asked(door, f"later-{name}") for name in names} == {"new"}
        async with replica(url, namespace_weights="old=1,new=9") as other:  # which saw none of them
            await until_both(other, "old", "new")
            assert {await asked(other, name) for name in names} == {"old"}
            assert {await asked(other, f"later-{name}") for name in names} == {"new"}
            await workers["old"].retire()
            await all_from(other, "new")
            assert {await asked(other, name) for name in names} == {"new"}


def leaves(workers, redis):
    """How the last worker of `old` may go."""
    old = workers["old"]
    keys = Keyspace("old")

    async def lapses():
        old.info = replace(old.info, address="http://127.0.0.1:1")  # else it is only its agent
        await old.register()
        await old.activate()
        await redis.zadd(keys["leases"], {str(old.incarnation): 1})

    async def is_reset():
        await delete_namespace(redis, keys)

    async def drains():
        await ScriptRunner(redis, 5.0).one(leases.drain(keys, old.info.key))

    return {"ends": old.retire, "lapses": lapses, "is reset": is_reset, "drains": drains}


@pytest.mark.parametrize("how", ["ends", "lapses", "is reset", "drains"])
@pytest.mark.parametrize("weights", ["old=1,new=1", pytest.param("", marks=pytest.mark.slow)])
async def test_a_name_goes_to_others_as_soon_as_its_last_worker_does(
    one_redis_server, redis, how, weights
):
    url = one_redis_server.url
    async with (
        fleet(redis, "old", "new") as workers,
        replica(url, namespace_weights=weights) as door,
    ):
        await eventually(lambda: models_of(door), bool)
        await eventually(lambda: counts(door), lambda found: "old" in found)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(_never_fails(door))
            await leaves(workers, redis)[how]()
            if weights:
                await all_from(door, "new")
            asking.cancel()
        await all_from(door, "new")


async def _never_fails(door):
    while True:
        await asked(door)


async def test_a_request_that_one_namespace_cannot_answer_goes_to_another(one_redis_server, redis):
    """Its only engine is dead, and nobody knows yet; or its worker is full, or takes less."""
    url = one_redis_server.url
    async with (
        fleet(redis, "old", "new") as workers,
        replica(url, namespace_weights="old=1,new=1", seed=7) as door,
    ):
        await until_both(door, "old", "new")
        for about in ({"address": "http://127.0.0.1:1"}, {"max_model_len": 1}, {"max_requests": 0}):
            worker = workers["new"]
            worker.info = replace(worker.info, **about)
            await worker.register()
            await worker.activate()
            for path in ("/v1/completions", "/tokenize"):
                body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}
                for _ in range(20):
                    answer = await door.post(path, json=body)
                    assert answer.status_code == 200, (about, answer.text)


async def test_who_is_not_named_gets_none_of_a_names_requests(one_redis_server, redis):
    url = one_redis_server.url
    async with (
        fleet(redis, "old", "new", "thief") as workers,
        changing_replica(url, namespace_weights="old=1,new=1") as (door, change),
    ):
        await until_both(door, "old", "new")
        told = [
            "models: m, sql: none of its requests go to namespace thief, as old claimed it first, "
            "and namespace_weights has no group of both"
        ]
        assert await eventually(lambda: missing(door), bool) == told
        await workers["old"].retire()
        await all_from(door, "new")
        await workers["new"].retire()
        await all_from(door, "thief")
        change(namespace_weights="")
        await workers["old"].register()
        await workers["old"].activate()
        await all_from(door, "old")


async def test_what_weights_and_aliases_name_in_vain_is_told(one_redis_server, redis, caplog):
    url = one_redis_server.url
    settings = {"namespace_weights": "old=0,new=1", "model_alias": "a=m,b=nothing"}
    async with fleet(redis, "old"), changing_replica(url, **settings) as (door, change):

        async def ready():
            return (await door.get("/readiness")).status_code, await missing(door)

        in_vain = [
            "model_alias: b=nothing: nobody has a model of that name",
            "namespace_weights: new=1: no worker is alive in that namespace",
        ]
        refusal = (
            "No worker that serves 'm' is alive in a namespace that gets its requests "
            "(namespace_weights has old=0)."
        )
        await eventually(ready, lambda found: found == (503, in_vain))
        for name in ("m", "a"):
            answer = await door.post("/v1/completions", json={"model": name, "prompt": "hi"})
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == refusal
        change(namespace_weights="old=1,new=0")
        in_vain[1] = in_vain[1].replace("=1", "=0")
        assert {*in_vain} <= {*caplog.messages}
        await eventually(ready, lambda found: found == (200, in_vain))
        change(namespace_weights="", model_alias="a=m")
        await eventually(ready, lambda found: found == (200, []))


async def test_a_namespace_of_another_release_has_no_names(one_redis_server, redis):
    url, weights = one_redis_server.url, {"namespace_weights": "old=1,new=0"}
    async with fleet(redis, "old", "new"), changing_replica(url, **weights) as (door, change):
        await all_from(door, "old")
        await redis.hset(Keyspace("old")["meta"], "version", DATA_VERSION + 1)
        await redis.hset(Keyspace("old")["meta"], "workers_ms", 1)

        async def error():
            answer = await door.post("/v1/completions", json={"model": "m", "prompt": "hi"})
            return answer.text

        await eventually(error, lambda text: "namespace_weights has new=0" in text)
        assert (await door.get("/readiness")).status_code == 503
        change(namespace_weights="")
        await all_from(door, "new")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("old", "'old': the weight must be 0, or from 0.001 to 1000"),
        ("=1", "'=1': a namespace and its weight are needed"),
        ("old=", "'old=': the weight must be 0, or from 0.001 to 1000"),
        ("old=-1,new=1", "'old=-1': the weight must be"),
        ("old=nan", "'old=nan': the weight must be"),
        ("old=inf", "'old=inf': the weight must be"),
        ("a b=1", "'a b=1': a namespace and its weight are needed"),
        ("old=1,old=2", "'old=2': old has a weight already"),
        ("old=1,new=1;new=2,x=1", "'new=2': new has a weight already"),
        ("a=1,b=1; old=0,new=0", "'old=0,new=0': one weight at least must be more than 0"),
    ],
)
def test_weights_that_cannot_be_meant_are_named(text, error):
    with pytest.raises(ValueError, match=error):
        parse_sharing(text)


def test_weights_may_stand_on_lines_of_their_own():
    groups = ({"old": 9.0, "new": 1.0}, {"a": 0.5})
    assert parse_sharing("old=9, new=1;\n a = 0.5,\n;") == groups
