"""A file of settings that changes while a router runs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.core.errors import ConfigError
from app.core.router_settings import RouterSettings
from app.edge.app import create_app
from app.edge.live import LIVE, LiveSettings
from app.local.redis_server import EmbeddedRedis
from tests.e2e.engines import Process
from tests.eventually import eventually


@pytest.fixture(autouse=True)
def _same_log_level_afterwards() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_what_may_change_counts_at_once_and_the_rest_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = create_app(RouterSettings(api_key="old")).replica
    new = RouterSettings(
        api_key="new", max_body_bytes=7, max_prompt_tokens=8, log_level="debug", wait_queue=3
    )
    LiveSettings(replica, "file", lambda: new).reload()
    assert replica.settings == RouterSettings(
        api_key="new", max_body_bytes=7, max_prompt_tokens=8, log_level="debug"
    )
    assert replica.keys.check("/", [(b"x-api-key", b"new")]) == "api-key"
    assert replica.bodies.max_tokens == replica.door.settings.max_prompt_tokens == 8
    assert logging.getLogger().level == logging.DEBUG
    assert "file: wait_queue has changed, and counts from the next start on" in caplog.text


@pytest.mark.parametrize("path", ["missing", ""])
def test_settings_that_cannot_be_read_or_would_open_a_replica_leave_it_as_it_is(
    caplog: pytest.LogCaptureFixture, path: str
) -> None:
    settings = RouterSettings(host="0.0.0.0", api_key="k")
    replica = create_app(settings).replica

    def unreadable() -> RouterSettings:
        raise ConfigError("bad: port")

    for read, error in (
        (unreadable, "bad: port"),
        (lambda: RouterSettings(host="0.0.0.0"), "without a key"),
        (lambda: RouterSettings(host="0.0.0.0", api_key_file="/nowhere"), "/nowhere"),
    ):
        LiveSettings(replica, path, read).reload()
        assert f"the settings stay as they were: {error}" in caplog.text.replace(
            "api_key_file ", ""
        )
        assert replica.settings == settings
        assert replica.keys.check("/", [(b"x-api-key", b"k")])


def test_every_setting_that_may_change_exists() -> None:
    assert RouterSettings.__dataclass_fields__.keys() >= LIVE


@pytest.mark.parametrize("by_signal", [True, False], ids=["SIGHUP", "by itself"])
async def test_a_router_reads_its_file_again(
    one_redis_server: EmbeddedRedis, tmp_path: Path, by_signal: bool
) -> None:
    file = tmp_path / "kvroute.toml"
    file.write_text("api-key = 'old'\nmax-body-bytes = 5")
    process = Process(
        "router",
        f"--config={file}",
        f"--redis-url={one_redis_server.url}",
        "--port=0",
        "--max-body-bytes=9",
    )
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=30.0) as client:

            async def status(key: str, body: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await client.post("/v1/route", content=body, headers=headers)).status_code

            assert [await status("old", "x" * 10), await status("new", "x")] == [413, 401]
            file.write_text("api-key = 'new'\nmax-body-bytes = 99")
            if by_signal:
                process.popen.send_signal(signal.SIGHUP)
            await eventually(lambda: status("new", "x"), lambda status: status == 422)
            # The command line goes before the file still.
            assert [await status("new", "x" * 10), await status("old", "x")] == [413, 401]
    finally:
        process.end()
