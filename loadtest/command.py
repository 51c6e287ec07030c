"""Parts that the commands here share: how they end, and the files they write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click
import orjson
from rich import console as rich_console
from rich.console import Group
from rich.table import Column, Table

from app import options
from app.local.child import heed_interrupts
from app.options import POSITIVE, PROCESSES
from loadtest.traces import DEMO_TRACE, Trace, TraceError, read_trace

Decorator = Callable[[Any], Any]
WIDEST = 1000


class Command(options.Command):
    """Ends on SIGTERM and SIGHUP as on Ctrl-C, with no process or file left behind."""

    def invoke(self, ctx: click.Context) -> Any:
        heed_interrupts()
        return super().invoke(ctx)


class Console(rich_console.Console):
    """Cuts no figure: tables that need more than its width get it, as in a terminal of 80
    characters, or where the output goes to a file."""

    def print(self, *objects: Any, **more: Any) -> None:
        room = self.options.update(width=WIDEST)
        parts = [
            p for one in objects for p in (one.renderables if isinstance(one, Group) else [one])
        ]
        needed = (self.measure(p, options=room).maximum for p in parts if isinstance(p, Table))
        self.width = max(self.width, *needed, 0)
        super().print(*objects, **more)


def distinct(_: click.Context, __: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The callback of an option whose values name the results."""
    if twice := [value for n, value in enumerate(values) if value in values[:n]]:
        raise click.BadParameter(f"{twice[0]} twice")
    return values


def option(
    flag: str,
    default: Any,
    text: str | None = None,
    kind: Any = POSITIVE,
    *,
    several: bool = False,
    **more: Any,
) -> Decorator:
    """flag: with the parameter's name behind it where that is another. text: of its help. several:
    it may be given several times, each time with another value. more: of click's option."""
    if default is not None:
        more |= {"default": default, "show_default": True}
    if several:
        text = f"{text or ''} May be given several times.".strip()
        more = {"multiple": True, "callback": distinct} | more
    return click.option(*flag.split(), type=kind, help=text, **more)


def command_of(
    run: Callable[..., None], module: str, options: Sequence[Decorator]
) -> click.Command:
    """A command that calls `run` with its options; its help is the docstring of `module`."""
    made: Any = run
    for add in reversed(options):
        made = add(made)
    text = sys.modules[module].__doc__ or ""
    # So that click leaves the lines of an example as they are.
    return click.command(cls=Command, help=text.replace("\n\n    ", "\n\n\b\n    "))(made)


def make_folder(folder: Path) -> None:
    """Creates the folder for a report. Better refused now than after everything was played.

    Raises ClickException if nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise click.ClickException(f"{folder}: nothing can be written there")


def table(*heads: str, left: Collection[str] = (), **more: Any) -> Table:
    """Columns of figures, on the right but for those in `left`. more: of rich's Table."""
    columns = (Column(head, justify="left" if head in left else "right") for head in heads)
    return Table(*columns, **more)


class _File(click.Path):
    """A file for a report; converting the option creates the file's folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        make_folder(path.parent)
        return path


FILE = _File(dir_okay=False, writable=True)
"""The type of an option that names a report's file; refuses what `make_folder` refuses."""

trace_option = click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=DEMO_TRACE,
    help="JSON lines, as for kvroute replay. Default: the demo's trace.",
)
jobs_option = option("--jobs", os.cpu_count() or 1, "Processes to simulate in.", PROCESSES)
json_option = click.option("--json", "json_file", type=FILE, help="File to write the figures to.")


def read(trace_file: Path) -> Trace:
    """Raises ClickException for a trace that cannot be played."""
    try:
        return read_trace(trace_file)
    except TraceError as error:
        raise click.ClickException(str(error)) from error


def save(figures: Any, file: Path | None) -> None:
    """Writes the figures as JSON; keys may be numbers. None: no file was asked for."""
    if file is not None:
        layout = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
        with options.naming_file(file):
            file.write_bytes(orjson.dumps(figures, option=layout))
