"""Where the reuse of prompts is lost, in what all replicas say of the last hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import click
from typing_extensions import TypedDict

from app.core.keys import Keyspace
from app.core.sketch import ERROR
from app.ops import namespaces
from app.ops.terminal import COMMON, json_option, json_text, on_redis, say
from app.options import Command
from app.policy.decision import Step
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
@COMMON
@json_option
@on_redis
async def command(redis: RedisClient, keyspace: Keyspace, as_json: bool) -> None:
    """Show how much of the prompts of the last hour was reused, and where the rest was lost."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    said = await replicas.present(redis, keyspace)
    shown = together(said.values())
    if as_json:
        say(json_text(shown))
    elif ALL in shown["models"]:
        whole = shown["models"][ALL]
        for model, steps in shown["models"].items():
            if model == ALL or steps != whole:
                say(*_picture(model, steps))
    else:
        say(f"no prompt was routed in the last hour by the {len(said)} replicas that tell")


def _picture(model: str, steps: Mapping[str, Any]) -> Iterable[str]:
    """A bar for each step, and its losses behind it."""
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
