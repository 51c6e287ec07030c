"""Made-up traffic that strains one thing each, as a trace in the format of loadtest/data/README.md.

    python -m loadtest.traffic prefixes > prefixes.jsonl

Requests on their own. `prefixes`: all begin with one of 24 long prefixes. `one-offs`: very long
prompts amid chats. `jobs`: many at once beside chats. `tenants`: 200 system prompts, Zipf, in
bursts. `reasoning`: a quarter of the answers is very long. `sub-agents`: eight at once on a prompt
that is new. `crowd`: hundreds within seconds on one, beside chats. `short`: short prompts, for a
small model.

Sessions of half an hour. `mixed`: agents with quick turns beside long documents.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadtest.command import Command
from loadtest.traces import Trace, read_trace

BLOCK_TOKENS = 256
SPAN_S = 1800.0
MOST_TURNS = 40
APART = 50_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """group, shared_tokens: requests of a group begin with the same so many tokens."""

    at_s: float
    input_tokens: int
    output_tokens: int
    group: int = 0
    shared_tokens: int = 0
    priority: str = "normal"


def _arrivals(rng: np.random.Generator, per_s: float, number: int) -> list[float]:
    times: list[float] = np.cumsum(rng.exponential(1 / per_s, number)).tolist()
    return times


def _drawn(rng: np.random.Generator, median: float, sigma: float, most: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), 16, most))


def prefixes(rng: np.random.Generator) -> Iterator[Asked]:
    for at_s in _arrivals(rng, 10.0, 1500):
        yield Asked(at_s, 32_768 + 1024, 300, int(rng.integers(24)), 32_768)


def chats(rng: np.random.Generator, per_s: float, number: int) -> Iterator[Asked]:
    for at_s in _arrivals(rng, per_s, number):
        prompt, answer = _drawn(rng, 1500, 0.9, 16_000), _drawn(rng, 250, 0.7, 2000)
        yield Asked(at_s, 1024 + prompt, answer, int(rng.integers(4)), 1024)


def one_offs(rng: np.random.Generator) -> Iterator[Asked]:
    yield from chats(rng, 8.0, 1600)
    for at_s in _arrivals(rng, 0.15, 30):
        yield Asked(at_s, int(rng.integers(80_000, 120_000)), 400)


def jobs(rng: np.random.Generator) -> Iterator[Asked]:
    yield from chats(rng, 6.0, 1500)
    for at_s in (40.0, 130.0, 220.0):
        for _ in range(250):
            yield Asked(at_s, _drawn(rng, 3000, 0.5, 12_000), 300, priority="low")


def tenants(rng: np.random.Generator) -> Iterator[Asked]:
    shares = 1 / np.arange(1, 201)
    system = rng.integers(4, 40, 200) * BLOCK_TOKENS
    for at_s in _arrivals(rng, 1.6, 300):
        tenant = int(rng.choice(200, p=shares / shares.sum()))
        for n in range(int(rng.geometric(1 / 5))):
            own = int(min(500 * (1 + rng.pareto(1.5)), 40_000))
            answer = int(min(120 * (1 + rng.pareto(1.5)), 2000))
            first = int(system[tenant])
            yield Asked(at_s + n * 0.05, first + own, answer, tenant, first)


def reasoning(rng: np.random.Generator) -> Iterator[Asked]:
    for at_s in _arrivals(rng, 0.85, 400):
        is_long = rng.random() < 0.25
        answer = int(rng.integers(4000, 20_000)) if is_long else _drawn(rng, 300, 0.6, 2000)
        yield Asked(at_s, _drawn(rng, 2000, 0.8, 16_000), answer)


def sub_agents(rng: np.random.Generator) -> Iterator[Asked]:
    for group, at_s in enumerate(_arrivals(rng, 0.6, 150)):
        for _ in range(8):
            yield Asked(at_s, 12_288 + int(rng.integers(100, 600)), 200, group, 12_288)


def crowd(rng: np.random.Generator) -> Iterator[Asked]:
    yield from chats(rng, 8.0, 1200)
    for group, first_s in enumerate((50.0, 85.0, 120.0), start=10):
        for after_s in np.sort(rng.uniform(0.0, 2.0, 200)).tolist():
            tokens = 8192 + int(rng.integers(100, 600))
            yield Asked(first_s + after_s, tokens, 200, group, 8192, priority="low")


def short(rng: np.random.Generator) -> Iterator[Asked]:
    for at_s in _arrivals(rng, 400.0, 12_000):
        yield Asked(at_s, _drawn(rng, 330, 0.8, 4000), _drawn(rng, 200, 0.7, 1000))


TRAFFIC = {
    "prefixes": prefixes,
    "one-offs": one_offs,
    "jobs": jobs,
    "tenants": tenants,
    "reasoning": reasoning,
    "sub-agents": sub_agents,
    "crowd": crowd,
    "short": short,
}
PER_GROUP = 1000
"""Blocks that a group's requests may share."""


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
        rng = np.random.default_rng(self.seed)
        shared = [self.first_block + block for block in range(self.shared_blocks)]
        block = self.first_block + 10_000
        for start_s in np.sort(rng.uniform(0, SPAN_S, self.number)).tolist():
            turns: list[dict[str, Any]] = []
            tokens = len(shared) * BLOCK_TOKENS + _around(rng, self.first_tokens, 0.8)
            held = 0
            for turn in range(min(1 + int(rng.geometric(1 / self.turns)), MOST_TURNS)):
                output = max(8, _around(rng, self.output_tokens, 0.6))
                new = tokens // BLOCK_TOKENS - max(held, len(shared))
                ids = [*([] if turn else shared), *range(block, block + new)]
                block += new
                one = {"input_length": tokens, "output_length": output, "keep": held}
                one["hash_ids"] = ids  # type: ignore[assignment]
                if turn:
                    one["think_ms"] = round(1000 * rng.lognormal(np.log(self.think_s), 0.7))
                turns.append(one)
                held = tokens // BLOCK_TOKENS
                tokens += output + _around(rng, self.later_tokens, 0.8)
            yield start_s, turns


def _around(rng: np.random.Generator, median: float, sigma: float) -> int:
    return int(rng.lognormal(np.log(median), sigma))


SESSIONS = {
    "mixed": (
        Sessions(3, 300, 16, 10, 4000, 1200, 150, 4),
        Sessions(4, 300, 2, 2, 24_000, 600, 500, 30, first_block=APART),
    ),
}


def _requests(name: str) -> Iterator[dict[str, Any]]:
    asked = sorted(TRAFFIC[name](np.random.default_rng(1)), key=lambda one: one.at_s)
    for number, one in enumerate(asked):
        first = one.group * PER_GROUP
        shared = range(first, first + one.shared_tokens // BLOCK_TOKENS)
        yield {
            "session": number,
            "turn": 0,
            "keep": 0,
            "timestamp": round(1000 * one.at_s),
            "input_length": one.input_tokens,
            "output_length": one.output_tokens,
            "hash_ids": [*shared],
            "priority": one.priority,
        }


def _turns(name: str) -> Iterator[dict[str, Any]]:
    made = (one for kind in SESSIONS[name] for one in kind.made())
    for number, (start_s, turns) in enumerate(sorted(made, key=lambda one: one[0])):
        for turn, asked in enumerate(turns):
            row = {"session": number, "turn": turn, **asked}
            yield row if turn else row | {"timestamp": round(1000 * start_s)}


def lines(name: str) -> Iterator[bytes]:
    """The rows of the trace."""
    return map(orjson.dumps, _turns(name) if name in SESSIONS else _requests(name))


def made_trace(name: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.jsonl")
        path.write_bytes(b"\n".join(lines(name)))
        return read_trace(path)


@click.command(cls=Command)
@click.argument("name", type=click.Choice([*TRAFFIC, *SESSIONS]))
def main(name: str) -> None:
    """Print the trace NAME."""
    for line in lines(name):
        click.echo(line)


if __name__ == "__main__":
    main()
