"""Keys, over HTTP and in a process of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from app.core.errors import ConfigError
from app.edge import keys
from app.edge.keys import Keys, check_open
from app.local.redis_server import EmbeddedRedis
from tests.e2e.engines import Process
from tests.edge.conftest import StartReplica
from tests.eventually import eventually


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


@pytest.mark.parametrize(
    "headers",
    [
        [bearer("k"), bearer("k")],
        [bearer("k"), bearer("wrong")],
        [("x-api-key", "k"), ("x-api-key", "k")],
    ],
)
async def test_two_keys_in_one_request_are_refused(
    one_redis_server: EmbeddedRedis, replica: StartReplica, headers: list[tuple[str, str]]
) -> None:
    async with replica(one_redis_server.url, api_key="k") as client:
        answer = await client.get("/v1/workers", headers=headers)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, headers[0][0])
        answer = await client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, headers[0][0])
        assert (await client.get("/v1/workers", headers=headers[:1])).status_code == 200


async def test_a_file_of_keys_is_read_again_when_it_changes(
    one_redis_server: EmbeddedRedis,
    replica: StartReplica,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "LOOK_EVERY_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("one first\n")
    async with replica(one_redis_server.url, api_key_file=str(file), api_key="own") as client:

        async def opened(key: str) -> int:
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


def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("one first\n")
    opened = Keys("", str(file))
    file.write_text("one two three\n")
    opened.reload()
    assert "line 1 has 3 words" in caplog.text
    assert opened.check("/", [(b"authorization", b"Bearer first")]) == "one"
    with pytest.raises(ConfigError, match="line 1 has 3 words"):
        Keys("", str(file))


@pytest.mark.parametrize("where", ["a setting", "the file"])
async def test_a_key_of_metrics_opens_nothing_else(
    one_redis_server: EmbeddedRedis, replica: StartReplica, tmp_path: Path, where: str
) -> None:
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
            assert (answer.status_code == 200) is (key != "no")


async def test_a_key_of_metrics_alone_leaves_the_rest_open(
    one_redis_server: EmbeddedRedis, replica: StartReplica
) -> None:
    async with replica(one_redis_server.url, metrics_key="scraper") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=[bearer("scraper")])).status_code == 200
    with pytest.raises(ConfigError, match="only loopback addresses are served"):
        check_open("0.0.0.0", Keys("", metrics_key="scraper"), no_auth=False)


async def test_sighup_reads_the_keys_again_and_ends_nothing(
    one_redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    options = [f"--redis-url={one_redis_server.url}", "--port=0", f"--api-key-file={file}"]
    process = Process("router", *options)
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=30.0) as client:

            async def opened(key: str) -> bool:
                return (await client.get("/v1/models", headers=[bearer(key)])).is_success

            assert await opened("first")
            file.write_text("second\n")
            process.popen.send_signal(signal.SIGHUP)
            await eventually(lambda: opened("second"), bool)
    finally:
        process.end()
