"""A file of settings that changes while a router runs."""

import logging
import os
import signal
from functools import partial

import httpx
import pytest

from app.core.errors import ConfigError, Unauthorized
from app.core.settings.router import RouterSettings
from app.edge import reload
from app.edge.app import create_app
from app.edge.reload import LIVE, LiveSettings
from tests.e2e.engines import Process
from tests.eventually import eventually


@pytest.fixture(autouse=True)
def _same_log_level_afterwards():
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_what_may_change_counts_at_once_and_the_rest_is_named(caplog):
    replica = create_app(RouterSettings(api_key="old")).replica
    new = RouterSettings(
        api_key="new", max_request_bytes=7, max_prompt_tokens=8, log_level="debug", wait_queue=3
    )
    LiveSettings(replica, "file", lambda: new).reload()
    assert replica.settings == RouterSettings(
        api_key="new", max_request_bytes=7, max_prompt_tokens=8, log_level="debug"
    )
    assert replica.keys.check("/v1/models", [(b"x-api-key", b"new")]) == "api-key"
    assert replica.bodies.max_tokens == replica.door.settings.max_prompt_tokens == 8
    assert logging.getLogger().level == logging.DEBUG
    assert "file: wait_queue has changed, and counts from the next start on" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_settings_that_a_start_would_refuse_or_that_would_open_a_replica_leave_it_as_it_is(
    tmp_path, monkeypatch, host
):
    monkeypatch.setattr(reload, "SETTLED_S", 3600.0)
    settings = RouterSettings(host=host, api_key="k")
    replica = create_app(settings).replica
    without_keys = tmp_path / "keys"
    without_keys.write_text("prometheus scraper metrics\n")
    cut = tmp_path / "cut"
    cut.write_text("one fir")

    def unreadable():
        raise ConfigError("bad: port")

    with_a_key = partial(RouterSettings, host=host, api_key="new")
    for read, error in (
        (unreadable, "bad: port"),
        (lambda: RouterSettings(host=host), "without a key|everybody would be let in"),
        (lambda: RouterSettings(host=host, api_key_file="/nowhere"), "/nowhere"),
        (lambda: RouterSettings(host=host, api_key_file=str(without_keys)), "nothing but keys for"),
        (lambda: with_a_key(api_key_file=str(cut)), "is being written"),
        (lambda: with_a_key(tls_cert="cert.pem"), "tls_cert is set, and tls_key is not"),
        (lambda: with_a_key(tls_cert="/no", tls_key="/no"), "No such file"),
        (lambda: with_a_key(namespace="a b"), "namespace"),
    ):
        with pytest.raises(ConfigError, match=error):
            LiveSettings(replica, "file", read).reload()
        assert replica.settings == settings
        assert replica.keys.check("/v1/models", [(b"x-api-key", b"k")])
        with pytest.raises(Unauthorized):
            replica.keys.check("/v1/models", [])


def test_a_pipe_of_keys_holds_no_running_replica_up(tmp_path):
    replica = create_app(RouterSettings(api_key="k")).replica
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "nothing"):
        new = RouterSettings(api_key_file=str(path))
        with pytest.raises(ConfigError, match="is gone, or can be read but once"):
            LiveSettings(replica, "file", lambda new=new: new).reload()
    assert replica.keys.check("/v1/models", [(b"x-api-key", b"k")]) == "api-key"


def test_every_setting_that_may_change_exists():
    assert RouterSettings.__dataclass_fields__.keys() >= LIVE


TOO_DEEP = "a = " + "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize("by_signal", [True, False], ids=["SIGHUP", "by itself"])
async def test_a_router_reads_its_file_again(one_redis_server, tmp_path, by_signal):
    file = tmp_path / "kvroute.toml"
    file.write_text("api-key = 'old'\nmax-request-bytes = 5")
    process = Process(
        "router",
        f"--config={file}",
        f"--redis-url={one_redis_server.url}",
        "--port=0",
        "--max-request-bytes=9",
    )
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=30.0) as client:

            async def status(key, body):
                headers = {"authorization": f"Bearer {key}"}
                return (await client.post("/v1/route", content=body, headers=headers)).status_code

            assert [await status("old", "x" * 10), await status("new", "x")] == [413, 401]
            file.write_text(TOO_DEEP + "\n")
            if by_signal:
                process.popen.send_signal(signal.SIGHUP)

            async def is_refused():
                headers = {"authorization": "Bearer old"}
                text = (await client.get("/metrics", headers=headers)).text
                return 'kvroute_files_refused{what="settings"} 1.0' in text

            await eventually(is_refused)
            file.write_text("api-key = 'new'\nmax-request-bytes = 99")
            if by_signal:
                process.popen.send_signal(signal.SIGHUP)
            await eventually(lambda: status("new", "x"), lambda status: status == 422)
            # The command line goes before the file still.
            assert [await status("new", "x" * 10), await status("old", "x")] == [413, 401]
    finally:
        process.end()
