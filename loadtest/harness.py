"""The frame of every bench: its command, rounds in turn, medians, and tables.

A bench is a `measure` that returns figures and a `show` that prints them:

    main = bench(measure, show, option("--rounds", 5))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
import numpy as np
from rich.table import Table

from app.http.server import run
from loadtest.command import Console, Decorator, command_of, json_option, save, table
from loadtest.processes import redis_to_measure

C = TypeVar("C")
T = TypeVar("T")


def bench(
    measure: Callable[..., Any],
    show: Callable[[Any, Console], None],
    *options: Decorator,
    redis: bool = False,
    width: int = 120,
) -> click.Command:
    """Measures with its options, writes what that returns with --json, and shows it.

    redis: one is started to be measured, and its URL is the first argument. width: of what is
    shown, in characters. The help is the docstring of the module.
    """

    def command(json_file: Path | None, **chosen: Any) -> None:
        with redis_to_measure() if redis else nullcontext() as url:
            result = measure(url, **chosen) if redis else measure(**chosen)
            if inspect.iscoroutine(result):
                result = run(result)
        save(result, json_file)
        show(result, Console(width=width))

    return command_of(command, measure.__module__, (*options, json_option))


def in_turn(ways: Mapping[C, Callable[[], T]], rounds: int) -> dict[C, list[T]]:
    """Returns the result of each way in each round; one round more comes first, to warm up.

    Every second round is backwards, so that no way always follows the same one.
    """
    made: dict[C, list[T]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            result = ways[name]()
            if turn:
                made[name].append(result)
    return made


def medians(rounds: Sequence[Any]) -> Any:
    """The median of each number of results that have the same keys."""
    if isinstance(rounds[0], Mapping):
        return {key: medians([result[key] for result in rounds]) for key in rounds[0]}
    return float(median(rounds))


def percentiles(values: Sequence[float], *of: int) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in of}


def grid(
    labels: Sequence[str],
    columns: Mapping[str, str],
    rows: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
    **more: Any,
) -> Table:
    """labels: heads of the columns that say what a row is, on the left. columns: by head, how a
    row's figures are written there, as for str.format. more: of rich's Table."""
    cells = table(*labels, *columns, left=labels, **more)
    for names, figures in rows:
        cells.add_row(*names, *(form.format_map(figures) for form in columns.values()))
    return cells
