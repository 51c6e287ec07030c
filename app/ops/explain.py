"""`kvroute explain` and `whatif`: why requests went where they went, and where else they might."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import msgspec
import numpy as np

from app.core.errors import RoutingError
from app.core.keys import Keyspace
from app.ops import namespaces
from app.ops.terminal import TIMEOUT_S, Answer, answering, counted, text_table
from app.options import POLICY, POSITIVE, PROCESSES, Command, Number
from app.policy.choose import choose
from app.policy.cost import (
    POLICIES,
    CostFunction,
    blocks,
    predicted_prefill_s,
    two_at_random,
)
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
async def explain(redis: RedisClient, keyspace: Keyspace, request_id: str) -> Answer:
    """Explain why a request went where it went, while the decision is kept."""
    record = await find(redis, keyspace, request_id)
    if record is None:
        await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
        raise click.ClickException(f"no decision about {request_id!r} is kept (yet, or any longer)")
    return Answer(explanation(record), list(_lines(record)))


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
@click.option("--policy", type=POLICY, help="Policy to score with.")
@click.option(
    "--workers",
    "num_workers",
    type=PROCESSES,
    help="Instead, replay the decisions of the last minutes in a fleet of that size.",
)
@click.option(
    "--prefill-weight",
    type=Number(0, 1000),
    help="Prefill weight for `blocks`, instead of 1.",
)
@click.option("--last", default=1000, show_default=True, type=POSITIVE, help="Decisions to score.")
@answering
async def whatif(
    redis: RedisClient,
    keyspace: Keyspace,
    policy: str | None,
    num_workers: int | None,
    prefill_weight: float | None,
    last: int,
) -> Answer:
    """Score the last decisions again with another policy, each on its own.

    Only decisions whose candidates are all kept are scored: see --details-per-s. How other choices
    would have changed the load for later decisions is not simulated. Another worker is no change if
    both policies give the two workers the same cost, or if power_of_two, scored against itself,
    draws another pair. No temperature is applied: a choice that was not the cheapest because of one
    counts as changed. What failures cost, and slow or silent workers, counts for the policy that
    decided alone, as does the wait for a prefix that is computed.

    With --workers, the last decisions are played in virtual time, by the policy given or `latency`,
    in a fleet of that size and in today's: each worker as fast as it was found to be.
    """
    if num_workers is not None:
        return await _with_workers(redis, keyspace, num_workers, policy or "latency")
    if policy is None:
        raise click.UsageError("needs --policy or --workers")
    if prefill_weight is not None and policy != "blocks":
        raise click.BadParameter(
            "only the policy blocks has a prefill weight", param_hint="--prefill-weight"
        )
    cost = None if prefill_weight is None else partial(blocks, prefill_weight=prefill_weight)
    rng = np.random.default_rng(0)
    comparison = Comparison()
    async for record in decisions.read(redis, keyspace):
        if record.seen is None:
            continue
        comparison.add(record, policy, cost, rng)
        if comparison.decisions == last:
            break
    if not comparison.decisions:
        await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
        raise click.ClickException("no decision is kept with its candidates: see --details-per-s")
    means = comparison.means()
    rows = [
        (name, _short(mean["were"]), _short(mean["would be"]))
        for name, mean in means["mean"].items()
    ]
    compared = counted(comparison.decisions, "decision")
    lines = [
        f"{compared}; {comparison.changed:,} would have gone elsewhere",
        *text_table(("mean", "were", "would be"), rows),
    ]
    return Answer(means, lines)


async def _with_workers(
    redis: RedisClient, keyspace: Keyspace, workers: int, policy: str
) -> Answer:
    from app.planner.predict import whatif as predicted

    now = await _num_workers_now(redis, keyspace)
    forecasts = await predicted(redis, keyspace, sorted({now, workers} - {0}), policy)
    if not forecasts[0].requests:
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
    return Answer([asdict(one) for one in forecasts], text_table(head, rows))


async def _num_workers_now(redis: RedisClient, keyspace: Keyspace) -> int:
    """Returns the number of worker processes."""
    async with deadline(TIMEOUT_S):
        current: Any = await redis.hkeys(keyspace["current"])
    return len({key.rpartition(b":")[0] for key in current})


class Comparison:
    """Choices as they were, and as another policy would have made them."""

    def __init__(self) -> None:
        self.decisions = 0
        self.changed = 0
        self._sums = {
            name: [0.0, 0.0]
            for name in ("overlap blocks", "predicted start, s", "requests on the worker")
        }

    def add(
        self,
        record: DecisionRecord,
        policy: str,
        cost: CostFunction | None,
        rng: np.random.Generator,
    ) -> None:
        seen = record.seen
        assert seen is not None
        eligible = np.array(seen.eligible, dtype=bool)
        try:
            choice = choose(
                policy,
                seen.candidates,
                record.size,
                eligible=eligible,
                rng=rng,
                nth=self.decisions,
                cost=seen.priced(
                    cost or POLICIES[policy].cost,
                    again=cost is None and policy == record.policy,
                ),
            )
            was = seen.workers.index(record.worker)
            recorded = record.costs
        except (RoutingError, ValueError, KeyError):
            return
        would_be = choice.index
        alike = all(costs.cost[was] == costs.cost[would_be] for costs in (recorded, choice.costs))
        if alike or (policy == record.policy and POLICIES[policy].narrow is two_at_random):
            # Neither policy tells the two apart, or which pair was compared is not recorded: it is
            # chance that another was drawn this time.
            would_be = was
        c = seen.candidates
        start = c.prefill_s + predicted_prefill_s(c, record.size)
        for name, values in zip(self._sums, (c.overlap, start, c.active_requests), strict=True):
            self._sums[name][0] += float(values[was])
            self._sums[name][1] += float(values[would_be])
        self.decisions += 1
        self.changed += was != would_be

    def means(self) -> dict[str, Any]:
        return {
            "decisions": self.decisions,
            "changed": self.changed,
            "mean": {
                name: {"were": were / self.decisions, "would be": would / self.decisions}
                for name, (were, would) in self._sums.items()
            },
        }
