"""What one key feels of another that floods the fleet: real processes, with simulated engines.

    nice python -m loadtest.bench_keys

The keys are those of loadtest.experiments.two_keys, on two workers. With several replicas, the
flood comes to all of them but the one that the quiet key asks. Engines run in real time: a machine
without spare CPU makes everything late.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import numpy as np
import orjson

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.cluster import Cluster
from app.options import FACTOR, PROCESSES
from loadtest.command import option
from loadtest.door_client import JSON_TYPE
from loadtest.experiment import Rows, experiment
from loadtest.experiments.two_keys import COLUMNS, FLOOD_PER_S, OUTPUT_TOKENS, PAUSE_S, TOKENS

SETTLING_S = 3.0
TIMEOUT_S = 60.0


@dataclass
class Asker:
    """Requests of one key to replicas in turn. first_s: seconds to the first token of each."""

    session: aiohttp.ClientSession
    urls: Sequence[str]
    key: str
    rng: np.random.Generator
    first_s: list[float] = field(default_factory=list)
    per_s: float = 0.0
    answered: int = 0

    def __post_init__(self) -> None:
        self._turns = cycle(self.urls)
        self._headers = JSON_TYPE | {"authorization": f"Bearer {self.key}"}

    async def ask(self) -> None:
        body = orjson.dumps(
            {
                "model": "m",
                "prompt": self.rng.integers(1, 30_000, TOKENS).tolist(),
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
            }
        )
        began_s = time.perf_counter()
        url = f"{next(self._turns)}/v1/completions"
        async with self.session.post(url, data=body, headers=self._headers) as reply:
            if reply.status == 200:
                await reply.content.readany()
                self.first_s.append(time.perf_counter() - began_s)
                await reply.read()
                self.answered += 1
            elif reply.status != 429:
                raise click.ClickException(f"{reply.status}: {await reply.text()}")

    async def until_served(self, url: str) -> None:
        """Wait until a replica knows of the workers."""
        while True:
            async with self.session.get(f"{url}/v1/models", headers=self._headers) as reply:
                if (await reply.json())["data"]:
                    return
            await asyncio.sleep(0.2)

    async def one_by_one(self, lasts_s: float) -> float:
        """Ask for so long; returns the median seconds to a first token."""
        until_s, self.first_s = time.perf_counter() + lasts_s, []
        while time.perf_counter() < until_s:
            await self.ask()
            await asyncio.sleep(self.rng.exponential(PAUSE_S))
        return median(self.first_s)

    async def flood(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self.ask())
                await asyncio.sleep(self.rng.exponential(1 / self.per_s))


async def night(
    urls: Sequence[str], workers: int, lasts_s: float, seed: int
) -> Mapping[str, float]:
    """Returns the figures of the two keys."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        rng = np.random.default_rng(seed)
        quiet = Asker(session, urls[:1], "q", rng)
        flood = Asker(session, urls[1:] or urls, "f", rng, per_s=FLOOD_PER_S * workers)
        async with asyncio.timeout(TIMEOUT_S):
            for url in urls:
                await quiet.until_served(url)
        alone_s = await quiet.one_by_one(lasts_s)
        flooding = asyncio.create_task(flood.flood())
        await asyncio.sleep(SETTLING_S)
        answered = flood.answered
        began_s = time.perf_counter()
        beside_s = await quiet.one_by_one(lasts_s)
        per_s = (flood.answered - answered) / (time.perf_counter() - began_s)
        flooding.cancel()
        with suppress(asyncio.CancelledError):
            await flooding
    return {
        "alone_s": alone_s,
        "beside_s": beside_s,
        "times": beside_s / alone_s,
        "p99_s": float(np.percentile(quiet.first_s, 99)),
        "per_s": per_s,
    }


def play(
    replicas: int, workers: int, settings: Mapping[str, Any], lasts_s: float, seed: int
) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text("quiet q\nflood f\n")
        with Cluster(
            num_workers=workers,
            num_replicas=replicas,
            haproxy=False,
            router=RouterSettings(log_level="error", api_key_file=str(keys), **settings),
            worker=WorkerSettings(log_level="error", model_name="m"),
        ) as cluster:
            urls = [member.url for member in cluster.routers]
            return run(night(urls, workers, lasts_s, seed))


def rows(counts: Sequence[int], workers: int, above: Sequence[float], lasts_s: float) -> Rows:
    ways: dict[str, Mapping[str, Any]] = {f"{s:g}": {"wait_above_s": s} for s in above}
    return {
        "": {
            f"{n} | {name}": partial(play, n, workers, settings, lasts_s)
            for n in counts
            for name, settings in ({"no line": {"wait_queue": 0}} | ways).items()
        }
    }


main = experiment(
    rows,
    COLUMNS,
    option("--replicas counts", (1, 3), kind=PROCESSES, several=True),
    option("--workers", 2, kind=PROCESSES),
    option("--wait-above-s above", (1.0, 0.02), kind=FACTOR, several=True),
    option("--lasts-s", 20.0, "Seconds alone, and beside the flood.", FACTOR),
    labels="replicas | wait above, s",
    middle=median,
    one_by_one=True,
)

if __name__ == "__main__":
    main()
