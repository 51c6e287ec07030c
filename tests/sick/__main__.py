"""Has engines of a fleet fall ill and recover, under load, and says what came of it.

    python -m tests.sick --replicas 1 --replicas 3 --page docs/sick-engines.md

Ends with 1 if more failed than was inside an engine that broke off, if an engine that works got too
little or one that does not too much, or if it was not even again ten seconds later.
"""

import asyncio
import sys
import time
from pathlib import Path

import click

from tests.fakes.faults import WELL
from tests.sick import fleet as fleets
from tests.sick.load import play
from tests.sick.page import page
from tests.sick.rows import ROWS
from tests.sick.verdict import Trial, complaints

BEFORE_S, AFTER_S = 5.0, 14.0


@click.command(help=__doc__)
@click.option("--replicas", "sizes", multiple=True, default=(1, 3), type=click.IntRange(1, 9))
@click.option("--row", "names", multiple=True, help="Only rows whose names have this in them.")
@click.option(
    "--page", "path", type=click.Path(path_type=Path, dir_okay=False), help="Where to write it."
)
def main(sizes, names, path):
    rows = [row for name, row in ROWS.items() if not names or any(part in name for part in names)]
    results = asyncio.run(_run(sizes, rows))
    if path is not None:
        path.write_text(page(results))
    sys.exit(any(result["complaints"] for result in results))


async def _run(sizes, rows):
    results = []
    for num_replicas in sizes:
        left = [row for row in rows if not (row.stops_router and num_replicas == 1)]
        while left:
            async with fleets.started(num_replicas) as fleet:
                is_whole = True
                while left and is_whole:
                    result, is_whole = await _try(fleet, left.pop(0), num_replicas)
                    _tell(result)
                    results.append(result)
    return results


def _tell(result):
    said = result["complaints"]
    assert isinstance(said, list)
    figures = {name: value for name, value in result.items() if name not in ("row", "complaints")}
    click.echo(f"{'RED' if said else 'ok ':4} {result['row']}: {figures}")
    for complaint in said:
        click.echo(f"       {complaint}")


async def _try(fleet, row, num_replicas):
    ended = []
    playing = asyncio.create_task(play(fleet.http, lambda: fleet.urls, ended))
    try:
        await asyncio.sleep(BEFORE_S)
        before_s = time.monotonic() - BEFORE_S
        inside = _inside(fleet)
        on_s = time.monotonic()
        _strike(fleet, row)
        await asyncio.sleep(row.on_s)
        off_s = time.monotonic()
        await _heal(fleet, row)
        await asyncio.sleep(AFTER_S)
    finally:
        playing.cancel()
        await asyncio.wait([playing])
    trial = Trial(
        row,
        num_replicas,
        on_s,
        off_s,
        off_s + AFTER_S,
        [one for one in ended if one.ended_s >= on_s],
        [[one.at_s for one in engine.asked] for engine in fleet.engines],
        _inside(fleet) - inside,
    )
    before = Trial(row, num_replicas, before_s, on_s, on_s, ended, trial.came, 0)
    said = complaints(trial, before.took_s())
    try:
        await fleet.until_whole()
    except AssertionError as error:
        return _figures(trial, [*said, f"the fleet is not whole again: {error}"]), False
    return _figures(trial, said), True


def _inside(fleet):
    """Requests so far that engines broke, or held until the door gave them up."""
    return sum(engine.broken + engine.aborted for engine in fleet.engines)


def _strike(fleet, row):
    for place in row.sick:
        fleet.engines[place].faults = row.faults
    if row.stops_router:
        fleet.stop_router()


async def _heal(fleet, row):
    for place in row.sick:
        fleet.engines[place].faults = WELL
    if row.stops_router:
        await asyncio.to_thread(fleet.start_router)


def _figures(trial, said):
    return {
        "row": trial.row.name,
        "replicas": trial.num_replicas,
        "requests": len(trial.ended),
        "failed": trial.num_failed,
        "inside": trial.inside,
        "even_after_s": trial.even_after_s(),
        "took_s": round(trial.took_s(), 2),
        "complaints": said,
    }


if __name__ == "__main__":
    main()
