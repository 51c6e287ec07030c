"""`kvroute explain` and `whatif`: why requests went where they went, and in other fleets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
import msgspec

from app.core.keys import Keyspace
from app.ops import namespaces
from app.ops.terminal import TIMEOUT_S, CommandAnswer, answering, counted, text_table
from app.options import POLICY, PROCESSES, Command
from app.policy.record import DecisionRecord, DecisionSummary
from app.state import decisions
from app.state.client import RedisClient
from app.state.connect import deadline

OTHERS, COST = 3, 5
"""Places in a candidate's row."""
_TRANSFERS = {"split": "computes the prompt", "fetch": "hands on what it holds of the prompt"}


@click.command(cls=Command)
@click.argument("request_id")
@answering
async def explain(redis: RedisClient, keyspace: Keyspace, request_id: str) -> CommandAnswer:
    """Explain why a request went where it went, while the decision is kept."""
    record = await find(redis, keyspace, request_id)
    if record is None:
        await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
        raise click.ClickException(f"no decision about {request_id!r} is kept (yet, or any longer)")
    return CommandAnswer(explanation(record), list(_lines(record)))


def _lines(record: DecisionRecord) -> Iterator[str]:
    rows, terms = _scored(record)
    o = record.overlap
    yield (
        f"{record.request_id}: {counted(record.isl_tokens, 'token')} to {record.worker} by "
        f"{record.policy}; the worker held {o.total:,} of "
        f"{counted(record.full_blocks, 'full block')} ({o.device:,} on its device, "
        f"{o.host:,} in host memory, {o.disk:,} on disk)"
    )
    best = record.best
    longest = f"; {best.worker} held the most, {best.blocks:,}" if best.worker else ""
    if record.source:
        kind, _, source = record.source.partition(" ")
        yield f"{kind}: {source} {_TRANSFERS[kind]}; the overlap is that one's"
    yield f"{record.locality.text}{longest}; decided on try {record.tries}"
    yield f"{record.trust}: {record.trust.text}"
    if record.waited_ms:
        yield f"the request waited {record.waited_ms / 1000:.2f} s for a worker that could take it"
    if not rows:
        yield "the candidates of this decision were not kept: see --details-per-s"
        return
    head = ["worker", "eligible", "requests", "of others", "overlap", "cost", *terms]
    if not any(row[OTHERS] for row in rows):
        rows, head = [_without(row, OTHERS) for row in rows], _without(head, OTHERS)
    yield from text_table(head, [[_short(cell) for cell in row] for row in rows])


async def find(redis: RedisClient, keyspace: Keyspace, request_id: str) -> DecisionRecord | None:
    """Returns the newest decision about a request, or None if none is kept. Raises
    RedisUnavailable."""
    async for record in decisions.read(redis, keyspace):
        if record.request_id == request_id:
            return record
    return None


def explanation(record: DecisionRecord) -> dict[str, Any]:
    """Returns a decision for JSON, with every candidate's cost and terms where they are kept, the
    cheapest first."""
    rows, terms = _scored(record)
    head = ("worker", "eligible", "requests", "others_requests", "overlap_blocks", "cost", *terms)
    names = [name for name in DecisionSummary.__struct_fields__ if name != "hex_blocks"]
    plain = {name: msgspec.to_builtins(getattr(record, name)) for name in names}
    plain["best"], plain["best_overlap"] = record.best
    plain["locality_text"], plain["terms"] = record.locality.text, terms
    plain["candidates"] = [dict(zip(head, row, strict=True)) for row in rows]
    return plain


def _scored(record: DecisionRecord) -> tuple[list[list[Any]], list[str]]:
    """Returns every candidate with its cost and terms, the cheapest first; and the terms' names."""
    if record.seen is None:
        return [], []
    seen, candidates = record.seen, record.seen.candidates
    costs = record.costs
    overlap = candidates.overlap
    rows = [
        [
            worker,
            bool(seen.eligible[i]),
            int(candidates.active_requests[i]),
            round(candidates.others_requests[i]),
            int(overlap[i]),
            float(costs.cost[i]),
            *(float(values[i]) for values in costs.terms.values()),
        ]
        for i, worker in enumerate(seen.workers)
    ]
    return sorted(rows, key=lambda row: row[COST]), list(costs.terms)


def _without(row: list[Any], place: int) -> list[Any]:
    return [*row[:place], *row[place + 1 :]]


def _short(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


@click.command(cls=Command)
@click.option("--policy", type=POLICY, help="Policy of the routers; unset: as recorded.")
@click.option(
    "--workers", "num_workers", type=PROCESSES, help="Size of the fleet; unset: as it is now."
)
@answering
async def whatif(
    redis: RedisClient, keyspace: Keyspace, policy: str | None, num_workers: int | None
) -> CommandAnswer:
    """Play the decisions of the last minutes again, by a policy, in a fleet of another size.

    They are played in virtual time, in today's fleet too: each worker is as fast as it was found to
    be, and one that joins has an empty cache.
    """
    from app.planner.predict import whatif as predicted

    async with deadline(TIMEOUT_S):
        current: Any = await redis.hkeys(keyspace["current"])
    now = len({key.rpartition(b":")[0] for key in current})
    sizes = sorted({now, num_workers or now} - {0})
    forecasts = await predicted(redis, keyspace, sizes, policy or "") if sizes else []
    if not any(one.requests for one in forecasts):
        await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
        raise click.ClickException("no decision of the last minutes is kept")
    head = ("workers", "requests", "within the SLO", "p99 TTFT, s", "from cache")
    rows = [
        (
            f"{one.size} (now)" if one.size == now else str(one.size),
            one.requests,
            f"{one.attainment:.1%}",
            f"{one.ttft_p99_s:.2f}",
            f"{one.hit_rate:.1%}",
        )
        for one in forecasts
    ]
    return CommandAnswer([asdict(one) for one in forecasts], text_table(head, rows))
