"""Made-up traffic that strains one thing each, as a trace in the format of loadtest/data/README.md.

    python -m loadtest.traffic prefixes > prefixes.jsonl

Every request is on its own. `prefixes`: all begin with one of 24 long prefixes. `one-offs`: very
long prompts amid chats. `jobs`: many at once beside chats. `tenants`: 200 system prompts, Zipf, in
bursts. `reasoning`: a quarter of the answers is very long. `sub-agents`: eight at once on a prompt
that is new. `crowd`: hundreds within seconds on one, beside chats. `short`: short prompts, for a
small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np
import orjson

from loadtest.command import Command

BLOCK_TOKENS = 256


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


def lines(name: str) -> Iterator[bytes]:
    """The rows of the trace."""
    asked = sorted(TRAFFIC[name](np.random.default_rng(1)), key=lambda one: one.at_s)
    for number, one in enumerate(asked):
        first = one.group * PER_GROUP
        shared = range(first, first + one.shared_tokens // BLOCK_TOKENS)
        row = {
            "session": number,
            "turn": 0,
            "keep": 0,
            "timestamp": round(1000 * one.at_s),
            "input_length": one.input_tokens,
            "output_length": one.output_tokens,
            "hash_ids": [*shared],
            "priority": one.priority,
        }
        yield orjson.dumps(row)


@click.command(cls=Command)
@click.argument("name", type=click.Choice(list(TRAFFIC)))
def main(name: str) -> None:
    """Print the trace NAME."""
    for line in lines(name):
        click.echo(line)


if __name__ == "__main__":
    main()
