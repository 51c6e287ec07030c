"""Made-up sessions for comparisons, as a trace in the format of loadtest/data/README.md.

    python -m loadtest.sessions quiet > quiet.jsonl

Half an hour each: `shared` are chats with one system prompt, `quiet` few and long ones, `mixed`
agents with quick turns beside long documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import orjson

from loadtest.command import Command

BLOCK_TOKENS = 256
SPAN_S = 1800.0
MOST_TURNS = 40
APART = 50_000_000
"""Between the blocks of two kinds of sessions."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """One kind of them. Lengths are medians of log-normal distributions, and turns a mean."""

    seed: int
    number: int
    shared_blocks: int
    turns: float
    first_tokens: int
    later_tokens: int
    output_tokens: int
    think_s: float
    first_block: int = 0

    def made(self) -> Iterator[tuple[float, list[dict[str, Any]]]]:
        """When each begins, and its turns."""
        rng = np.random.default_rng(self.seed)
        shared = [self.first_block + block for block in range(self.shared_blocks)]
        block = self.first_block + 10_000
        for start_s in np.sort(rng.uniform(0, SPAN_S, self.number)).tolist():
            turns: list[dict[str, Any]] = []
            tokens = len(shared) * BLOCK_TOKENS + _drawn(rng, self.first_tokens, 0.8)
            held = 0
            for turn in range(min(1 + int(rng.geometric(1 / self.turns)), MOST_TURNS)):
                output = max(8, _drawn(rng, self.output_tokens, 0.6))
                new = tokens // BLOCK_TOKENS - max(held, len(shared))
                ids = [*([] if turn else shared), *range(block, block + new)]
                block += new
                one = {"input_length": tokens, "output_length": output, "keep": held}
                one["hash_ids"] = ids  # type: ignore[assignment]
                if turn:
                    one["think_ms"] = round(1000 * rng.lognormal(np.log(self.think_s), 0.7))
                turns.append(one)
                held = tokens // BLOCK_TOKENS
                tokens += output + _drawn(rng, self.later_tokens, 0.8)
            yield start_s, turns


def _drawn(rng: np.random.Generator, median: float, sigma: float) -> int:
    return int(rng.lognormal(np.log(median), sigma))


TRACES = {
    "shared": (Sessions(1, 900, 8, 4, 1500, 400, 300, 20),),
    "quiet": (Sessions(2, 60, 8, 8, 6000, 3000, 128, 25),),
    "mixed": (
        Sessions(3, 300, 16, 10, 4000, 1200, 150, 4),
        Sessions(4, 300, 2, 2, 24_000, 600, 500, 30, first_block=APART),
    ),
}


@click.command(cls=Command)
@click.argument("name", type=click.Choice(list(TRACES)))
def main(name: str) -> None:
    """Print the trace NAME."""
    sessions = sorted(
        (made for kind in TRACES[name] for made in kind.made()), key=lambda made: made[0]
    )
    for number, (start_s, turns) in enumerate(sessions):
        for turn, asked in enumerate(turns):
            row = {"session": number, "turn": turn, **asked}
            if not turn:
                row["timestamp"] = round(1000 * start_s)
            click.echo(orjson.dumps(row))


if __name__ == "__main__":
    main()
