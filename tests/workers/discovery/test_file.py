"""Engines that a file lists."""

import asyncio
from functools import partial

import pytest

from app.core.errors import ConfigError
from tests.eventually import eventually
from tests.workers.discovery.fleets import engines, running, settings, until_live
from workers.discovery import source as by_file
from workers.discovery.engine import Members


def told(path, text):
    path.write_text(text)
    return str(path)


async def test_engines_that_a_file_lists_come_and_go_with_it(redis, tmp_path):
    async with engines(3) as (a, b, c):
        path = tmp_path / "engines.toml"
        both = f'[a]\nengine-url = "{a.url}"\n[b]\nengine-url = "{b.url}"\nmax-requests = 7\n'
        source = partial(by_file.follow_file, settings(engines=told(path, both), max_requests=9))
        async with running(redis, tmp_path, source) as fleet:
            workers = await until_live(redis, "a", "b")
            assert {name: info.max_requests for name, info in workers.items()} == {"a": 9, "b": 7}
            told(path, f'[a]\nengine-url = "{a.url}"\n[c]\nengine-url = "{c.url}"\n')
            assert (await until_live(redis, "a", "c"))["c"].address == c.url
            followed = partial(asyncio.sleep, 0, fleet)
            await eventually(followed, lambda fleet: fleet.followers.keys() == {"a", "c"})


async def test_an_engine_that_moves_is_followed_where_it_is(redis, tmp_path):
    async with engines(2) as (before, after):
        path = tmp_path / "engines.toml"
        source = partial(
            by_file.follow_file, settings(engines=told(path, f'[a]\nengine-url = "{before.url}"'))
        )
        async with running(redis, tmp_path, source):
            assert (await until_live(redis, "a"))["a"].address == before.url
            told(path, f'[a]\nengine-url = "{after.url}"')

            async def address():
                return (await until_live(redis, "a"))["a"].address

            await eventually(address, lambda seen: seen == after.url)


@pytest.mark.parametrize("wrong", ["[a", None])
async def test_a_file_that_is_wrong_or_gone_changes_nothing(redis, tmp_path, wrong, caplog):
    async with engines(1) as (a,):
        path = tmp_path / "engines.toml"
        source = partial(
            by_file.follow_file, settings(engines=told(path, f'[a]\nengine-url = "{a.url}"'))
        )
        async with running(redis, tmp_path, source) as fleet:
            await until_live(redis, "a")
            follower = fleet.followers["a"]
            told(path, wrong) if wrong is not None else path.unlink()

            async def said():
                return caplog.text

            await eventually(said, lambda text: "the engines stay as they were" in text)
            assert fleet.followers == {"a": follower}
            await until_live(redis, "a")


@pytest.mark.parametrize(
    "wrong", ["profile = 'h100'", "port = 8000", "model = [1]", "max-requests = -1"], ids=str
)
async def test_a_table_that_is_wrong_stays_as_it_was_and_others_come_and_go(
    redis, tmp_path, wrong, caplog
):
    async with engines(3) as (a, b, c):
        path = tmp_path / "engines.toml"
        tables = {
            name: f'[{name}]\nengine-url = "{one.url}"\n'
            for name, one in (("a", a), ("b", b), ("c", c))
        }
        never = f"[never]\n{wrong}\n"
        process = settings(engines=told(path, never + tables["a"] + tables["b"]))
        async with running(redis, tmp_path, partial(by_file.follow_file, process)) as fleet:
            await until_live(redis, "a", "b")
            follower = fleet.followers["a"]
            told(path, f"{tables['a']}{wrong}\n{tables['c']}")
            await until_live(redis, "a", "c")
            assert fleet.followers["a"] is follower
            assert caplog.text.count("an engine is left as it was: a: ") == 1
            assert caplog.text.count("an engine is left as it was: never: ") == 1


async def test_a_file_that_is_being_written_ends_no_engine(tmp_path, monkeypatch):
    path = tmp_path / "engines.toml"
    whole = '[a]\nengine-url = "http://a:1"\n[b]\nengine-url = "http://b:1"\n'
    process = settings(engines=told(path, whole))
    seen = []
    read, looks = by_file.read_file, iter(["", whole[:30], whole, whole, "", ""])

    def read_then_write(process, members):
        read(process, members)
        told(path, next(looks, ""))

    async def last():
        return seen[-1] if seen else set("?")

    monkeypatch.setattr(by_file, "read_file", read_then_write)
    monkeypatch.setattr(by_file, "LOOK_S", 0.0)
    following = asyncio.create_task(
        by_file.follow_file(process, lambda found: seen.append({*found.engines}))
    )
    await eventually(last, lambda names: names == set())
    following.cancel()
    assert seen[:3] == [{"a", "b"}, {"a", "b"}, set()]


URL = 'engine-url = "http://a:1"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1", r"a: needs a table, \[NAME\], for each engine"),
        ("[", "engines.toml: "),
        ("[a]", "a: engine-url: where does the engine listen?"),
        ("[a]\nengine-url = 'x'", "a: --engine-url: 'x' is not the http:// or https:// base URL"),
        ("[a]\nengine-url = 'http://a:0'", "a: --engine-url: 'http://a:0' is not the http://"),
        ("[a]\nengine-url = 1", "a: engine-url: where does the engine listen?"),
        (f"['a b']\n{URL}", "worker_id 'a b': 1-253 letters"),
        (f"[a]\n{URL}role = 'x'", "a: role: needs one of both, prefill, decode, got 'x'"),
        (f"[a]\n{URL}role = 'decode'", "a: --role decode: needs --kv-transfer"),
        (f"[a]\n{URL}max-requests = 0", "a: max-requests: needs a number from 1 to 1000000, got 0"),
        (f"[a]\n{URL}max-requests = 'x'", "a: max-requests: needs a number .*, got x"),
        (f"[a]\n{URL}stall-s = nan", "a: stall-s: needs a number from 0 to 315360000, got nan"),
        (f"[a]\n{URL}address = '/x'", "a: address: '/x' is not the http"),
        (f"[a]\n{URL}model = [1]", "a: model: needs a text or a number, got list"),
        (f"[a]\n{URL}events-endpoint = 'x'", "a: --events-endpoint: "),
        (f"[a]\n{URL}redis-url = 'x'", "a: redis-url: needs one of address, bootstrap-port, "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, said):
    path = told(tmp_path / "engines.toml", text)
    with pytest.raises(ConfigError, match=f"--engines .*{said}"):
        by_file.read_file(settings(engines=path), Members())


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--engines .*none.toml: No such file"):
        by_file.read_file(settings(engines=str(tmp_path / "none.toml")), Members())
