"""Writes docs/measurements.md from the figures kept in docs/measurements.json.

    python -m tools.measurements
    python -m tools.measurements --take 'python -m loadtest.bench_door' out/1.json out/2.json

`--take` first replaces the figures of one command by the least and the most found in the files that
runs of it wrote with --json. A row's `at` says where in such a file its figure is: keys, of which
`*` stands for every item of a list. Rows without one, whose figures are read off what is printed,
are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = DOCS / "measurements.json"
PAGE = DOCS / "measurements.md"
DIGITS = 3
"""Runs differ in the third already."""

HEAD = """\
# Measurements

<!-- Written by `python -m tools.measurements` from docs/measurements.json: do not edit. -->

The figures that a choice rests on, measured on two shared cores with Redis 7.0: trust the ratios.
"0.9 to 1.1" is the least and the most of several runs.

A new figure: run the command, most with `--json FILE`, then `python -m tools.measurements --take
COMMAND FILE...`. A row without `at` is edited in docs/measurements.json, before `make docs`.
"""

Subject = Mapping[str, Any]
"""title, command, conditions, and rows: each has what, figure, unit and, if known, `at`."""


@click.command()
@click.option("--take", metavar="COMMAND", help="The command whose figures to replace.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(take: str | None, files: Sequence[Path]) -> None:
    """Write docs/measurements.md."""
    subjects = orjson.loads(FIGURES.read_bytes())
    if take is not None:
        runs = [orjson.loads(file.read_bytes()) for file in files]
        chosen = [subject for subject in subjects if subject["command"] == take]
        if not chosen or not runs:
            raise click.UsageError("--take needs a command of docs/measurements.json, and files")
        for subject in chosen:
            replace_figures(subject["rows"], runs)
            if "conditions" in runs[0]:  # of a machine that is not this one
                subject["conditions"] = runs[0]["conditions"]
        FIGURES.write_bytes(orjson.dumps(subjects, option=orjson.OPT_INDENT_2) + b"\n")
    PAGE.write_text(page(subjects))


def page(subjects: Sequence[Subject]) -> str:
    """The whole document."""
    return HEAD + "".join(line for subject in subjects for line in _section(subject))


def replace_figures(rows: Sequence[dict[str, Any]], runs: Sequence[Any]) -> None:
    """Give each row that has `at` the least and the most of its values in `runs`, in its unit.

    over: where what a value is divided by is. times: what it is multiplied by.
    """
    for row in rows:
        if "at" not in row:
            continue
        values = []
        for run in runs:
            (divisor,) = values_at(run, row["over"]) if "over" in row else (1.0,)
            values += [
                value / divisor * row.get("times", 1.0) for value in values_at(run, row["at"])
            ]
        least, most = _rounded(min(values)), _rounded(max(values))
        row["figure"] = least if least == most else [least, most]


def values_at(run: Any, path: Sequence[str]) -> list[float]:
    """The values that `path` leads to. Raises KeyError where it leads nowhere."""
    if not path:
        return [float(run)]
    key, *rest = path
    if key == "*":
        return [value for item in run for value in values_at(item, rest)]
    return values_at(run[key], rest)


def _rounded(value: float) -> float:
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _section(subject: Subject) -> Iterator[str]:
    yield f"\n## {subject['title']}\n\n    {subject['command']}\n"
    if subject.get("conditions"):
        yield f"\n{subject['conditions']}\n"
    yield "\n| what | figure | unit |\n|---|---|---|\n"
    for row in subject["rows"]:
        yield f"| {row['what']} | {_shown(row['figure'])} | {row['unit']} |\n"


def _shown(figure: float | Sequence[float] | None) -> str:
    if figure is None:
        return "not measured"
    if isinstance(figure, Sequence):
        least, most = figure
        return f"{least:,} to {most:,}"
    return f"{figure:,}"


if __name__ == "__main__":
    main()
