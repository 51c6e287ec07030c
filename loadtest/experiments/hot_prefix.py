"""A prefix that one worker holds and many ask for at once, in virtual time.

    python -m loadtest.experiments.hot_prefix

Rows: without transfers, and by links over which the prefix spreads. Medians over seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from app.options import COUNT, FACTOR
from app.policy.transfer import TransferKind
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.profiles import Link
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.command import option
from loadtest.experiment import Rows, experiment, measured
from loadtest.virtual import outcome_of

OUTPUT_TOKENS = 100


def play(
    setting: Setting,
    prefix_tokens: int,
    own_tokens: int,
    requests: int,
    within_s: float,
    seed: int,
) -> Mapping[str, Any]:
    """Ask for a prefix that the first worker alone holds, evenly within `within_s`; each request
    has some tokens of its own behind it."""
    fleet, rng = SimFleet("latency", replace(setting, seed=seed)), np.random.default_rng(seed)
    answers: list[SimAnswer] = []

    def tokens(number: int) -> list[int]:
        ids: list[int] = rng.integers(2**31, size=number).tolist()
        return ids

    def ask(prompt: list[int], name: str) -> SimRequest:
        size = setting.block_size
        return SimRequest.from_tokens(name, prompt, OUTPUT_TOKENS, block_size=size)

    prefix = tokens(prefix_tokens)
    fleet.warm(0, ask(prefix, "held"))

    def come(asked: SimRequest, _: float) -> None:
        fleet.ask(asked, lambda answer, _: answers.append(answer))

    for n in range(requests):
        asked = ask([*prefix, *tokens(own_tokens)], f"r{n}")
        fleet.at(within_s * n / requests, partial(come, asked))
    fleet.run()
    kinds = Counter(answer.kind for answer in answers)
    return measured(map(outcome_of, answers), setting.profiles[0]) | {
        "fetched": kinds[TransferKind.FETCH],
        "split": kinds[TransferKind.SPLIT],
    }


def rows(num_workers: int, links_gbit: tuple[float, ...], **crowd: Any) -> Rows:
    links = {"no transfers": None} | {f"{g:g} Gbit/s": Link(g * 1e9 / 8) for g in links_gbit}
    return {
        "": {
            name: lambda seed, link=link: play(Setting(num_workers, link=link), seed=seed, **crowd)
            for name, link in links.items()
        }
    }


main = experiment(
    rows,
    (
        ("TTFT mean, s", "ttft_mean_s", "{:.2f}"),
        ("p99", "ttft_p99_s", "{:.2f}"),
        ("whole request, s", "request_mean_s", "{:.2f}"),
        ("fetched", "fetched", "{:.0f}"),
        ("split", "split", "{:.0f}"),
    ),
    option("--workers num_workers", 8),
    option("--prefix-tokens", 8192),
    option("--own-tokens", 256, "Of each request's prompt.", COUNT),
    option("--requests", 200),
    option("--within-s", 2.0, kind=FACTOR),
    option("--link-gbit links_gbit", (100.0, 200.0, 400.0), "Of KV.", FACTOR, several=True),
    seeds=5,
    middle=np.median,
)

if __name__ == "__main__":
    main()
