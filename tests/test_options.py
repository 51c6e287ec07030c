import re
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from app.core.errors import ConfigError
from app.core.settings.kinds import variable
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.options import Command, flags, naming_file, options, pick

SETTINGS = (RouterSettings, WorkerSettings)


def run(cls, *arguments, env=None, without=()):
    """The settings that a command with the options of `cls` reads, and how it ended."""
    read = []

    @click.command()
    @options(cls, without=without)
    def command(**values):
        read.append(pick(cls, values, without=without))

    result = CliRunner(env=dict.fromkeys(map(variable, fields(cls)))).invoke(
        command, arguments, env=env
    )
    return (read[0] if read else None), result


@pytest.mark.parametrize("cls", SETTINGS)
def test_without_flags_and_variables_every_field_has_its_default(cls):
    assert run(cls)[0] == cls()


def test_a_flag_beats_a_variable_beats_the_default():
    env = {"KVROUTE_REDIS_TIMEOUT_MS": "40", "REDIS_URL": "redis://elsewhere:7000/2"}
    assert run(RouterSettings)[0].redis_timeout_ms == 250
    assert run(RouterSettings, env=env)[0].redis_timeout_ms == 40
    assert run(RouterSettings, env=env)[0].redis_url == "redis://elsewhere:7000/2"
    assert run(RouterSettings, "--redis-timeout-ms=7", env=env)[0].redis_timeout_ms == 7


@click.command(cls=Command)
@options(RouterSettings)
def routed(**_):
    pass


def test_the_help_lists_options_by_subject_with_defaults_as_one_types_them():
    text = CliRunner().invoke(routed, ["--help-all"], terminal_width=100).output
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n|\n(?=  ))+)", text, re.MULTILINE))
    assert {"Common", "Access", "Limits", "Waiting", "Options"} <= sections.keys()
    assert re.findall(r"^  (--[\w-]+)", sections["Waiting"], re.MULTILINE) == [
        "--wait-queue",
        "--wait-above-s",
        "--wait-timeout-s",
        "--tenant-weights",
    ]
    words = " ".join(text.split()).replace("- ", "-")  # lines break at hyphens
    assert "env var: KVROUTE_GAP_TIMEOUT_S; default: 300; x>=0.001]" in words
    assert "env var: KVROUTE_MIGRATE; default: --no-migrate]" in words
    assert "--no-no" not in text
    assert '""' not in text


def test_the_help_is_one_screen_of_what_is_often_set_and_names_the_option_that_lists_all():
    text = CliRunner().invoke(routed, ["--help"], terminal_width=80).output
    assert len(text.splitlines()) < 50
    assert {"--redis-url", "--port", "--policy", "--help-all"} <= set(re.findall(r"--[\w-]+", text))
    assert "--gap-timeout-s" not in text
    assert "env var" not in text
    assert "Port to listen on  [default: 8080]" in text


def test_what_is_named_for_being_off_is_one_flag():
    assert run(RouterSettings, "--no-auth")[0].no_auth
    assert not run(RouterSettings)[0].no_auth
    assert run(RouterSettings, env={"KVROUTE_NO_AUTH": "true"})[0].no_auth
    assert flags(RouterSettings(no_auth=True)).count("--no-auth") == 1
    assert "--no-auth" not in flags(RouterSettings())


@pytest.mark.parametrize("cls", SETTINGS)
def test_the_address_kubernetes_gives_of_a_service_named_kvroute_is_not_a_port(cls):
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
def test_settings_survive_a_round_trip_through_command_line_flags(settings):
    assert run(type(settings), *flags(settings))[0] == settings


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
def test_a_bad_value_prevents_the_start_and_is_named_with_its_source(flag, name, value):
    for settings, result in (
        run(RouterSettings, f"{flag}={value}"),
        run(RouterSettings, env={name: value}),
    ):
        assert settings is None
        assert result.exit_code == 2
        assert flag in result.output
        assert value in result.output
    assert name in result.output


def test_a_field_may_be_left_out_of_the_options():
    settings, result = run(RouterSettings, "--port=9000", without=("port",))
    assert settings is None
    assert "No such option" in result.output
    assert run(RouterSettings, env={"KVROUTE_PORT": "9000"}, without=("port",))[0].port == 8080


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError("No space left")])
def test_an_error_of_writing_a_file_names_the_file_and_the_cause(error):
    with pytest.raises(ConfigError, match=r"^out/x: No space left$"), naming_file("out/x"):
        raise error


def test_an_error_without_words_is_told_by_its_name():
    @click.command(cls=Command)
    def command():
        raise TimeoutError

    assert CliRunner().invoke(command).output == "Error: TimeoutError\n"


@pytest.mark.parametrize("cls", SETTINGS)
def test_the_help_shows_the_variable_of_every_field(cls):
    shown = run(cls, "--help")[1].output
    assert all(variable(f) in shown for f in fields(cls))


def test_a_workers_address_must_be_a_base_url():
    assert run(WorkerSettings, "--address=https://w1:8443/a")[0].address == "https://w1:8443/a"
    settings, result = run(WorkerSettings, "--address=w1:9001")
    assert settings is None
    assert "'w1:9001' is not the http:// or https:// base URL of a host" in result.output


def test_a_list_may_be_given_entry_by_entry():
    given = run(RouterSettings, "--model-alias=a=m", "--model-alias", "b=m,c=m")[0]
    assert given.model_alias == "a=m,b=m,c=m"
    env = {"KVROUTE_MODEL_ALIAS": "a=m,b=m"}
    assert run(RouterSettings, env=env)[0].model_alias == "a=m,b=m"
    assert run(RouterSettings, "--redis-url=a", "--redis-url=b")[0].redis_url == "b"
    _, result = run(RouterSettings, "--model-alias=a=m", "--model-alias=a=n")
    assert "'a=n': a stands for m already" in result.output
