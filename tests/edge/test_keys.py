"""Keys, over HTTP and in a process of their own."""

import os
import signal

import httpx
import pytest

from app.core.errors import ConfigError, Unauthorized
from app.core.key_rules import Rate
from app.edge import reload
from app.edge.reload import WatchedFiles
from app.http.keys import Keys, check_open
from tests.e2e.engines import Process
from tests.eventually import eventually


def bearer(key):
    return ("authorization", f"Bearer {key}")


@pytest.mark.parametrize(
    "headers",
    [
        [bearer("k"), bearer("k")],
        [bearer("k"), bearer("wrong")],
        [("x-api-key", "k"), ("x-api-key", "k")],
    ],
)
async def test_two_keys_in_one_request_are_refused(one_redis_server, replica, headers):
    async with replica(one_redis_server.url, api_key="k") as client:
        answer = await client.get("/v1/workers", headers=headers)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, headers[0][0])
        answer = await client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, headers[0][0])
        assert (await client.get("/v1/workers", headers=headers[:1])).status_code == 200


async def test_a_file_of_keys_is_read_again_when_it_changes(
    one_redis_server, replica, tmp_path, monkeypatch
):
    monkeypatch.setattr(reload, "LOOK_EVERY_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("one first\n")
    async with replica(one_redis_server.url, api_key_file=str(file), api_key="own") as client:

        async def opened(key):
            return (await client.get("/v1/models", headers=[bearer(key)])).status_code

        assert [await opened(key) for key in ("first", "second", "own")] == [200, 401, 200]
        other = tmp_path / "other"
        other.write_text("two second\n")
        other.rename(file)
        await eventually(lambda: opened("second"), lambda status: status == 200)
        assert [await opened(key) for key in ("first", "own")] == [401, 200]
        file.write_text("a b c\n")  # the keys stay
        file.write_text("three third\n")
        await eventually(lambda: opened("third"), lambda status: status == 200)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("one two three\n", "line 1: 'three' is none of metrics, operator, tenant="),
        ("one first\ntwo metrics\n", "line 2: it has 'metrics' in the place of a key"),
        ("one tokens=2M/m\n", "line 1: it has 'tokens=2M/m' in the place of a key"),
        ("one first\ntwo\n", "line 2: it needs `<name> <key>`: was it cut?"),
        ("operator\n", "line 1: it needs `<name> <key>`"),
        ("\udcff\n", "can't decode"),
        ("one first\n" + 40 * "\0" + "\n", "line 2: it has characters that are not printed"),
        ("o\0n\0e\0 \0k\0\n\0", "line 1: it has characters that are not printed"),
        ("one pasted\u200bkey\n", "line 1: it has characters that are not printed"),
        ("one k requests=600\n", "'requests=600': needs a number by second"),
        ("one k requests=0/m\n", "'requests=0/m': needs a number by second"),
        ("one k tokens=2m/m\n", "'tokens=2m/m': needs a number by second"),
        ("one k concurrent=0\n", "'concurrent=0': needs a number from 1"),
        ("one k priority=low\n", "'priority=low' is none of .*, priority<=, "),
        ("one k models=a,,b\n", "'models=a,,b': needs names or patterns"),
        ("one k isolate=maybe\n", "'isolate=maybe': needs yes or no"),
        ("one k tenant=\n", "'tenant=': needs 1 to 64 visible"),
        ("one k metrics operator\n", "role comes twice"),
        ("one k requests=1/m\none l requests=2/m\n", "line 2: 'one' has other limits"),
        ("#" * 1_050_000, "over 1048576 bytes"),
    ],
)
def test_a_file_that_would_be_refused_at_the_start_leaves_the_keys_as_they_are(
    tmp_path, text, said
):
    file = tmp_path / "keys"
    file.write_text("one first\n")
    opened = Keys("", str(file))
    file.write_bytes(text.encode(errors="surrogateescape"))
    for read in (opened.reload, lambda: Keys("", str(file))):
        with pytest.raises(ConfigError, match=said):
            read()
    assert opened.check("/v1/models", [(b"authorization", b"Bearer first")]) == "one"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "link to itself"])
def test_what_is_no_file_any_more_leaves_the_keys_and_holds_nothing_up(tmp_path, kind):
    file = tmp_path / "keys"
    file.write_text("one first\n")
    opened = Keys("", str(file))
    watched = WatchedFiles("keys", lambda: [opened.path], opened.reload)
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "link to itself" else tmp_path / "nothing")
    watched.reload()
    assert "is gone, or can be read but once" in watched.problem
    assert opened.check("/v1/models", [(b"authorization", b"Bearer first")]) == "one"
    file.rmdir() if kind == "folder" else file.unlink()
    (tmp_path / "v2").write_bytes(b"\xef\xbb\xbftwo second\r\n")
    file.symlink_to(tmp_path / "v2")
    watched.reload()
    assert watched.problem == ""
    assert opened.check("/v1/models", [(b"authorization", b"Bearer second")]) == "two"
    with pytest.raises(Unauthorized):
        opened.check("/v1/models", [(b"authorization", b"Bearer first")])


def test_a_file_that_is_written_anew_is_seen_whatever_its_time_says(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one first\n")
    os.utime(file, (0, 0))
    before = reload.stamp_of(str(file))

    def seen():
        file.write_text("one other\n")
        os.utime(file, (0, 0))
        return reload.stamp_of(str(file)) != before

    # A file system may count time in steps.
    assert any(seen() for _ in range(10_000))


@pytest.mark.parametrize("left", ["", "# none\n", "prometheus scraper metrics\n"])
async def test_a_file_without_a_key_any_more_lets_nobody_in_and_says_so(
    one_redis_server, replica, tmp_path, caplog, left
):
    file = tmp_path / "keys"
    file.write_text("one first operator\n")
    settings = {"api_key_file": str(file), "metrics_key": "reader"}
    async with replica(one_redis_server.url, **settings) as client:

        async def statuses(*headers):
            paths = ("/v1/models", "/v1/workers", "/console/api/overview", "/nowhere")
            return {(await client.get(path, headers=headers)).status_code for path in paths}

        assert 401 not in await statuses(bearer("first"))
        file.write_text(left)
        await eventually(lambda: statuses(bearer("first")), lambda found: found == {401})
        assert await statuses() == {401}
        assert (await client.get("/metrics")).status_code == 401
        scraped = (await client.get("/metrics", headers=[bearer("reader")])).text
        assert "kvroute_no_key_left 1.0" in scraped
        assert "nobody is let in" in caplog.text
        file.write_text("two second\n")
        await eventually(lambda: statuses(bearer("second")), lambda found: found != {401})


@pytest.mark.parametrize("text", ["", "prometheus scraper metrics\n"])
def test_a_file_without_a_key_is_refused_at_the_start(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"no key in it|nothing but keys for /metrics"):
        Keys("", str(file))


def test_keys_that_are_asked_for_are_asked_for_until_the_next_start():
    opened = Keys("k")
    with pytest.raises(ConfigError, match="everybody would be let in"):
        opened.change("", "", "")
    with pytest.raises(Unauthorized):
        opened.check("/v1/models", [])
    assert opened.check("/v1/models", [(b"x-api-key", b"k")]) == "api-key"


async def test_a_key_cut_off_counts_once_its_file_has_been_the_same_for_a_while(
    one_redis_server, replica, tmp_path, monkeypatch
):
    monkeypatch.setattr(reload, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reload, "SETTLED_S", 3600.0)
    looks = []

    class CountingLooks(reload.WholeFiles):
        def is_whole(self, path):
            looks.append(super().is_whole(path))
            return looks[-1]

    async def looked_at_again():
        before = len(looks)

        async def since():
            return looks[before:]

        await eventually(since, lambda found: found.count(False) >= 3)

    monkeypatch.setattr(reload, "WholeFiles", CountingLooks)
    file = tmp_path / "keys"
    file.write_text("one first\n")
    async with replica(one_redis_server.url, api_key_file=str(file)) as client:

        async def opened(key):
            return (await client.get("/v1/models", headers=[bearer(key)])).is_success

        file.write_text("one first\ntwo sec")
        await looked_at_again()
        assert [await opened(key) for key in ("first", "sec")] == [True, False]
        with file.open("a") as more:
            more.write("ond\n")
        await eventually(lambda: opened("second"))
        file.write_text("three third")
        await looked_at_again()
        assert [await opened(key) for key in ("second", "third")] == [True, False]
        monkeypatch.setattr(reload, "SETTLED_S", 0.0)
        await eventually(lambda: opened("third"))


@pytest.mark.parametrize("where", ["a setting", "the file"])
async def test_a_key_of_metrics_opens_nothing_else(one_redis_server, replica, tmp_path, where):
    file = tmp_path / "keys"
    file.write_text("one first\nprometheus scraper metrics\n")
    given = {"api_key_file": str(file)}
    if where == "a setting":
        given = {"api_key": "first", "metrics_key": "scraper"}
    async with replica(one_redis_server.url, **given) as client:
        for key, opened in (("first", True), ("scraper", False), ("no", False)):
            for path in ("/v1/models", "/v1/workers", "/metrics/", "/nowhere"):
                answer = await client.get(path, headers=[bearer(key)])
                assert (answer.status_code != 401) is opened
            answer = await client.get("/metrics", headers=[bearer(key)])
            # It tells what each key uses: another client's key of the file does not open it.
            opens = key == "scraper" or (key == "first" and where == "a setting")
            assert (answer.status_code == 200) is opens


async def test_a_key_of_metrics_alone_leaves_the_rest_open(one_redis_server, replica):
    async with replica(one_redis_server.url, metrics_key="scraper") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=[bearer("scraper")])).status_code == 200
    with pytest.raises(ConfigError, match="only loopback addresses are served"):
        check_open("0.0.0.0", Keys("", metrics_key="scraper"), no_auth=False)


async def test_sighup_reads_the_keys_again_and_ends_nothing(one_redis_server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("one first\n")
    options = [f"--redis-url={one_redis_server.url}", "--port=0", f"--api-key-file={file}"]
    process = Process("router", *options)
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=30.0) as client:

            async def opened(key):
                return (await client.get("/v1/models", headers=[bearer(key)])).is_success

            assert await opened("first")
            file.write_text("one second\n")
            process.popen.send_signal(signal.SIGHUP)
            await eventually(lambda: opened("second"), bool)
    finally:
        process.end()


def test_what_is_behind_a_key_are_its_rules(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "ann k1 tenant=acme requests=600/m tokens=2M/m uncached=500k/h concurrent=64\n"
        "bob k2 operator priority<=normal models=llama-*,qwen isolate=yes\n"
        "ann k3 tenant=acme requests=600/m tokens=2M/m uncached=500k/h concurrent=64\n"
    )
    ann, bob = Keys("", str(file)).rules.values()
    assert (ann.tenant, ann.requests, ann.tokens) == ("acme", Rate(600, 60), Rate(2_000_000, 60))
    assert (ann.uncached, ann.concurrent, ann.is_client) == (Rate(500_000, 3600), 64, True)
    assert (bob.priority, bob.models, bob.isolate) == ("normal", ("llama-*", "qwen"), True)
    assert [bob.highest(one) for one in ("high", "normal", "low")] == ["normal", "normal", "low"]
    assert [bob.may_ask(one) for one in ("llama-8b", "qwen", "qwen2")] == [True, True, False]
    assert not bob.is_client
    assert [rate.burst for rate in (Rate(600, 60), Rate(10, 1), Rate(1, 86_400))] == [100, 10, 1]
