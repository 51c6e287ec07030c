"""Runs an optional suite of tests, and writes what came of it into docs/suites.md.

python -m tools.suites NAME COMMAND...          as the targets of the Makefile do
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/suites.md"
PASSED = re.compile(r"^=* ?((?:\d+ [a-z]+,? ?)+) in ")
"""The line in which pytest counts what passed and what failed."""


def main() -> None:
    """Run the command, write the suite's row, and end with the status of the command."""
    name, *command = sys.argv[1:]
    status, counts = run(command)
    result = counts or ("passed" if status == 0 else f"ended with {status}")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    PAGE.write_text(with_row(PAGE.read_text(), name, date, commit(), result))
    sys.exit(status)


def run(command: list[str]) -> tuple[int, str]:
    """Status of a command whose output is passed on, and pytest's counts, if it printed any."""
    counts = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if found := PASSED.match(line):
                counts = found[1].strip()
    return process.returncode, counts


def commit() -> str:
    """The commit that is checked out, with a plus behind it if files differ."""
    head = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return head.stdout.strip()


def with_row(page: str, *cells: str) -> str:
    """The page with the row of the suite that the first cell names. Raises ValueError if it has
    none."""
    row = f"| {' | '.join(cells)} |"
    changed, count = re.subn(rf"(?m)^\| {re.escape(cells[0])} \|.*$", lambda _: row, page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has no row for {cells[0]}")
    return changed


if __name__ == "__main__":
    main()
