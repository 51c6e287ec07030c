"""Tokenizers of models: each loaded and kept once, and looked at again where that failed."""

import asyncio
import gc
import shutil
import threading
from collections import Counter

import pytest
from aiohttp import web

from app.door.prompts import prompts, tokenizers
from app.door.prompts.tokenizers import Tokenizers
from app.tokens import load
from tests.door.conftest import completing, models, replica
from tests.door.test_answers import LLAMA, counted
from tests.eventually import eventually


class Panic(BaseException):
    """As those of libraries in Rust."""


@pytest.fixture
def loads(monkeypatch):
    """How often each folder was loaded."""
    counts = Counter()

    def counting(folder):
        counts[folder] += 1
        return load(folder)

    monkeypatch.setattr(tokenizers, "load", counting)
    return counts


@pytest.fixture
async def kept():
    async with asyncio.TaskGroup() as tasks:

        def beside(_, run):
            async def once():
                await run()

            return tasks.create_task(once())

        yield Tokenizers(beside)


async def settled(tokenizers, *sources):
    async def look():
        return [tokenizers.at(source) for source in sources]

    loaded = await look()  # kept, while it is waited for
    await eventually(look, lambda some: not any(one.loading for one in some))
    return loaded


async def test_a_folder_is_loaded_once_under_all_its_names(kept, loads, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(LLAMA)
    names = (str(LLAMA), str(link), f"{LLAMA}/../{LLAMA.name}")
    loaded = await settled(kept, *names)
    assert loads == {str(LLAMA.resolve()): 1}
    assert len({id(one.renderer) for one in loaded}) == 1


async def test_what_nobody_uses_any_more_is_forgotten(kept, loads):
    for _ in range(2):
        assert (await settled(kept, str(LLAMA)))[0].renderer
        gc.collect()
    assert loads.total() == 2


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), KeyError("x"), Panic("x")])
async def test_whatever_loading_raises_it_is_tried_again_only_after_a_pause(
    kept, monkeypatch, error
):
    calls = []

    def failing(folder):
        calls.append(folder)
        raise error

    monkeypatch.setattr(tokenizers, "load", failing)
    [loaded] = await settled(kept, str(LLAMA))
    for _ in range(5):
        assert kept.at(str(LLAMA)).loading is None
    assert len(calls) == 1
    assert type(error).__name__ in loaded.why_not
    monkeypatch.setattr(tokenizers, "load", load)
    loaded.again_s = 0.0
    await settled(kept, str(LLAMA))
    assert loaded.renderer


async def test_a_folder_that_has_changed_is_loaded_anew_when_asked_to_look_again(
    kept, loads, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    [loaded] = await settled(kept, str(folder))
    first = loaded.renderer
    for changed in (False, True):
        if changed:
            (folder / "tokenizer_config.json").touch()
        loaded.again_s = 0.0
        kept.look_again(str(folder))
        await settled(kept, str(folder))
        assert (loaded.renderer is first) is not changed
    assert loads.total() == 2


PATH = "/v1/completions"


async def complete(_):
    return web.json_response({"choices": []})


async def rendered_here(door, name):
    asked = {"model": name, "prompt": "x"}
    assert (await door.post(PATH, json=asked)).status_code == 200
    return await counted(door, f'tokens_from_total{{model="{name}",source="router"}}')


async def test_the_first_prompts_wait_for_the_tokenizer_but_not_for_long(
    one_redis_server, redis, monkeypatch
):
    may_load = threading.Event()

    def slowly(folder):
        may_load.wait()
        return load(folder)

    async def first(tokens_from):
        async with replica(one_redis_server.url) as door:
            await eventually(lambda: models(door), bool)
            asked = asyncio.create_task(rendered_here(door, "m"))
            if tokens_from == "router":
                may_load.set()
            return "router" if await asked else "elsewhere"

    monkeypatch.setattr(tokenizers, "load", slowly)
    async with completing(redis, "a", complete, tokenizer=str(LLAMA)):
        try:
            monkeypatch.setattr(tokenizers, "FIRST_S", 60.0)
            assert await first("router") == "router"
            may_load.clear()
            monkeypatch.setattr(tokenizers, "FIRST_S", 0.01)
            assert await first("elsewhere") == "elsewhere"
        finally:
            may_load.set()


async def test_a_model_and_its_adapters_share_one_tokenizer(one_redis_server, redis, loads):
    adapters = tuple(f"adapter-{n}" for n in range(40))
    about = {"tokenizer": str(LLAMA), "adapters": adapters}
    async with (
        completing(redis, "a", complete, **about),
        replica(one_redis_server.url) as door,
    ):
        await eventually(lambda: models(door), lambda found: len(found) == 41)
        await eventually(lambda: rendered_here(door, "m"))
        for name in adapters:
            asked = {"model": name, "prompt": "x"}
            assert "x-kvroute-tokens" not in (await door.post(PATH, json=asked)).headers
    assert loads == {str(LLAMA.resolve()): 1}


async def test_adapters_have_the_tokenizer_that_a_setting_gives_to_their_model(
    one_redis_server, redis, loads
):
    async with (
        completing(redis, "a", complete, tokenizer="/nowhere", adapters=("poems",)),
        replica(one_redis_server.url, tokenizers=f"m={LLAMA}") as door,
    ):
        await eventually(lambda: models(door), lambda found: len(found) == 2)
        await eventually(lambda: rendered_here(door, "poems"))


@pytest.mark.parametrize("started_with", ["org/model", "/models/x"])
async def test_a_model_that_is_served_by_another_name_has_the_tokenizer_of_what_it_was_started_with(
    one_redis_server, redis, started_with
):
    async with (
        completing(redis, "a", complete, tokenizer=started_with),
        replica(one_redis_server.url, tokenizers=f"{started_with}={LLAMA}") as door,
    ):
        await eventually(lambda: models(door), bool)
        await eventually(lambda: rendered_here(door, "m"))


async def test_the_tokenizer_may_be_where_any_of_the_workers_says(one_redis_server, redis):
    async with (
        completing(redis, "a", complete, tokenizer="/nowhere"),
        completing(redis, "b", complete, tokenizer=str(LLAMA)),
        completing(redis, "c", complete, tokenizer="/nowhere"),
        replica(one_redis_server.url) as door,
    ):
        await eventually(lambda: models(door), bool)
        await eventually(lambda: rendered_here(door, "m"))


async def test_a_worker_with_another_tokenizer_is_noticed_when_it_comes_and_when_it_goes(
    one_redis_server, redis
):
    about = {
        "tokenizer": str(LLAMA),
        "tokenizer_hash": load(str(LLAMA)).fingerprint,
    }

    async def remarks():
        await rendered_here(door, "m")
        return (await door.get("/readiness")).json()["missing"]

    async with (
        completing(redis, "a", complete, **about),
        replica(one_redis_server.url) as door,
    ):
        await eventually(lambda: models(door), bool)
        await eventually(remarks, lambda found: found == [])
        about["tokenizer_hash"] = "0123456789abcdef"
        async with completing(redis, "b", complete, **about) as worker:
            other = ["tokenizer of m: that of worker b:0 is another one"]
            await eventually(remarks, lambda found: found == other)
            await worker.retire()
        await eventually(remarks, lambda found: found == [])


async def test_a_model_that_its_engine_tokenizes_in_another_way_is_compared_again(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr(prompts, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(prompts, "LONGEST_PAUSE_S", 0.0)
    ids = [7, 7]

    async def tokenize(_):
        return web.json_response({"tokens": ids})

    async def apart():
        await rendered_here(door, "m")
        return await counted(door, 'tokenizer_apart{model="m"}')

    more = [web.post("/tokenize", tokenize)]
    async with (
        completing(redis, "a", complete, more=more, tokenizer=str(LLAMA)),
        replica(one_redis_server.url) as door,
    ):
        await eventually(lambda: models(door), bool)
        await eventually(apart)
        ids[:] = (await load(str(LLAMA)).of_text("x")).tolist()
        await eventually(apart, lambda differs: not differs)
        assert await rendered_here(door, "m") > 0


async def test_a_model_without_workers_is_no_longer_said_to_lack_a_tokenizer(
    one_redis_server, redis
):
    async def missing():
        return str((await door.get("/readiness")).json()["missing"])

    async with replica(one_redis_server.url) as door:
        async with completing(redis, "a", complete, tokenizer="/nowhere") as worker:
            await eventually(lambda: models(door), lambda found: found == ["m"])
            await rendered_here(door, "m")
            await eventually(missing, lambda said: "tokenizer of m: /nowhere" in said)
            await worker.retire()
        await eventually(missing, lambda said: "tokenizer of m" not in said)
