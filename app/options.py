"""Command-line options made of settings and of the kinds of value that a setting may have.

The flag, variable, default and help of an option are those of its field.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, TypeVar

import click

from app.core.errors import ConfigError, KvrouteError, cut, printable
from app.core.settings import kinds
from app.core.settings.kinds import (
    CommonSettings,
    Integers,
    Kind,
    OneOf,
    PolicyName,
    Real,
    Text,
    flag,
    headings,
    variable,
)
from app.output import MAX_CHARACTERS
from app.policy.policies import POLICIES

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=CommonSettings)

ARGUMENTS = "kvroute.arguments"
"""Name in a context's `meta` of the arguments on the command line."""
OTHERS = "Options"
"""Heading of options that belong under no other, listed last."""
ALL_SHOWN = "kvroute.all_shown"
"""Name in a context's `meta` of whether the help lists all options, with variables and ranges."""
CLUSTER = "Cluster"
"""Heading of the options of a cluster on this machine."""
_SETTING = re.compile(r"(?<![\w/.-])[a-z]+(?:_[a-z0-9]+)+(?![\w/-])|^[a-z]+(?=: )")


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
        self.separator = text.separator

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if isinstance(value, list):
            value = self.separator.join(value)
        try:
            self._check(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@cache
def option_type(kind: Kind) -> click.ParamType[Any] | type[bool] | None:
    """Returns the type of an option for values of this kind, or None for the default's type."""
    match kind:
        case Integers(least, most):
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


PORT = option_type(kinds.PORT)
SEED = option_type(kinds.SEED)
COUNT = option_type(kinds.COUNT)
POSITIVE = option_type(kinds.POSITIVE)
PROCESSES = option_type(kinds.PROCESSES)
SECONDS = option_type(kinds.SECONDS)
POSITIVE_SECONDS = option_type(kinds.POSITIVE_SECONDS)
FACTOR = option_type(kinds.FACTOR)
BASE_URL = option_type(kinds.BASE_URL)
POLICY = option_type(kinds.PolicyName())


def cluster_size(least_workers: int = 1) -> Callable[[F], F]:
    """Adds --workers and --replicas to a command that starts a cluster on this machine."""

    def added(command: F) -> F:
        for name, number, least, what in (
            ("replicas", 3, 1, "router replicas"),
            ("workers", 8, least_workers, "workers"),
        ):
            command = click.option(
                f"--{name}",
                f"num_{name}",
                cls=Option,
                heading=CLUSTER,
                default=number,
                show_default=True,
                type=option_type(kinds.Integers(least, kinds.PROCESSES.most)),
                help=f"Number of {what}.",
            )(command)
        return command

    return added


class _OneLine(click.Command):
    """Shows our errors, and those of the system, such as a full disk, as one line, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        error: BaseException
        try:
            return self._invoke(ctx)
        except* (KvrouteError, OSError) as group:
            error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # Out here, as early releases of Python 3.11 wrap what is raised in an except* clause.
        if isinstance(error, BrokenPipeError):
            raise error  # click ends quietly when nobody reads the output any more
        told = _with_flags(str(error) or type(error).__name__, ctx.command)
        raise click.ClickException(printable(cut(told, MAX_CHARACTERS)))

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if isinstance(error, click.UsageError):  # of what was typed
                raise
            raise click.ClickException(printable(error.message)) from None


def _with_flags(text: str, command: click.Command) -> str:
    """Returns `text` with flags of the command in place of the names of its settings."""
    spelt = (opt for param in command.params for opt in param.opts if opt.startswith("--"))
    flags = {opt[2:].replace("-", "_"): opt for opt in spelt}
    return _SETTING.sub(lambda match: flags.get(match[0], match[0]), text)


class Command(_OneLine):
    """A command. Its help lists the options that are often set; --help-all lists all by subject."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # Until here, Ctrl-C ends the process: see app/__main__.py.
        if not isinstance(self, click.Group) and _sigint_ends_at_once():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)

    @property
    def has_rare(self) -> bool:
        return any(getattr(param, "rare", False) for param in self.params)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [*params, _HELP_ALL] if self.has_rare else params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        by_heading: dict[str, list[tuple[str, str]]] = {}
        if self.has_rare and not ctx.meta.get(ALL_SHOWN):
            shown = [p for p in self.get_params(ctx) if not getattr(p, "rare", False)]
            entries = filter(None, (param.get_help_record(ctx) for param in shown))
            with formatter.section(OTHERS):
                formatter.write_dl([(spelt, _briefly(text)) for spelt, text in entries])
            return
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                heading = getattr(param, "heading", OTHERS)
                by_heading.setdefault(heading, []).append(record)
        for heading, records in sorted(by_heading.items(), key=lambda item: item[0] == OTHERS):
            with formatter.section(heading):
                formatter.write_dl(records)


def _briefly(text: str) -> str:
    text, mark, default = text.partition("  [default: ")
    return re.split(r"[.;](?= |$)", text)[0] + mark + default


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[ALL_SHOWN] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options, with their variables, and exit.",
)


def _sigint_ends_at_once() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    )


class Group(Command, click.Group):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@contextmanager
def naming_file(file: object) -> Iterator[None]:
    """Adds the name of a file to errors of writing it, of which the system names only the cause."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


class Option(click.Option):
    """An option whose help shows its default as one would type it.

    heading: under which the help lists it. rare: only --help-all lists it. One whose value is a
    list may be given several times.

    Ignores what Kubernetes puts into KVROUTE_PORT of every pod near a Service named kvroute.
    """

    def __init__(
        self, *args: Any, heading: str = OTHERS, rare: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.heading, self.rare = heading, rare

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        # While it is being added, as such an option would have a tuple as its value, too.
        self.multiple = isinstance(self.type, _CheckedText) and bool(self.type.separator)
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if getattr(ctx.command, "has_rare", False) and not ctx.meta.get(ALL_SHOWN):
            extra.pop("envvars", None)
            extra.pop("range", None)
        if "default" in extra:
            extra["default"] = self._typed(self.get_default(ctx, call=False))
            if not extra["default"]:
                del extra["default"]
        if "range" in extra:
            least, _, most = extra["range"].partition("<=x<=")
            if most in map(str, (kinds.MOST, kinds.LONGEST_S)):
                extra["range"] = f"x>={least}"
        return extra

    def _typed(self, default: Any) -> str:
        if self.is_bool_flag:
            flags = self.opts if default else self.secondary_opts
            return flags[0] if flags else ""
        if isinstance(default, tuple):
            return ", ".join(map(self._typed, default))
        return f"{default:.12g}" if isinstance(default, float) else str(default)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        is_of_kubernetes = self.envvar == "KVROUTE_PORT" and (value or "").startswith("tcp://")
        return None if is_of_kubernetes else value


def options(cls: type, *, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Adds a click option for every field of `cls`, except those in `without`, to a command."""

    def decorate(command: F) -> F:
        listed = headings(cls)
        for f in reversed(fields(cls)):
            if f.name not in without:
                command = click.option(
                    _spelt(f),
                    f.name,
                    is_flag=f.metadata["kind"] is bool,
                    cls=Option,
                    heading=listed[f.name],
                    rare=not f.metadata["often"],
                    default=None if f.default is MISSING else f.default,
                    type=option_type(f.metadata["kind"]),
                    envvar=variable(f),
                    show_default=True,
                    show_envvar=True,
                    help=f.metadata["help"],
                )(command)
        return command

    return decorate


def pick(cls: type[S], values: dict[str, Any], *, without: tuple[str, ...]) -> S:
    """Returns a `cls` made of the `values` that are its fields; others keep their default."""
    names = {f.name for f in fields(cls)} - set(without)
    return cls(**{name: value for name, value in values.items() if name in names})


def flags(settings: Any, *, without: tuple[str, ...] = ()) -> list[str]:
    """Returns the command line that `options` would read as `settings`."""
    named = [(f, getattr(settings, f.name)) for f in fields(settings) if f.name not in without]
    texts = (
        flag(f, value) if isinstance(value, bool) else f"{flag(f)}={value}"
        for f, value in named
        if value is not None
    )
    return list(filter(None, texts))


def _spelt(f: Field[Any]) -> str:
    opposite = flag(f, False) if f.metadata["kind"] is bool else ""
    return "/".join(filter(None, (flag(f), opposite)))
