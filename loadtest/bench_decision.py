"""How many decisions one replica makes, how soon, and what each costs it in CPU.

    python -m loadtest.bench_decision --json out/bench_decision.json

The server has one core to itself; the client and Redis share another. Beside the router, in the
same run, a bare FastAPI endpoint that lets pydantic check the same token ids and decides nothing.
Workers are registrations without engines that hold the beginnings of the prompts. Each request
reserves; ids come again, which moves their reservations, so that their number stays what it is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import numpy as np
import orjson
import stamina
from rich.console import Console
from rich.table import Table

from app.core import index, leases
from app.core.config import POSITIVE, RouterSettings
from app.core.embedded import LOOPBACK, EmbeddedRedis, free_port
from app.core.hashing import compute_hashes, compute_local_hashes
from app.core.keys import Keyspace
from app.core.redis import connect
from app.core.scripts import ScriptRunner
from app.core.serving import listen, run, serve
from app.core.types import Tier, WorkerInfo, WorkerKey

KEYS = Keyspace("bench-decision")
NONCE = "bench"
NUM_WORKERS = 8
BLOCK_SIZE = 16
NUM_TOKENS = 2048
HELD_TOKENS = 1024
NUM_PROMPTS = 64
CONCURRENCY = (1, 8, 32)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Shape:
    """One way to ask. bodies: of the prompts, in turn."""

    name: str
    bodies: Sequence[bytes]
    content_type: str = "application/json"
    bare: bool = False


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 128_000, NUM_TOKENS).tolist() for _ in range(NUM_PROMPTS)]


def shapes() -> list[Shape]:
    ids = prompts()
    as_json = [orjson.dumps({"token_ids": tokens}) for tokens in ids]
    raw = [np.array(tokens, "<u4").tobytes() for tokens in ids]
    hashes = [
        orjson.dumps(
            {"local_hashes": compute_local_hashes(tokens, BLOCK_SIZE), "num_tokens": NUM_TOKENS}
        )
        for tokens in ids
    ]
    return [
        Shape("bare endpoint, token ids", as_json, bare=True),
        Shape("token ids", as_json),
        Shape("raw u32", raw, "application/octet-stream"),
        Shape("hashes", hashes),
    ]


async def register(url: str) -> None:
    """Each worker holds the first half of every NUM_WORKERS-th prompt."""
    async with connect(url) as redis:
        runner = ScriptRunner(redis, timeout_s=10)
        shard = KEYS.of_shard(0)
        for n in range(NUM_WORKERS):
            info = WorkerInfo(
                WorkerKey(f"w{n}"), "http://127.0.0.1:1", BLOCK_SIZE, 25_000, 1_000_000
            )
            made = await runner.one(leases.register(KEYS, info, NONCE, ttl_ms=3_600_000))
            inc = made.incarnation
            assert await runner.one(index.open_shard(shard, inc, NONCE, bucket_bits=8))
            assert await runner.one(leases.activate(KEYS, info.key, inc, NONCE))
            for seq, tokens in enumerate(prompts()[n::NUM_WORKERS], 1):
                _, chain = compute_hashes(tokens[:HELD_TOKENS], BLOCK_SIZE)
                changes = index.chain_changes(chain, Tier.DEVICE)
                assert await runner.one(index.apply(shard, inc, NONCE, seq, changes))


def route_forever(redis_url: str, port: int) -> None:
    from app.api.main import serve_router

    settings = RouterSettings(redis_url=redis_url, namespace=KEYS.namespace, log_level="error")
    _alone()
    run(serve_router(settings, listen(LOOPBACK, port)))


def answer_forever(_: str, port: int) -> None:
    """The point of comparison: what FastAPI and pydantic make of it."""
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Prompt(BaseModel):
        token_ids: list[int]

    class Answer(BaseModel):
        worker_id: str
        num_tokens: int

    app = FastAPI()

    async def route(prompt: Prompt) -> Answer:
        return Answer(worker_id="w0", num_tokens=len(prompt.token_ids))

    # FastAPI would look names of annotations up in the module's namespace.
    route.__annotations__.update({"prompt": Prompt, "return": Answer})
    app.post("/v1/route")(route)
    _alone()
    run(serve(app, listen(LOOPBACK, port)))


def _alone() -> None:
    """Take the last core; who started this left it free."""
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})


@contextmanager
def server(target: Callable[[str, int], None], redis_url: str) -> Iterator[tuple[int, str]]:
    """A process that serves; its id, and its URL."""
    port = free_port()
    process = get_context("spawn").Process(target=target, args=(redis_url, port), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, f"http://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.join(timeout=10)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used; Linux's own count, in hundredths."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


@dataclass(frozen=True)
class Load:
    """Seconds that each request took, in all, and of the server's CPU."""

    latencies: list[float]
    wall_s: float
    cpu_s: float


async def load(url: str, pid: int, shape: Shape, concurrency: int, requests: int) -> Load:
    headers = [
        {"Content-Type": shape.content_type, "X-Request-ID": f"r{n}"} for n in range(NUM_PROMPTS)
    ]
    latencies: list[float] = []
    turns = iter(range(requests))

    async def ask(session: aiohttp.ClientSession) -> None:
        for turn in turns:
            n = turn % NUM_PROMPTS
            begin = time.perf_counter()
            async with session.post(
                f"{url}/v1/route", data=shape.bodies[n], headers=headers[n]
            ) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise click.ClickException(f"{answer.status}: {body.decode()}")
            latencies.append(time.perf_counter() - begin)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        async for attempt in stamina.retry_context(on=aiohttp.ClientConnectorError, timeout=30):
            with attempt:
                await session.get(f"{url}/")
        begin, used = time.perf_counter(), cpu_s(pid)
        await asyncio.gather(*(ask(session) for _ in range(concurrency)))
        return Load(latencies, time.perf_counter() - begin, cpu_s(pid) - used)


def measure(url: str, requests: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, by shape and concurrency."""
    asyncio.run(register(url))
    found: dict[str, dict[int, list[Load]]] = {}
    with ExitStack() as stack:
        bare = stack.enter_context(server(answer_forever, url))
        router = stack.enter_context(server(route_forever, url))
        for shape in shapes():
            pid, at = bare if shape.bare else router
            run(load(at, pid, shape, 8, requests // 4))  # warm
        for _ in range(rounds):
            for shape in shapes():
                pid, at = bare if shape.bare else router
                for concurrency in CONCURRENCY:
                    made = run(load(at, pid, shape, concurrency, requests))
                    found.setdefault(shape.name, {}).setdefault(concurrency, []).append(made)
    return {
        name: {
            str(concurrency): {
                "per_s": median(len(made.latencies) / made.wall_s for made in loads),
                "cpu_us": median(made.cpu_s / len(made.latencies) * 1e6 for made in loads),
                "p50_ms": median(float(np.percentile(m.latencies, 50)) * 1000 for m in loads),
                "p99_ms": median(float(np.percentile(m.latencies, 99)) * 1000 for m in loads),
            }
            for concurrency, loads in by_concurrency.items()
        }
        for name, by_concurrency in found.items()
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{NUM_TOKENS:,} tokens a prompt, {NUM_WORKERS} workers, one replica")
    heads = ("", "at once", "per s", "CPU, µs", "of the bare endpoint's", "p50, ms", "p99, ms")
    for head in heads:
        table.add_column(head, justify="right")
    yardstick = next(iter(result.values()))
    for name, by_concurrency in result.items():
        for concurrency, made in by_concurrency.items():
            table.add_row(
                name,
                concurrency,
                f"{made['per_s']:,.0f}",
                f"{made['cpu_us']:.0f}",
                f"{made['cpu_us'] / yardstick[concurrency]['cpu_us']:.2f}",
                f"{made['p50_ms']:.2f}",
                f"{made['p99_ms']:.2f}",
            )
    console.print(table)


@click.command()
@click.option("--requests", default=4000, show_default=True, type=POSITIVE, help="A round.")
@click.option("--rounds", default=5, show_default=True, type=POSITIVE)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures there.")
def main(requests: int, rounds: int, out: Path | None) -> None:
    """Measure one replica's decisions."""
    cores = sorted(os.sched_getaffinity(0))
    with EmbeddedRedis() as redis:
        # Redis and this process, not the servers, which take the last core.
        assert redis.pid is not None
        others = set(cores[:-1]) or set(cores)
        for pid in (0, redis.pid):
            os.sched_setaffinity(pid, others)
        result = measure(redis.url, requests, rounds)
    show(result, Console())
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
