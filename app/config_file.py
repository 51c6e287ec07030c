"""Settings from a TOML file, by the names of their flags, and the log's start.

The command line goes before the environment, that before the file, and that before the default.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import COMMON, variable
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import PickerSettings
from app.core.settings.worker import WorkerSettings
from app.options import ARGUMENTS, Option
from app.output import ErrHandler

F = TypeVar("F", bound=Callable[..., Any])

MAX_BYTES = 1024 * 1024
VARIABLE = "KVROUTE_CONFIG"
FILE = "kvroute.config"
"""Name in a context's `meta` of the path that --config gave; "": none."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def start_log(level: str) -> None:
    """Log from now on, and first of variables that somebody may have misspelt."""
    logging.basicConfig(level=level.upper(), handlers=[ErrHandler(LOG_FORMAT)])
    for name, problem in list(unknown_variables(os.environ)):
        logging.getLogger("kvroute").warning(problem)
        del os.environ[name]  # said once is enough, also by processes that are started from here


def with_config_file(command: F) -> F:
    """Adds --config to a command."""
    return click.option(
        "--config",
        cls=Option,
        heading=COMMON,
        envvar=VARIABLE,
        show_envvar=True,
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_take_over,
        help="TOML file with settings, by the names of their flags: wait-queue = 64. What the "
        "command line or the environment sets goes before.",
    )(command)


def _take_over(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    ctx.meta[FILE] = path or ""
    os.environ.pop(VARIABLE, None)  # a process started from here has other settings
    if path:
        ctx.default_map = {**(ctx.default_map or {}), **read(ctx.command, path)}


def read_again(ctx: click.Context) -> dict[str, Any]:
    """Returns the values of a command's options as a start would find them now. Raises
    ConfigError."""
    try:
        arguments = [f"--config={ctx.meta[FILE]}", *ctx.meta[ARGUMENTS]]
        return ctx.command.make_context(ctx.info_name, arguments, ctx.parent).params
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None


def read(command: click.Command, path: str) -> dict[str, str]:
    """Returns the parameters of `command` that a file sets, as texts. Raises UsageError, which
    names the file and the setting."""
    settings = {
        max(option.opts, key=len).removeprefix("--"): option
        for option in command.params
        if isinstance(option, Option)
    }
    del settings["config"]
    texts = {}
    for name, value in _table(path).items():
        option = settings.get(name)
        if option is None:
            raise click.UsageError(f"{path}: {unknown(name, settings)}")
        assert option.name is not None
        texts[option.name] = text = _text(path, name, value)
        try:
            option.type.convert(text, option, None)
        except click.BadParameter as error:
            raise click.UsageError(f"{path}: {name}: {error.message}") from None
    return texts


def unknown(name: str, settings: Any) -> str:
    similar = difflib.get_close_matches(name.replace("_", "-"), settings, 1)
    return f"{name}: no such setting" + (f"; did you mean {similar[0]}?" if similar else "")


def _table(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise click.UsageError(f"{path}: over {MAX_BYTES} bytes")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise click.UsageError(f"--config {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(f"{path}: {error}") from None
    except RecursionError:
        raise click.UsageError(f"{path}: is nested too deeply") from None


def _text(path: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 2**64:
        raise click.UsageError(f"{path}: {name}: the number is too large")
    if isinstance(value, str | int | float):
        return str(value)
    raise click.UsageError(
        f"{path}: {name}: needs a text, a number, true or false, got {type(value).__name__}"
    )


OTHERS = frozenset(
    {
        "KVROUTE_CONFIG",
        *("KVROUTE_BALANCER_HOST", "KVROUTE_BALANCER_PORT"),
        *("KVROUTE_BALANCER_TIMEOUT", "KVROUTE_BALANCER_ANSWER_TIMEOUT", "KVROUTE_ROUTERS_DNS"),
        *("KVROUTE_BALANCER_MAXCONN", "KVROUTE_BALANCER_MAXCONN_PER_CLIENT"),
    }
)
"""Variables of `kvroute up` and of deploy/haproxy.cfg."""
SETTINGS = OTHERS | {
    variable(f)
    for settings in (PickerSettings, WorkerSettings, EngineAgentSettings, PlannerSettings)
    for f in fields(settings)
}
_NOT_OURS = re.compile(r"KVROUTE_TEST_|KVROUTE_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_|$)")
"""Variables of the tests, and of Kubernetes in pods near a Service whose name begins with
kvroute."""


def unknown_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields names that begin with KVROUTE_ and that nothing reads, with what to say of each."""
    for name in sorted(environment.keys() - SETTINGS):
        if name.startswith("KVROUTE_") and not _NOT_OURS.match(name):
            similar = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            yield name, f"the environment has {name}, which is no setting{hint}"
