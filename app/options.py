"""Command-line options made of settings and of the kinds of value that app/core/settings.py names.

The flag, variable, default and help of an option are those of its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, TypeVar

import click

from app.core import settings
from app.core.errors import ConfigError, KvrouteError
from app.core.settings import CommonSettings, Kind, OneOf, PolicyName, Real, Text, Whole, variable
from app.policy.cost import POLICIES

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=CommonSettings)


class Number(click.FloatRange):
    """A number in a range. Refuses `nan`, which a comparison with a bound lets pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class _CheckedText(click.ParamType[str]):
    """Text that a check of its own accepts."""

    def __init__(self, text: Text) -> None:
        self.name = text.shape
        self._check = text.check

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            self._check(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@cache
def option_type(kind: Kind) -> click.ParamType[Any] | type[bool] | None:
    """The type of an option that takes values of this kind; None: click goes by the default."""
    match kind:
        case Whole(least, most):
            return click.IntRange(least, most)
        case Real(least, most):
            return Number(least, most)
        case OneOf(words):
            return click.Choice(tuple(map(str, words)))
        case PolicyName():
            return click.Choice(tuple(POLICIES))
        case Text():
            return _CheckedText(kind)
    return kind


PORT = option_type(settings.PORT)
SEED = option_type(settings.SEED)
COUNT = option_type(settings.COUNT)
POSITIVE = option_type(settings.POSITIVE)
PROCESSES = option_type(settings.PROCESSES)
SECONDS = option_type(settings.SECONDS)
POSITIVE_SECONDS = option_type(settings.POSITIVE_SECONDS)
FACTOR = option_type(settings.FACTOR)
BASE_URL = option_type(settings.BASE_URL)
POLICY = option_type(settings.PolicyName())


def cluster_size(command: F) -> F:
    """Adds --workers and --replicas to a command that starts a cluster on this machine."""
    for flag, number, what in (("replicas", 3, "router replicas"), ("workers", 8, "workers")):
        command = click.option(
            f"--{flag}",
            f"num_{flag}",
            default=number,
            show_default=True,
            type=PROCESSES,
            help=f"Number of {what}.",
        )(command)
    return command


class _OneLine(click.Command):
    """Shows our errors, and those of the system, such as a full disk, as one line, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        error: BaseException
        try:
            return super().invoke(ctx)
        except* (KvrouteError, OSError) as group:
            error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # Out here, as early releases of Python 3.11 wrap what is raised in an except* clause.
        if isinstance(error, BrokenPipeError):
            raise error  # click ends quietly when nobody reads the output any more
        raise click.ClickException(str(error))


class Command(_OneLine):
    """A command."""


class Group(_OneLine, click.Group):
    """A command that has others."""


@contextmanager
def naming_file(file: object) -> Iterator[None]:
    """Adds the name of a file to errors of writing it, of which the system names only the cause."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


class _Option(click.Option):
    """Ignores what Kubernetes puts into KVROUTE_PORT of every pod near a Service named kvroute."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return (
            None
            if value and self.envvar == "KVROUTE_PORT" and value.startswith("tcp://")
            else value
        )


def options(cls: type, *, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Adds a click option for every field of `cls`, except those in `without`, to a command."""

    def decorate(command: F) -> F:
        for f in reversed(fields(cls)):
            if f.name not in without:
                command = click.option(
                    _spelt(f),
                    f.name,
                    cls=_Option,
                    default=None if f.default is MISSING else f.default,
                    type=option_type(f.metadata["kind"]),
                    envvar=variable(f),
                    show_default=True,
                    show_envvar=True,
                    help=f.metadata["help"],
                )(command)
        return command

    return decorate


def pick(cls: type[S], values: dict[str, Any], *, without: tuple[str, ...] = ()) -> S:
    """A `cls` made from those of `values` that are its fields; the others keep their default."""
    names = {f.name for f in fields(cls)} - set(without)
    return cls(**{name: value for name, value in values.items() if name in names})


def flags(settings: Any, *, without: tuple[str, ...] = ()) -> list[str]:
    """The command line that `options` would read as `settings`."""
    names = [f.name for f in fields(settings) if f.name not in without]
    values = {name.replace("_", "-"): getattr(settings, name) for name in names}
    return [_flag(name, value) for name, value in values.items() if value is not None]


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _spelt(f: Field[Any]) -> str:
    name = f.name.replace("_", "-")
    return f"--{name}/--no-{name}" if f.metadata["kind"] is bool else f"--{name}"
