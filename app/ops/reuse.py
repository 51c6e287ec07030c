"""`kvroute inspect funnel`: where reuse of prompts is lost; and the prefixes that are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click
from typing_extensions import TypedDict

from app.core.chains import positions
from app.core.keys import Keyspace
from app.core.sketch import ERROR
from app.core.types import SequenceHash
from app.ops import namespaces
from app.ops.terminal import CommandAnswer, answering
from app.options import Command
from app.policy.decision import Step
from app.policy.record import DecisionSummary
from app.policy.reuse import PROMPT, UNFORESEEN
from app.state import replicas
from app.state.client import RedisClient

ALL = ""
WIDTH = 40
TEXTS = {
    Step.SEEN: "asked before",
    Step.HELD: "held by a worker",
    Step.BEST: "by one with room",
    Step.CHOSEN: "by the chosen one",
    Step.USED: "used by its engine",
}


class Loss(TypedDict):
    """Tokens that were lost for one cause before the step `to`."""

    to: str
    cause: str
    tokens: int


class ReuseSteps(TypedDict):
    """Tokens that were asked for, asked for before within an hour, held by any worker, by the one
    that held most, by the one chosen, and used by its engine. unforeseen: cached, but not known."""

    prompt_tokens: int
    seen: int
    held: int
    best: int
    chosen: int
    used: int
    unforeseen: int
    losses: list[Loss]


class ReuseShown(TypedDict):
    """Steps by model; ALL: of all models. seen_error: how far `seen` may be off, 0-1."""

    models: dict[str, ReuseSteps]
    seen_error: float


def together(said: Iterable[Mapping[str, Any]]) -> ReuseShown:
    """Returns the sums of what replicas tell; what makes no sense counts for nothing."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for figures in said:
        for model, step, cause, tokens in _rows(figures):
            for name in {model, ALL}:
                counts.setdefault(name, Counter())[step, cause] += tokens
    return {
        "models": {model: _steps(counts[model]) for model in sorted(counts)},
        "seen_error": ERROR,
    }


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    try:
        return [(str(m), str(s), str(c), int(n)) for m, s, c, n in figures["reuse"]]
    except (LookupError, TypeError, ValueError):
        return []


def _steps(counts: Counter[tuple[str, str]]) -> ReuseSteps:
    losses: list[Loss] = []
    left = {PROMPT: counts[PROMPT, ""]}
    for before, step in pairwise((PROMPT, *Step)):
        causes = [(cause, n) for (at, cause), n in counts.items() if at == step]
        for cause, tokens in sorted(causes, key=lambda one: -one[1]):
            losses.append({"to": step, "cause": cause, "tokens": tokens})
        left[step] = left[before] - sum(tokens for _, tokens in causes)
    return {
        "prompt_tokens": left[PROMPT],
        "seen": left[Step.SEEN],
        "held": left[Step.HELD],
        "best": left[Step.BEST],
        "chosen": left[Step.CHOSEN],
        "used": left[Step.USED],
        "unforeseen": counts[UNFORESEEN, ""],
        "losses": losses,
    }


@click.command("funnel", cls=Command)
@answering
async def command(redis: RedisClient, keyspace: Keyspace) -> CommandAnswer:
    """Show how much of the prompts of the last hour was reused, and where the rest was lost."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    said = await replicas.present(redis, keyspace)
    shown = together(said.values())
    whole = shown["models"].get(ALL)
    lines = [
        line
        for model, steps in shown["models"].items()
        if model == ALL or steps != whole
        for line in _picture(model, steps)
    ]
    nothing = f"no prompt was routed in the last hour by the {len(said)} replicas that tell"
    return CommandAnswer(shown, lines or [nothing])


def _picture(model: str, steps: Mapping[str, Any]) -> Iterator[str]:
    """Yields a bar for each step, with the losses before it."""
    prompt = steps["prompt_tokens"]
    yield f"{model or 'all models'}: {prompt:,} prompt tokens"
    for step, text in TEXTS.items():
        share = steps[step] / prompt if prompt else 0.0
        lost = ", ".join(
            f"{loss['cause']} {loss['tokens'] / prompt:.1%}"
            for loss in steps["losses"]
            if loss["to"] == step
        )
        bar = "█" * round(WIDTH * share)
        yield f"  {text:18} {share:6.1%} {bar:{WIDTH}} {lost and f'lost: {lost}'}".rstrip()
    if steps["unforeseen"]:
        yield f"  {'cached, not known':18} {steps['unforeseen'] / prompt:6.1%}"


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    """A prefix of prompts. block: its last one. requests: how many had all of the prefix."""

    block: SequenceHash
    num_blocks: int
    requests: int


def usages(records: Iterable[DecisionSummary]) -> Iterator[PrefixUsage]:
    """Yields how often prefixes were asked for, the most frequent first, among equals the longest.

    A prefix is left out if a longer recorded one with as many requests continues it. So the system
    prompt is listed, but not each of its blocks.
    """
    counts: dict[SequenceHash, int] = {}
    place: dict[SequenceHash, int] = {}
    continued: dict[SequenceHash, int] = {}
    for record in records:
        at = positions(record.full_blocks)
        for block, position, child in zip(
            record.blocks, at, [*record.blocks[1:], None], strict=False
        ):
            counts[block] = counts.get(block, 0) + 1
            place[block] = position
            if child is not None:
                # If all requests go on with the same child, it is also the one seen last.
                continued[block] = counts.get(child, 0) + 1
    most_asked = [
        PrefixUsage(block, place[block], count)
        for block, count in counts.items()
        if continued.get(block, 0) < count
    ]
    yield from sorted(most_asked, key=lambda usage: (-usage.requests, -usage.num_blocks))
