"""How well policies use a fleet's memory while little happens at once, in virtual time.

    python -m loadtest.experiments.quiet --policy blocks --policy latency

Agents that work one after another, and everyone's first trial, look like this: no queue tells the
workers apart. `computed`: prompt tokens that were not cached, over those that one worker with the
memory of all would compute (`loadtest.ideal`), with the shared prompt once on each worker. `least`:
requests of the worker that got fewest, over the mean. After a third of the requests another worker
may join. `joined`: requests that it got within a minute, over its fair share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import click
import numpy as np

from app.policy.policies import POLICIES
from app.simulation.flights import SimAnswer
from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from loadtest.client import Outcome
from loadtest.command import option
from loadtest.experiment import Rows, experiment
from loadtest.ideal import ideal
from loadtest.traces import Session, Trace, TraceRequest
from loadtest.virtual import Simulation, TracePrompts

BLOCK_TOKENS = 256
TURNS = 6
OUTPUT_TOKENS = 128
WORKING_SET = 0.8
MOST = 400
JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations whose prompts grow by `turn_tokens` a turn, after a shared system prompt."""

    shared_tokens: int
    turn_tokens: int
    conversations: int = 0
    """0: as many as fill 80 % of the memory of all workers, and at most MOST."""
    joins: bool = False
    """Whether a worker joins after a third of the requests."""

    @property
    def name(self) -> str:
        number = f"{self.conversations or 'fill'}{', one joins' * self.joins}"
        return f"{self.shared_tokens:,} | {self.turn_tokens:,} | {number}"

    def trace(self, pool_tokens: int, seed: int) -> Trace:
        """pool_tokens: of all workers together."""
        rng = np.random.default_rng(seed)
        own_tokens = pool_tokens * WORKING_SET - self.shared_tokens
        number = self.conversations or min(MOST, round(own_tokens / (TURNS * self.turn_tokens)))
        order = np.repeat(np.arange(number), TURNS)
        rng.shuffle(order)
        return Trace("quiet", (self._session(order.tolist()),))

    def _session(self, order: list[int]) -> Session:
        """Turns in this order of conversations, each a second after the answer to the last one."""
        asked = dict.fromkeys(order, 0)
        turns: list[TraceRequest] = []
        for place in order:
            asked[place] += 1
            turns.append(self._turn(place, asked[place], 1.0 if turns else 0.0))
        return Session(0.0, tuple(turns))

    def _turn(self, place: int, turn: int, think_s: float) -> TraceRequest:
        shared, each = self.shared_tokens // BLOCK_TOKENS, self.turn_tokens // BLOCK_TOKENS
        first = shared + place * TURNS * each
        blocks = (*range(shared), *range(first, first + turn * each))
        return TraceRequest(
            index=place * TURNS + turn - 1,
            input_tokens=len(blocks) * BLOCK_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            think_s=think_s,
        )


TRAFFIC = (
    Traffic(256, 4096),
    Traffic(2048, 1536),
    *(Traffic(shared, turn) for shared in (8192, 20480, 32768) for turn in (512, 1536)),
    *(Traffic(8192, 1536, number) for number in (24, 64, 200)),
    Traffic(256, 1536, joins=True),
    Traffic(8192, 1536, joins=True),
    Traffic(20480, 1536, joins=True),
)


def play(traffic: Traffic, policy: str, setting: Setting, seed: int) -> Mapping[str, Any]:
    setting = replace(setting, seed=seed)
    workers = setting.num_workers
    trace = traffic.trace(workers * setting.profiles[0].kv_pool_tokens, seed)
    prompts = TracePrompts(setting.block_size)
    simulation = Simulation(policy, setting, prompts)
    answered, joined_s = 0, 0.0

    def note(_: SimAnswer) -> None:
        nonlocal answered, joined_s
        answered += 1
        if traffic.joins and answered == trace.num_requests // 3:
            joined_s = simulation.fleet.now_s
            simulation.fleet.join(setting.profiles[0])

    simulation.on_answer = note
    outcomes = simulation.run(trace)
    requests = [sum(o.worker == f"w{i}:0" for o in outcomes) for i in range(workers)]
    until_s = joined_s + JOIN_S
    after = [o.worker == f"w{workers}:0" for o in outcomes if joined_s < o.arrival_s <= until_s]
    possible = _computed(ideal(setting, trace, prompts)) + traffic.shared_tokens * (workers - 1)
    return {
        "computed": _computed(outcomes) / possible,
        "least": min(requests) / fmean(requests),
        "ttft_s": fmean(o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s),
        "joined": sum(after) / len(after) * (workers + 1) if traffic.joins else None,
    }


def _computed(outcomes: Iterable[Outcome]) -> int:
    return sum(outcome.prompt_tokens - outcome.cached_tokens for outcome in outcomes)


def rows(policies: Sequence[str]) -> Rows:
    setting = Setting(profiles=(PROFILES["70b-4xh100"],), block_size=64)
    return {
        "": {f"{t.name} | `{p}`": partial(play, t, p, setting) for t in TRAFFIC for p in policies}
    }


main = experiment(
    rows,
    (
        ("computed", "computed", "{:.2f}"),
        ("least", "least", "{:.2f}"),
        ("TTFT, s", "ttft_s", "{:.3f}"),
        ("joined", "joined", "{:.2f}"),
    ),
    option(
        "--policy policies",
        ("least_loaded", "blocks", "latency"),
        "Policy to play.",
        click.Choice(list(POLICIES)),
        several=True,
    ),
    labels="shared | a turn | conversations | policy",
)

if __name__ == "__main__":
    main()
