"""Writes what came of each fault as a page of the documents. No I/O."""

from textwrap import wrap

HEAD = """\
# Engines that fall ill

<!-- Written by `python -m tests.sick --page docs/sick-engines.md`: do not edit. -->

Six engines behind agents get 12 requests a second, some 280 for each fault: chats, completions,
messages and responses, of which three of four are streamed. Each takes 0.8 s. A fault comes, stays
for ten seconds, and goes; `tests/sick/rows.py` has them all. `make test-sick` fails if

- more requests failed than were *inside*: broken off by an engine after their first token, or held
  by it until they were given up;
- an engine that works got less than half of its share, or one that does not more than that;
- shares were not even again ten seconds later;
- answers took over two seconds longer.
"""
SOON_S = 4.0
COLUMNS = {"failed": "failed", "inside": "inside", "even again after, s": "even_after_s"}


def page(results):
    """results: as `tests.sick` has them, in the order in which they were tried."""
    return HEAD + "".join(f"{line}\n" for line in _table(results))


def _table(results):
    """A row for each fault that cost something, with the columns of each number of replicas."""
    sizes = list(dict.fromkeys(result["replicas"] for result in results))
    of = {(result["row"], result["replicas"]): result for result in results}
    head = [f"{name}, {size} replica{'s' * (size > 1)}" for size in sizes for name in COLUMNS]
    yield f"\n| what | {' | '.join(head)} |"
    yield "|---" * (1 + len(head)) + "|"
    harmless = []
    for row in dict.fromkeys(result["row"] for result in results):
        its = [of.get((row, size)) for size in sizes]
        if all(result is None or is_harmless(result) for result in its):
            harmless.append(row)
            continue
        cells = [_cell(result, name) for result in its for name in COLUMNS.values()]
        yield f"| {row} | {' | '.join(cells)} |"
    if harmless:
        yield ""
        yield from wrap(
            f"Nothing failed, and shares were even within {SOON_S:g} s: {'; '.join(harmless)}.", 100
        )


def is_harmless(result):
    even_after_s = result["even_after_s"]
    return not result["failed"] and even_after_s is not None and even_after_s <= SOON_S


def _cell(result, name):
    if result is None:
        return ""
    return "never" if result[name] is None else str(result[name])
