"""What one agent process of many engines costs beside an agent for each: CPU, memory, and lag.

    python -m loadtest.bench_fleet --engines 64 --json out/bench_fleet.json

One process shows itself as so many vLLMs, which publish chains of blocks in turn. `kvroute agent`
follows them: one process with --engines, then as many with --engine-url. Each has its memory, its
CPU without events and with them, and how long blocks take to be seen in Redis.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import redis
from aiohttp import web
from rich import box
from rich.console import Console

from app.core.keys import Keyspace
from app.http.server import run
from app.ops.reset import delete_namespace
from app.state.connect import connect
from loadtest.bench_agent import watch
from loadtest.bench_bridge import CHAIN_BLOCKS, hashes_of, names_of, publish, tokens_of
from loadtest.bench_engines import agent_beside, agent_of
from loadtest.command import option
from loadtest.cores import CORES, cpu_s
from loadtest.harness import bench, grid, percentiles
from loadtest.holders import BLOCK_SIZE
from loadtest.processes import child, received
from workers.bridge.events.events import BlockStored
from workers.vllm_face.event_socket import EventSocket

KEYS = Keyspace("bench-fleet")
BLOCKS_PER_S = 100
"""That each engine publishes: 1,600 tokens."""
WINDOW_S = 20.0
SETTLE_S = 5.0
POOL_BLOCKS = 10_000
REGISTERED_TIMEOUT_S = 300.0


def _app(events: EventSocket) -> web.Application:
    """What an agent asks of a vLLM without requests."""
    labels = 'engine="0",model_name="m"'
    shown = (
        f"process_start_time_seconds {time.time()}\n"
        f'vllm:cache_config_info{{{labels},block_size="{BLOCK_SIZE}",enable_prefix_caching="True",'
        f'num_gpu_blocks="{POOL_BLOCKS}"}} 1.0\n'
        f"vllm:num_requests_running{{{labels}}} 0.0\n"
        f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n"
    )
    card = {"id": "m", "owned_by": "vllm", "max_model_len": 32_768}
    answers: dict[str, bytes] = {
        "/health": b"",
        "/version": orjson.dumps({"version": "0.33.0"}),
        "/v1/models": orjson.dumps({"object": "list", "data": [card]}),
        "/kv_event_sources": orjson.dumps(events.sources()),
        "/metrics": shown.encode(),
    }

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=answers[request.path])

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in answers])
    return app


def engines(to: Connection, number: int) -> None:
    """In a process of its own: send their URLs, then publish chains, in turn, as often as `to` says
    how many, and answer with when each was sent, in seconds on time.perf_counter."""

    async def serve() -> None:
        sockets, urls = [EventSocket("127.0.0.1") for _ in range(number)], []
        for events in sockets:
            runner = web.AppRunner(_app(events), access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        replaying = asyncio.gather(*(events.run() for events in sockets))
        to.send(urls)
        while chains := await asyncio.to_thread(to.recv):
            batches = [
                BlockStored(names_of(n), None, tokens_of(n), BLOCK_SIZE, medium="GPU")
                for n in chains
            ]
            to.send(None)
            await asyncio.to_thread(to.recv)
            to.send(await publish(sockets, batches, BLOCKS_PER_S * number))
        replaying.cancel()

    run(serve())


@contextmanager
def one_agent(urls: Sequence[str], redis_url: str) -> Iterator[list[int]]:
    """One process that is the agent of all; its id."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "engines.toml")
        file.write_text("".join(f'[w{i}]\nengine-url = "{url}"\n' for i, url in enumerate(urls)))
        flag = f"--engines={file}"
        with agent_of(flag, redis_url=redis_url, namespace=KEYS.namespace) as pid:
            yield [pid]


@contextmanager
def agents_beside(urls: Sequence[str], redis_url: str) -> Iterator[list[int]]:
    """An agent for each; their ids."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(agent_beside(url, redis_url, KEYS.namespace, f"w{i}"))
            for i, url in enumerate(urls)
        ]


def _mib(pid: int) -> float:
    """Memory of a process, and its part of what it shares with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _cpu_share(pids: Sequence[int], before: Sequence[float], seconds: float) -> float:
    return sum(cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)) / seconds


def measured(
    url: str, pids: Sequence[int], to: Connection, number: int, chains: range
) -> dict[str, float]:
    """Of agents that are there. Shares are of a core, for each engine; seen_ms: from an event until
    another process sees its last block in Redis."""
    with redis.Redis.from_url(url) as client:
        until = time.monotonic() + REGISTERED_TIMEOUT_S
        while client.hlen(KEYS["current"]) < number:
            assert time.monotonic() < until, "not all engines are followed"
            time.sleep(0.1)
    time.sleep(SETTLE_S)
    before = [cpu_s(pid) for pid in pids]
    time.sleep(WINDOW_S)
    idle = _cpu_share(pids, before, WINDOW_S)
    to.send(chains)
    received(to)
    with child(watch, url, KEYS, [hashes_of(chain) for chain in chains]) as watcher:
        received(watcher)
        before, begin = [cpu_s(pid) for pid in pids], time.monotonic()
        to.send(None)
        sent, seen = received(to), received(watcher)
        busy = _cpu_share(pids, before, time.monotonic() - begin)
    took = np.subtract(seen, sent) * 1000
    return {
        "idle_share": idle / number,
        "busy_share": busy / number,
        "mib": sum(map(_mib, pids)) / number,
        "threads": sum(map(_threads, pids)) / number,
        **{f"seen_ms_{name}": ms for name, ms in percentiles(took, 50, 99).items()},
    }


async def _forget(url: str) -> None:
    async with connect(url) as client:
        await delete_namespace(client, KEYS)


def measure(url: str, number: int) -> dict[str, Any]:
    os.sched_setaffinity(0, CORES)
    result: dict[str, Any] = {"engines": number}
    num_chains = round(WINDOW_S * BLOCKS_PER_S * number / CHAIN_BLOCKS)
    for at, (name, agents) in enumerate((("one", one_agent), ("beside", agents_beside))):
        chains = range(at * num_chains, (at + 1) * num_chains)
        with child(engines, number) as to, agents(received(to), url) as pids:
            result[name] = measured(url, pids, to, number, chains)
        run(_forget(url))
    return result


def show(result: dict[str, Any], console: Console) -> None:
    columns = {
        "idle": "{idle_share:.2%}",
        f"at {BLOCKS_PER_S} blocks/s": "{busy_share:.2%}",
        "MiB": "{mib:.1f}",
        "threads": "{threads:.1f}",
        "seen p50": "{seen_ms_p50:.1f} ms",
        "p99": "{seen_ms_p99:.1f} ms",
    }
    rows = (["one process"], result["one"]), (["one beside each"], result["beside"])
    title = f"{result['engines']} engines, CPU and memory for each"
    console.print(grid([""], columns, rows, title=title, box=box.SIMPLE))


main = bench(measure, show, option("--engines number", 64), redis=True)

if __name__ == "__main__":
    main()
