"""Prints how large each package is, beside another commit, and all of them beside their ceilings.

python -m tools.sizes [COMMIT]          COMMIT: by default the last tag

Whoever goes over a ceiling says in the commit what was taken away for it, or why nothing could be.
No test fails by these numbers: crammed lines are worse than many.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
CEILINGS = {
    "app + workers": 56_500,
    "tests": 71_500,
    "loadtest": 7_900,
    "words of docs": 33_000,
    "pages of docs": 32,
    "settings": 120,
    "flags": 185,
}
RECORDS = {"dataclass", "NamedTuple", "Struct", "BaseModel"}
"""A class is a record if one of these decorates it, or is its base."""
ROOMS = ("app", "workers")
COUNTS = ("lines", "records", "settings")
SETTING = re.compile(r"^    (\w+): .* = setting\(", re.MULTILINE)


def main() -> None:
    """Print both tables."""
    commit = sys.argv[1] if sys.argv[1:] else _git("tag", "--sort=-creatordate").partition(b"\n")[0]
    before = files_of(commit) if commit else {}
    sizes, sizes_before = package_sizes(files_of(None)), package_sizes(before)
    rows = [
        (name, *(str(cell) for what in COUNTS for cell in (sizes[name][what], was[what])))
        for name in sorted(sizes.keys() | sizes_before.keys())
        for was in [sizes_before[name]]
    ]
    _print_table(("package", *(cell for what in COUNTS for cell in (what, "before"))), rows)
    click.echo()
    totals, totals_before = total_sizes(files_of(None)), total_sizes(before)
    _print_table(
        ("in all", "now", "before", "ceiling"),
        [
            (name, f"{totals[name]:,}", f"{totals_before[name]:,}", f"{ceiling:,}")
            for name, ceiling in CEILINGS.items()
        ],
    )


def package_sizes(files: Mapping[str, str]) -> dict[str, Counter[str]]:
    """COUNTS of each package, by its path. files: as from `files_of`."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for path, text in files.items():
        room, *inner = path.split("/")
        if path.endswith((".py", ".lua")):
            package = f"{room}/{inner[0]}" if room in ROOMS and inner[1:] else room
            sizes[package] += Counter(lines=len(text.splitlines()), **_declared(path, text))
    return sizes


def total_sizes(files: Mapping[str, str]) -> Counter[str]:
    """Sizes by the names of CEILINGS. A setting counts once, in however many processes it is, and
    has a flag."""
    totals: Counter[str] = Counter()
    totals["settings"] = len({name for text in files.values() for name in SETTING.findall(text)})
    totals["flags"] = totals["settings"]
    for package, counts in package_sizes(files).items():
        room = package.partition("/")[0]
        totals["app + workers" if room in ROOMS else room] += counts["lines"]
        totals["flags"] += counts["flags"] if room in ROOMS else 0
    pages = [
        text for path, text in files.items() if path.startswith("docs/") and path[-3:] == ".md"
    ]
    totals["pages of docs"], totals["words of docs"] = len(pages), len(" ".join(pages).split())
    return totals


def _declared(path: str, text: str) -> Counter[str]:
    """How many records, settings and flags of the command line a file declares."""
    counts = Counter(settings=len(SETTING.findall(text)))
    for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
        if isinstance(node, ast.ClassDef):
            counts["records"] += bool(RECORDS & {*map(_name, node.bases + node.decorator_list)})
        elif isinstance(node, ast.Call):
            counts["flags"] += _name(node) == "option"
    return counts


def _name(node: ast.expr) -> str:
    """The last name of an expression such as `dataclasses.dataclass(frozen=True)`."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def files_of(commit: str | bytes | None) -> dict[str, str]:
    """The text of each file of a commit that is counted, by its path; None: as it is now."""
    kinds = (".py", ".lua", ".md")
    if commit is None:
        paths = _git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
        there = (path for path in paths if path.endswith(kinds) and (ROOT / path).is_file())
        return {path: (ROOT / path).read_text() for path in there}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        return {
            member.name: content.read().decode()
            for member in archive
            if member.name.endswith(kinds) and (content := archive.extractfile(member))
        }


def _git(*words: str | bytes) -> bytes:
    command = (shutil.which("git") or "git", *words)
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout


def _print_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *others in table:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        click.echo("  ".join((first.ljust(widths[0]), *cells)))


if __name__ == "__main__":
    main()
