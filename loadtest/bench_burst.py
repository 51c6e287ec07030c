"""How many requests of a burst go to the one worker that holds their prefix, by replica count.

    python -m loadtest.bench_burst --json out/burst.json

A burst should spill over to other workers before the owner of its prefix is swamped, and N replicas
should let as much of it spill as one does. Router processes and Redis are real. The workers are
registrations without engines, so only placement is measured.

The longer a burst takes to place, the less of it goes to the owner: the heads of the other workers'
queues drain with the clock in the meantime, while nobody reports first tokens. One replica that
gets the requests one by one puts 14, 13 or 12 of them on the owner when that takes 70, 150 or
280 ms. So the time is reported as well.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from statistics import median
from typing import Any

import click
import numpy as np
import orjson
from rich.console import Console

from app.core.hashing import compute_hashes
from app.core.keys import Keyspace
from app.local.redis_server import EmbeddedRedis
from app.options import POLICY
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.command import option, table
from loadtest.harness import bench
from loadtest.holders import BLOCK_SIZE, Holders
from loadtest.servers import routers

REPLICAS = (1, 2, 4, 8, 16)
NUM_WORKERS = 8
NUM_REQUESTS = 32
PREFIX_BLOCKS = 100
SUFFIX_BLOCKS = 20
KEYS = Keyspace("bench-burst")


@dataclass(frozen=True, slots=True)
class Burst:
    """on_owner: requests that went to the owner. took_s: from the first last byte sent to the last
    answer."""

    on_owner: int
    took_s: float


def place(urls: Sequence[str], prompts: Sequence[bytes]) -> tuple[list[str], float]:
    """The worker id that each prompt is routed to when all arrive at once, and the seconds taken.

    Prompts go to the replicas `urls` in turn and are released afterwards. All but the last byte of
    every request is sent first, then the last bytes, within a fraction of a millisecond.
    """
    with ExitStack() as stack:
        connections = []
        for i, prompt in enumerate(prompts):
            connection = HTTPConnection(urls[i % len(urls)].removeprefix("http://"), timeout=30.0)
            stack.callback(connection.close)
            connections.append(connection)
            connection.putrequest("POST", "/v1/route")
            connection.putheader("Content-Type", "application/octet-stream")
            connection.putheader("Content-Length", str(len(prompt)))
            connection.endheaders()
            connection.send(prompt[:-1])
        begun = time.perf_counter()
        for connection, prompt in zip(connections, prompts, strict=True):
            connection.send(prompt[-1:])
        choices = [_answer(connection) for connection in connections]
        took_s = time.perf_counter() - begun
        for connection, choice in zip(connections, choices, strict=True):
            connection.request("DELETE", f"/v1/requests/{choice['request_id']}")
            assert _answer(connection)["found"]
        return [choice["worker_id"] for choice in choices], took_s


def _answer(connection: HTTPConnection) -> dict[str, Any]:
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise click.ClickException(f"the router answered {response.status}: {body.decode()}")
    answer: dict[str, Any] = orjson.loads(body)
    return answer


@asynccontextmanager
async def replicas(count: int, policy: str) -> AsyncIterator[tuple[Holders, list[str]]]:
    """Workers, and the URLs of `count` router processes."""
    with EmbeddedRedis() as server:
        async with connect(server.url) as redis:
            holders = Holders(ScriptRunner(redis, timeout_s=5.0), KEYS)
            await holders.register(NUM_WORKERS)
            with routers(count, server.url, namespace=KEYS.namespace, policy=policy) as urls:
                yield holders, urls


async def place_bursts(
    counts: Sequence[int], rounds: int, policy: str = "latency"
) -> dict[int, list[Burst]]:
    """For each number of replicas, one burst per round. One more comes first, to warm up."""
    rng = np.random.default_rng(1)

    def tokens(blocks: int) -> bytes:
        return rng.integers(0, 2**32, blocks * BLOCK_SIZE, np.uint32).astype("<u4").tobytes()

    placed: dict[int, list[Burst]] = {count: [] for count in counts}
    async with replicas(max(counts), policy) as (holders, urls):
        for turn in range(rounds + 1):
            owner = turn % NUM_WORKERS
            for count in counts:
                prefix = tokens(PREFIX_BLOCKS)
                _, chain = compute_hashes(prefix, BLOCK_SIZE)
                await holders.store(owner, chain)
                prompts = [prefix + tokens(SUFFIX_BLOCKS) for _ in range(NUM_REQUESTS)]
                choices, took_s = place(urls[:count], prompts)
                if turn:
                    placed[count].append(Burst(choices.count(f"w{owner}"), took_s))
    return placed


async def measure(rounds: int, policy: str) -> dict[str, Any]:
    placed = await place_bursts(REPLICAS, rounds, policy)
    on_owner = {count: [burst.on_owner for burst in bursts] for count, bursts in placed.items()}
    medians = {count: median(seen) for count, seen in on_owner.items()}
    return {
        "policy": policy,
        "workers": NUM_WORKERS,
        "requests": NUM_REQUESTS,
        "prefix_blocks": PREFIX_BLOCKS,
        "suffix_blocks": SUFFIX_BLOCKS,
        "on_owner": on_owner,
        "median": medians,
        "largest_difference": max(abs(middle - medians[1]) for middle in medians.values()),
        "took_ms": {n: 1000 * median(b.took_s for b in bursts) for n, bursts in placed.items()},
    }


def show(result: dict[str, Any], console: Console) -> None:
    title = (
        f"{NUM_REQUESTS} requests at once, {PREFIX_BLOCKS} of their "
        f"{PREFIX_BLOCKS + SUFFIX_BLOCKS} blocks on one of {NUM_WORKERS} workers"
    )
    heads = "replicas", "on the owner: median", "least", "most", "placed in, ms (median)"
    cells = table(*heads, title=f"{title}, policy {result['policy']}")
    for count, seen in result["on_owner"].items():
        least, most = str(min(seen)), str(max(seen))
        took_ms = f"{result['took_ms'][count]:.0f}"
        cells.add_row(str(count), f"{result['median'][count]:g}", least, most, took_ms)
    console.print(cells)
    largest = result["largest_difference"]
    console.print(f"largest difference of a median to that of one replica: {largest:g}")


main = bench(measure, show, option("--rounds", 20), option("--policy", "latency", kind=POLICY))

if __name__ == "__main__":
    main()
