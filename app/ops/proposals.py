"""`kvroute planner explain`: what was proposed for a fleet, from what, and why."""

from __future__ import annotations

from typing import Any

import click

from app.core.keys import Keyspace
from app.ops.terminal import TIMEOUT_S, CommandAnswer, answering, text_table
from app.options import POSITIVE, Command
from app.state import planner
from app.state.client import RedisClient
from app.state.connect import deadline


@click.command(cls=Command)
@click.option("--last", default=10, show_default=True, type=POSITIVE, help="Proposals to show.")
@answering
async def explain(redis: RedisClient, keyspace: Keyspace, last: int) -> CommandAnswer:
    """Show the last proposals of the planner, and what they were made from, the newest first."""
    proposals = await planner.proposals(redis, keyspace, last)
    if not proposals:
        error = click.ClickException(f"no planner has proposed anything in {keyspace.namespace!r}")
        return CommandAnswer([], [], error)
    async with deadline(TIMEOUT_S):
        now_s, _ = await redis.time()
    ages = [f"{max(0, round(now_s - proposal['at_s']))} s" for proposal in proposals]
    head = ("ago", "policy", "workers", "desired", "reason", "leaves", "from")
    lines = text_table(head, [(age, *_row(one)) for age, one in zip(ages, proposals, strict=True)])
    rows = [
        (
            age,
            _pools(prediction, "pools") or prediction["size"],
            prediction["requests"],
            f"{prediction['attainment']:.1%}",
            f"{prediction['ttft_p99_s']:.2f}",
            f"{prediction['hit_rate']:.1%}",
        )
        for age, proposal in zip(ages, proposals, strict=True)
        for prediction in proposal.get("candidates", ())
    ]
    if rows:
        titles = ("ago", "with workers", "requests", "within the SLO", "p99 TTFT, s", "from cache")
        lines += ["", "What the recorded decisions would have come to:", ""]
        lines += text_table(titles, rows)
    return CommandAnswer(proposals, lines)


def _row(proposal: dict[str, Any]) -> tuple[Any, ...]:
    inputs = " ".join(f"{name}={value:.3g}" for name, value in proposal["inputs"].items())
    return (
        proposal["policy"],
        _pools(proposal, "pools") or proposal["size"],
        _pools(proposal, "desired_pools") or proposal["desired"],
        proposal["reason"],
        proposal["victim"] or "",
        inputs,
    )


def _pools(of: dict[str, Any], name: str) -> str:
    """Returns a text such as 2p6d, or "" if the workers have no roles."""
    pools = of.get(name)
    return f"{pools['prefill']}p{pools['decode']}d" if pools else ""
