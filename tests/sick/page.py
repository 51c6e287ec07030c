"""Writes what came of each fault as a page of the documents. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

HEAD = """\
# Engines that fall ill

<!-- Written by `python -m tests.sick --page docs/sick-engines.md`: do not edit. -->

Six engines behind agents get 12 requests a second: chats, completions, messages and responses, of
which three of four are streamed. Each takes 0.8 s. A fault comes, stays for ten seconds, and goes;
`tests/sick/rows.py` has them all. `make test-sick` fails if

- more requests failed than were *inside*: broken off by an engine after their first token, or held
  by it until they were given up;
- an engine that works got less than half of its share, or one that does not more than that;
- shares were not even again ten seconds later;
- answers took over two seconds longer.
"""
COLUMNS = {
    "what": "row",
    "requests": "requests",
    "failed": "failed",
    "inside": "inside",
    "even again after": "even_after_s",
    "an answer took": "took_s",
}
SECONDS = ("even_after_s", "took_s")

Result = dict[str, Any]


def page(results: Sequence[Result]) -> str:
    """results: as `tests.sick` has them, in the order in which they were tried."""
    return HEAD + "".join(f"{line}\n" for line in _tables(results))


def _tables(results: Sequence[Result]) -> Iterator[str]:
    for num_replicas in dict.fromkeys(result["replicas"] for result in results):
        replicas = "One replica" if num_replicas == 1 else f"{num_replicas} replicas"
        yield f"\n## {replicas}\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        for result in results:
            if result["replicas"] == num_replicas:
                cells = (_cell(name, result[name]) for name in COLUMNS.values())
                yield f"| {' | '.join(cells)} |"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "never"
    return f"{value:.1f} s" if name in SECONDS else str(value)
