"""A prefix that one worker holds and many ask for at once, in virtual time.

    python -m loadtest.hot_prefix

Rows: without transfers, and by links over which the prefix spreads. Medians over seeds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np

from app.options import COUNT, FACTOR
from app.policy.transfer import TransferKind
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.link import Link
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.command import Command, json_option, option, save

OUTPUT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Crowd:
    """requests: how many ask for the prefix, evenly within `within_s`, each with some tokens of its
    own behind it."""

    prefix_tokens: int
    own_tokens: int
    requests: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How long the crowd waited, and how many of its requests had KV from another worker."""

    ttft_mean_s: float
    ttft_p99_s: float
    request_mean_s: float
    fetched: int
    split: int


def simulate(setting: Setting, crowd: Crowd) -> Spread:
    """Ask for a prefix that the first worker alone holds."""
    fleet, rng = SimFleet("latency", setting), np.random.default_rng(setting.seed)
    answers: list[SimAnswer] = []

    def tokens(number: int) -> list[int]:
        ids: list[int] = rng.integers(2**31, size=number).tolist()
        return ids

    def ask(prompt: list[int], name: str) -> SimRequest:
        size = setting.block_size
        return SimRequest.from_tokens(name, prompt, OUTPUT_TOKENS, block_size=size)

    prefix = tokens(crowd.prefix_tokens)
    fleet.warm(0, ask(prefix, "held"))

    def come(asked: SimRequest, _: float) -> None:
        fleet.ask(asked, lambda answer, _: answers.append(answer))

    for n in range(crowd.requests):
        asked = ask([*prefix, *tokens(crowd.own_tokens)], f"r{n}")
        fleet.at(crowd.within_s * n / crowd.requests, partial(come, asked))
    fleet.run()
    firsts_s = [a.first_token_s - a.arrival_s for a in answers if a.first_token_s is not None]
    wholes_s = [a.end_s - a.arrival_s for a in answers if a.end_s is not None]
    kinds = Counter(answer.kind for answer in answers)
    return Spread(
        float(np.mean(firsts_s)),
        float(np.percentile(firsts_s, 99)),
        float(np.mean(wholes_s)),
        kinds[TransferKind.FETCH],
        kinds[TransferKind.SPLIT],
    )


@click.command(cls=Command)
@option("--workers num_workers", 8)
@option("--prefix-tokens", 8192)
@option("--own-tokens", 256, "Of each request's prompt.", COUNT)
@option("--requests", 200)
@option("--within-s", 2.0, kind=FACTOR)
@option(
    "--link-gbit links_gbit",
    (100.0, 200.0, 400.0),
    "Gbit/s at which KV leaves a worker.",
    FACTOR,
    several=True,
)
@option("--seeds", 5, "Runs of each row.")
@json_option
def main(
    num_workers: int,
    prefix_tokens: int,
    own_tokens: int,
    requests: int,
    within_s: float,
    links_gbit: tuple[float, ...],
    seeds: int,
    json_file: Path | None,
) -> None:
    """Compare the waits of a crowd with and without transfers."""
    crowd = Crowd(prefix_tokens, own_tokens, requests, within_s)
    links = {f"{gbit:g} Gbit/s": Link(gbit * 1e9 / 8) for gbit in links_gbit}
    result = {}
    click.echo(
        "| | TTFT mean, s | p99 | whole request, s | fetched | split |\n|---|---|---|---|---|---|"
    )
    for name, link in ({"no transfers": None} | links).items():
        runs = [
            simulate(Setting(num_workers, link=link, seed=seed), crowd) for seed in range(seeds)
        ]
        result[name] = [asdict(one) for one in runs]
        ttft_s, p99_s, whole_s, *kinds = np.median([tuple(one.values()) for one in result[name]], 0)
        numbers = " | ".join(f"{one:.0f}" for one in kinds)
        click.echo(f"| {name} | {ttft_s:.2f} | {p99_s:.2f} | {whole_s:.2f} | {numbers} |")
    save(result, json_file)


if __name__ == "__main__":
    main()
