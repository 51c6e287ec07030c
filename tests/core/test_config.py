from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from app.core.config import (
    RouterSettings,
    WorkerSettings,
    flags,
    naming_file,
    options,
    parse_weights,
    pick,
    variable,
)
from app.core.errors import ConfigError

SETTINGS = (RouterSettings, WorkerSettings)


def run(
    cls: type[Any],
    *arguments: str,
    env: dict[str, str] | None = None,
    without: tuple[str, ...] = (),
) -> tuple[Any, Result]:
    """The settings that a command with the options of `cls` reads, and how it ended."""
    read: list[Any] = []

    @click.command()
    @options(cls, without=without)
    def command(**values: Any) -> None:
        read.append(pick(cls, values, without=without))

    result = CliRunner(env=dict.fromkeys(map(variable, fields(cls)))).invoke(
        command, arguments, env=env
    )
    return (read[0] if read else None), result


@pytest.mark.parametrize("cls", SETTINGS)
def test_without_flags_and_variables_every_field_has_its_default(cls: type[Any]) -> None:
    assert run(cls)[0] == cls()


def test_a_flag_beats_a_variable_beats_the_default() -> None:
    env = {"KVROUTE_REDIS_TIMEOUT_MS": "40", "REDIS_URL": "redis://elsewhere:7000/2"}
    assert run(RouterSettings)[0].redis_timeout_ms == 250
    assert run(RouterSettings, env=env)[0].redis_timeout_ms == 40
    assert run(RouterSettings, env=env)[0].redis_url == "redis://elsewhere:7000/2"
    assert run(RouterSettings, "--redis-timeout-ms=7", env=env)[0].redis_timeout_ms == 7


@pytest.mark.parametrize("cls", SETTINGS)
def test_the_address_kubernetes_gives_of_a_service_named_kvroute_is_not_a_port(
    cls: type[Any],
) -> None:
    settings, result = run(cls, env={"KVROUTE_PORT": "tcp://10.96.0.1:8080"})
    assert settings == cls(), result.output


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(),
        RouterSettings(port=0, policy="balance", temperature=0.25, seed=7, shared_fd=3),
        RouterSettings(wait_queue=9, wait_above_s=0.0, tenant_weights="a/b=4,c=d=0.5"),
        WorkerSettings(worker_id="w-1", kv_pool_tokens=4096, speedup=2.5, namespace="m/x"),
    ],
)
def test_settings_survive_a_round_trip_through_command_line_flags(
    settings: RouterSettings | WorkerSettings,
) -> None:
    assert run(type(settings), *flags(settings))[0] == settings


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_field_has_a_default_a_help_text_and_a_variable_of_its_own(cls: type[Any]) -> None:
    assert all(f.default is not MISSING and f.metadata["help"] for f in fields(cls))
    variables = [variable(f) for f in fields(cls)]
    assert len(set(variables)) == len(variables)
    assert {name for name in variables if not name.startswith("KVROUTE_")} == {"REDIS_URL"}
    shown = run(cls, "--help")[1].output
    assert all(name in shown for name in variables)


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--port", "KVROUTE_PORT", "eighty"),
        ("--port", "KVROUTE_PORT", "65536"),
        ("--policy", "KVROUTE_POLICY", "best"),
        ("--temperature", "KVROUTE_TEMPERATURE", "-0.1"),
        ("--temperature", "KVROUTE_TEMPERATURE", "nan"),
        ("--seed", "KVROUTE_SEED", "1.5"),
        ("--seed", "KVROUTE_SEED", "-1"),
        ("--redis-timeout-ms", "KVROUTE_REDIS_TIMEOUT_MS", "0"),
        ("--reservation-ttl-s", "KVROUTE_RESERVATION_TTL_S", "0"),
        ("--reservation-ttl-s", "KVROUTE_RESERVATION_TTL_S", "0.0001"),
        ("--reservation-ttl-s", "KVROUTE_RESERVATION_TTL_S", "nan"),
        ("--reservation-ttl-s", "KVROUTE_RESERVATION_TTL_S", "inf"),
        ("--max-prompt-tokens", "KVROUTE_MAX_PROMPT_TOKENS", "-5"),
        ("--log-level", "KVROUTE_LOG_LEVEL", "loud"),
        ("--wait-queue", "KVROUTE_WAIT_QUEUE", "-1"),
        ("--wait-above-s", "KVROUTE_WAIT_ABOVE_S", "-0.5"),
        ("--tenant-weights", "KVROUTE_TENANT_WEIGHTS", "a=1,b"),
        ("--tenant-weights", "KVROUTE_TENANT_WEIGHTS", "a=heavy"),
        ("--tenant-weights", "KVROUTE_TENANT_WEIGHTS", "=1"),
        ("--tenant-weights", "KVROUTE_TENANT_WEIGHTS", "a=0"),
        ("--tenant-weights", "KVROUTE_TENANT_WEIGHTS", "a=nan"),
        ("--session-affinity", "KVROUTE_SESSION_AFFINITY", "1.5"),
    ],
)
def test_a_bad_value_prevents_the_start_and_is_named_with_its_source(
    flag: str, name: str, value: str
) -> None:
    for settings, result in (
        run(RouterSettings, f"{flag}={value}"),
        run(RouterSettings, env={name: value}),
    ):
        assert settings is None
        assert result.exit_code == 2
        assert flag in result.output
        assert value in result.output
    assert name in result.output


def test_tenant_weights_are_parsed_from_names_and_numbers() -> None:
    assert parse_weights("") == {}
    assert parse_weights("a=4,b=0.5,c=d=2") == {"a": 4.0, "b": 0.5, "c=d": 2.0}


@pytest.mark.parametrize(
    "text",
    ["a", "a=", "a=heavy", "a=4,a=heavy", "=1", "a=1001", "a=4, b=1", f"{'a' * 65}=1", "ä=1"],
)
def test_bad_tenant_weights_are_refused_with_the_expected_format(text: str) -> None:
    with pytest.raises(ValueError, match="needs a name and a weight from"):
        parse_weights(text)


def test_wait_above_s_applies_only_if_requests_may_wait() -> None:
    assert RouterSettings(wait_above_s=2.0).max_queue_s == math.inf
    assert RouterSettings(wait_queue=1).max_queue_s == math.inf
    assert RouterSettings(wait_queue=1, wait_above_s=2.0).max_queue_s == 2.0


def test_a_field_may_be_left_out_of_the_options() -> None:
    settings, result = run(RouterSettings, "--port=9000", without=("port",))
    assert settings is None
    assert "No such option" in result.output
    assert run(RouterSettings, env={"KVROUTE_PORT": "9000"}, without=("port",))[0].port == 8080


def test_a_workers_id_and_address_default_to_those_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    settings = WorkerSettings(port=9001)
    assert settings.resolved_id() == "node7"
    assert settings.resolved_address() == "http://127.0.0.1:9001"
    assert WorkerSettings(host="0.0.0.0", port=9001).resolved_address() == "http://node7:9001"
    assert WorkerSettings(host="::1", port=9001).resolved_address() == "http://[::1]:9001"
    assert WorkerSettings(host="::", port=9001).resolved_address() == "http://node7:9001"
    named = WorkerSettings(worker_id="w1", address="https://w1.example")
    assert named.resolved_id() == "w1"
    assert named.resolved_address() == "https://w1.example"


@pytest.mark.parametrize(
    "url", ["http://w1", "https://w1.example:8443/engines/1", "http://[::1]:9001", ""]
)
def test_a_base_url_is_accepted_as_a_workers_address(url: str) -> None:
    assert run(WorkerSettings, f"--address={url}")[0].address == url


@pytest.mark.parametrize(
    "text",
    [
        "w1:9001",
        "http://",
        "http://:9001",
        "ftp://w1",
        "http://::1:9001",
        "http://[::1",
        "http://w1:port",
        "http://w1:65536",
        "http://w1:0",
        "http://w1?path=",
        "http://w1#1",
    ],
)
def test_an_address_that_is_not_the_base_url_of_a_host_is_refused(text: str) -> None:
    settings, result = run(WorkerSettings, f"--address={text}")
    assert settings is None
    assert f"{text!r} is not the http:// or https:// base URL of a host" in result.output


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError("No space left")])
def test_an_error_of_writing_a_file_names_the_file_and_the_cause(error: OSError) -> None:
    with pytest.raises(ConfigError, match=r"^out/x: No space left$"), naming_file("out/x"):
        raise error
