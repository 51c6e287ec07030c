"""--config FILE, as a command sees it."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from app.cli import main
from app.config_file import with_config_file
from app.core.settings.router import RouterSettings
from app.options import Command, options
from tests.redis_servers import default_kind, require_redis


def run(tmp_path, text, *arguments, **env):
    """The settings that a router reads with a file of this content, and how it ended."""
    file = tmp_path / "kvroute.toml"
    file.write_text(text)
    read = []

    @click.command(cls=Command)
    @with_config_file
    @options(RouterSettings)
    def command(**values):
        read.append(RouterSettings(**values))

    result = CliRunner().invoke(command, [f"--config={file}", *arguments], env=env)
    return (read[0] if read else None), result


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_its_default(tmp_path):
    text = """
        namespace = "chat"
        wait-queue = 64
        gap-timeout-s = 2.5
        wait-timeout-s = 60
        migrate = true
        no-auth = true
        tenant-weights = "a=4"
    """
    settings, result = run(tmp_path, text)
    assert settings == RouterSettings(
        namespace="chat",
        wait_queue=64,
        gap_timeout_s=2.5,
        wait_timeout_s=60.0,
        migrate=True,
        no_auth=True,
        tenant_weights="a=4",
    ), result.output


def test_a_flag_beats_a_variable_beats_the_file(tmp_path):
    text = 'port = 1\nwait-queue = 2\nseed = 3\nmigrate = true\npolicy = "blocks"'
    settings, _ = run(
        tmp_path,
        text,
        "--port=7",
        "--no-migrate",
        KVROUTE_PORT="8",
        KVROUTE_WAIT_QUEUE="9",
        KVROUTE_POLICY="balance",
    )
    assert settings == RouterSettings(port=7, wait_queue=9, seed=3, policy="balance")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("wait-quue = 64", "wait-quue: no such setting; did you mean wait-queue?"),
        ("wait_queue = 64", "wait_queue: no such setting; did you mean wait-queue?"),
        ("config = 'other'", "config: no such setting"),
        ("port = " + "[" * 50_000, "is nested too deeply"),
        ("port = " + "{a=" * 50_000, "is nested too deeply"),
        ("port = 0x" + "f" * 5_000, "port: the number is too large"),
        ("port = " + "9" * 5_000, "Exceeds the limit"),
        ("[router]\nport = 1", "router: no such setting"),
        ("port = 'eighty'", "port: 'eighty' is not a valid integer range."),
        ("port = true", "port: 'true' is not a valid integer range."),
        ("port = 1.5", "port: '1.5' is not a valid integer range."),
        ("port = 65536", "port: 65536 is not in the range 0<=x<=65535."),
        ("gap-timeout-s = nan", "gap-timeout-s: 'nan' is not a number"),
        ("migrate = 'perhaps'", "migrate: 'perhaps' is not a valid boolean."),
        ("policy = 'best'", "policy: 'best' is not one of 'latency', "),
        ("policy = ['latency']", "policy: needs a text, a number, true or false, got list"),
        ("port = 1\nport = 2", "Cannot overwrite a value"),
        ("port 1", "Expected '=' after a key"),
    ],
)
def test_a_bad_file_is_refused_by_its_name_and_what_is_wrong(tmp_path, text, error):
    settings, result = run(tmp_path, text)
    assert settings is None
    assert result.exit_code == 2
    assert f"Error: {tmp_path}/kvroute.toml: {error}" in result.output


def test_a_file_that_is_missing_no_text_or_too_large_is_refused(tmp_path):
    file = tmp_path / "kvroute.toml"
    for content, error in (
        (None, "No such file or directory"),
        (b"\xff", "can't decode byte"),
        (b"#" * 2_000_000, "over 1048576 bytes"),
    ):
        if content is not None:
            file.write_bytes(content)
        result = CliRunner().invoke(main, ["router", f"--config={file}"])
        assert result.exit_code == 2
        assert f"{file}: " in result.output
        assert ("Error: --config" in result.output) == (content is None)
        assert error in result.output


def test_the_file_of_a_cluster_is_not_that_of_its_processes(tmp_path, monkeypatch):
    require_redis(default_kind())
    file = tmp_path / "kvroute.toml"
    file.write_text("workers = 1\nreplicas = 1\nhaproxy = false\nport = 0\nprofile = 'abacus'")
    monkeypatch.setenv("KVROUTE_CONFIG", str(file))
    ended = subprocess.run(
        [sys.executable, "-m", "app", "up"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "Error: --profile: needs one of 70b-4xh100, 70b-4xh200, 8b-1xh100, got 'abacus'",
        "Error: worker w0 exited with status 1",
    ]


@pytest.mark.parametrize("command", ["router", "worker", "agent", "planner", "up"])
def test_every_service_takes_a_file(tmp_path, command):
    file = tmp_path / "kvroute.toml"
    file.write_text("nothing = 1")
    for arguments, env in (([f"--config={file}"], {}), ([], {"KVROUTE_CONFIG": str(file)})):
        result = CliRunner().invoke(main, [command, *arguments], env=env)
        assert f"Error: {file}: nothing: no such setting" in result.output
