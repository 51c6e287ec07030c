"""What one key feels of another that floods the fleet, in virtual time.

    python -m loadtest.experiments.two_keys

The quiet key asks for a prompt of 1,500 words (2,000 tokens), waits for its answer and pauses,
first alone, then beside a key that asks for ten such prompts a second and worker, of which each
computes six. `times`: the median first token beside the flood over that alone. `a second`: answers
that the flood got. `wait above`: --wait-above-s of routers. `loadtest.bench_keys` plays it with
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from app.options import FACTOR, PROCESSES
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.command import option
from loadtest.experiment import Rows, experiment

TOKENS = 2000
OUTPUT_TOKENS = 16
FLOOD_PER_S = 10.0
PAUSE_S = 0.5
"""Mean pause of the quiet key."""
BEGINS_S = 3.0
COLUMNS = (
    ("alone, s", "alone_s", "{:.3f}"),
    ("beside, s", "beside_s", "{:.3f}"),
    ("times", "times", "{:.2f}"),
    ("p99, s", "p99_s", "{:.2f}"),
    ("a second", "per_s", "{:.1f}"),
)


class Night:
    """Both keys, or the quiet one alone. firsts_s: seconds to its first tokens. flood_ends_s: when
    answers of the other ended."""

    def __init__(self, setting: Setting, lasts_s: float, *, floods: bool) -> None:
        self._fleet = SimFleet("latency", setting)
        self._rng = np.random.default_rng(setting.seed)
        self._lasts_s, self._block_size = lasts_s, setting.block_size
        self._flood_s = 1 / (FLOOD_PER_S * setting.num_workers)
        self._asked = 0
        self.firsts_s: list[float] = []
        self.flood_ends_s: list[float] = []
        self._fleet.at(BEGINS_S, self._ask)
        if floods:
            self._fleet.at(0.0, self._flood)
        self._fleet.run()

    def _request(self, tenant: str) -> SimRequest:
        self._asked += 1
        prompt = self._rng.integers(1, 30_000, TOKENS)
        made = SimRequest.from_tokens(
            str(self._asked), prompt.tolist(), OUTPUT_TOKENS, block_size=self._block_size
        )
        return replace(made, tenant=tenant)

    def _ask(self, now_s: float) -> None:
        if now_s < self._lasts_s:
            self._fleet.ask(self._request("quiet"), self._answered)

    def _answered(self, answer: SimAnswer, now_s: float) -> None:
        if answer.first_token_s is not None:
            self.firsts_s.append(answer.first_token_s - answer.arrival_s)
        self._fleet.at(now_s + self._rng.exponential(PAUSE_S), self._ask)

    def _flood(self, now_s: float) -> None:
        if now_s < self._lasts_s:
            ends_s = self.flood_ends_s
            self._fleet.ask(self._request("flood"), lambda _, end_s: ends_s.append(end_s))
            self._fleet.at(now_s + self._rng.exponential(self._flood_s), self._flood)


def play(workers: int, above_s: float | None, lasts_s: float, seed: int) -> Mapping[str, Any]:
    setting = Setting(
        profiles=(PROFILES["70b-4xh100"],),
        num_workers=workers,
        block_size=64,
        wait_above_s=above_s,
        seed=seed,
    )
    alone = Night(setting, lasts_s, floods=False).firsts_s
    beside = Night(setting, lasts_s, floods=True)
    return {
        "alone_s": float(np.median(alone)),
        "beside_s": float(np.median(beside.firsts_s)),
        "times": float(np.median(beside.firsts_s) / np.median(alone)),
        "p99_s": float(np.percentile(beside.firsts_s, 99)),
        "per_s": sum(end_s < lasts_s for end_s in beside.flood_ends_s) / lasts_s,
    }


def rows(counts: Sequence[int], above: Sequence[float], lasts_s: float) -> Rows:
    ways: dict[str, float | None] = {"no line": None} | {f"{s:g}": s for s in above}
    return {
        "": {
            f"{n} | {way}": partial(play, n, s, lasts_s) for n in counts for way, s in ways.items()
        }
    }


main = experiment(
    rows,
    COLUMNS,
    option("--workers counts", (1, 2, 4), kind=PROCESSES, several=True),
    option("--wait-above-s above", (1.0, 0.2, 0.02), kind=FACTOR, several=True),
    option("--lasts-s", 60.0, "Seconds of each.", FACTOR),
    labels="workers | wait above, s",
    seeds=3,
)

if __name__ == "__main__":
    main()
