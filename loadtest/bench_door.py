"""The front door's cost beside a bare proxy.

    python -m loadtest.bench_door --json out/bench_door.json

The door is on one core; an engine that answers at once, Redis and the load share another. The
yardstick, in the same run, is a raw ASGI application that reads a body's JSON, as all must that
route by `model`, passes it on with aiohttp's client, and decides nothing. Prompts are token ids, so
that no time goes into tokenizing them, or text, each of whose words is a token.

First it counts, in this process, what one warm request calls: no busy machine changes that.

    git worktree add ../old 8f51747
    python -m loadtest.bench_door --beside ../old

measures instead the doors of two checkouts in turn: that one's and this one's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

import app
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.http.server import listen, run, serve
from app.local.redis_server import LOOPBACK, EmbeddedRedis, free_port
from app.state import models
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.command import option
from loadtest.harness import bench, grid, in_turn
from loadtest.holders import Holders
from loadtest.instant_engine import APART, CHUNKS, engine_forever, word_tokenizer
from loadtest.processes import CORES
from loadtest.request_counts import counts_of
from loadtest.servers import (
    NUM_PROMPTS,
    Server,
    Shape,
    figures,
    load,
    server,
    server_core,
    until_open,
    until_serving,
)
from workers.engines.sim.text import WORDS

KEYS = Keyspace("bench-door")
MODEL = "bench"
PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
CONCURRENCY = 32
HERE = Path(app.__file__).parents[1]
START_S = 60.0
REGISTER = "import asyncio, sys; from loadtest.bench_door import register; "
REGISTER += "asyncio.run(register(*sys.argv[1:]))"
SLOW_STREAM = f"stream of {APART} tokens, one by one"
COMPARED = ("streamed chat", "800 characters", "/v1/route, 2,048 ids", SLOW_STREAM)
"""Shapes of which the doors of two checkouts are compared."""


@dataclass(frozen=True)
class Door:
    """A checkout's, which decides by a Redis of its own: what is in it may differ."""

    serving: Server
    redis_url: str


@contextmanager
def door_of(
    checkout: Path, python: str, engine_url: str, namespace: str, tokenizers: str
) -> Iterator[Door]:
    """The checkout's own code registers the engine, and its own command starts the door.

    Raises ClickException if the engine cannot be registered.
    """
    port = free_port()
    with EmbeddedRedis() as redis:
        assert redis.pid is not None
        os.sched_setaffinity(redis.pid, CORES[:1])
        environment = {
            **os.environ,
            "REDIS_URL": redis.url,
            "KVROUTE_PORT": str(port),
            "KVROUTE_NAMESPACE": namespace,
            "KVROUTE_TOKENIZERS": tokenizers,
            "KVROUTE_REDIS_TIMEOUT_MS": "5000",
            "KVROUTE_LOG_LEVEL": "error",
        }
        # Code is found in the folder that a process starts in, before any that is installed.
        about: dict[str, Any] = {"cwd": checkout, "env": environment}
        command = [python, "-c", REGISTER, redis.url, engine_url]
        ran = subprocess.run(command, **about, capture_output=True, text=True, timeout=START_S)
        if ran.returncode:
            raise click.ClickException(f"{checkout} cannot register a worker: {ran.stderr}")
        with subprocess.Popen([python, "-m", "app.cli", "router"], **about) as process:
            os.sched_setaffinity(process.pid, {server_core(0)})
            try:
                yield Door(Server(process.pid, port), redis.url)
            finally:
                process.terminate()


def compare(
    doors: Sequence[Door], shapes: Sequence[Shape], concurrency: int, requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns by shape: µs of CPU a request at the first door and at the second, and the median of
    how many times the first's the second's is, round by round."""
    for door in doors:
        for shape in shapes:
            run(until_serving(door.serving.port, shape))

    def cpu_us(door: Door, shape: Shape) -> float:
        took = run(
            load([door.serving], door.redis_url, shape, concurrency, num_of(shape, requests))
        )
        return figures([took])["cpu_us"]

    ways = {(s.name, door): partial(cpu_us, door, s) for s in shapes for door in doors}
    made = in_turn(ways, rounds)
    compared = {}
    for shape in shapes:
        other, here = (made[shape.name, door] for door in doors)
        times = [b / a for a, b in zip(other, here, strict=True)]
        compared[shape.name] = {
            "other_us": median(other),
            "here_us": median(here),
            "times": median(times),
        }
    return compared


def num_of(shape: Shape, requests: int) -> int:
    """Returns how many requests make a round: fewer of those that take long."""
    return max(CONCURRENCY, requests // 16) if shape.name == SLOW_STREAM else requests


def door_forever(redis_url: str, port: int, tokenizer: str = "") -> None:
    """tokenizer: its folder; "": prompts are ids."""
    from app.edge.app import serve_router

    run(serve_router(settings_of(redis_url, tokenizer), listen(LOOPBACK, port)))


def settings_of(redis_url: str, tokenizer: str) -> RouterSettings:
    return RouterSettings(
        redis_url=redis_url,
        namespace=KEYS.namespace,
        tokenizers=f"{MODEL}={tokenizer}" if tokenizer else "",
        redis_timeout_ms=5000,  # see bench_decision
        access_log=False,
        log_level="error",
    )


def proxy_forever(engine_url: str, port: int) -> None:
    """The yardstick."""
    run(_proxy(engine_url, port))


async def _proxy(engine_url: str, port: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            if json.loads(body)["model"] != MODEL:
                raise ValueError("a body without the model")
            headers = {"content-type": "application/json"}
            url = f"{engine_url}{scope['path']}"
            async with session.post(url, data=body, headers=headers) as answer:
                start = {"type": "http.response.start", "status": answer.status}
                kind = answer.headers["content-type"].encode()
                await send({**start, "headers": [(b"content-type", kind)]})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

        await serve(app, listen(LOOPBACK, port))


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def shapes() -> list[Shape]:
    rng = np.random.default_rng(2)

    def bodies(size: int, **more: object) -> list[bytes]:
        prompts = (rng.integers(10_000, 99_999, size // 6).tolist() for _ in range(NUM_PROMPTS))
        return [
            orjson.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 16} | more)
            for prompt in prompts
        ]

    words = random.Random(2)
    texts = [
        orjson.dumps({"model": MODEL, "prompt": _text(words, 150), "max_tokens": 16})
        for _ in range(NUM_PROMPTS)
    ]
    return [
        Shape("800 characters", bodies(800), path=PATH),
        Shape("32 kB", bodies(32_000), path=PATH),
        Shape(f"stream of {CHUNKS} chunks", bodies(800, stream=True), path=PATH),
        Shape(SLOW_STREAM, bodies(800, stream=True, max_tokens=APART), path=PATH),
        Shape("800 characters of text", texts, path=PATH),
    ]


def counted_shapes() -> list[Shape]:
    words = random.Random(5)
    texts = [_text(words, 150) for _ in range(NUM_PROMPTS)]
    chat = {"model": MODEL, "max_tokens": 16, "stream": True}
    ids = [list(range(n, n + 2048)) for n in range(NUM_PROMPTS)]
    return [
        Shape(
            "streamed chat",
            [
                orjson.dumps({**chat, "messages": [{"role": "user", "content": text}]})
                for text in texts
            ],
            path=CHAT_PATH,
        ),
        Shape(
            "800 characters of text",
            [orjson.dumps({"model": MODEL, "prompt": text, "max_tokens": 16}) for text in texts],
            path=PATH,
        ),
        Shape("/v1/route, 2,048 ids", [orjson.dumps({"token_ids": each}) for each in ids]),
    ]


async def register(url: str, engine_url: str) -> None:
    async with connect(url) as redis:
        holders = Holders(ScriptRunner(redis, timeout_s=10), KEYS)
        about: dict[str, Any] = {"address": engine_url, "engine": "vllm 0.32.0", "models": (MODEL,)}
        await holders.register(1, max_requests=1_000_000, **about)
        await ScriptRunner(redis, 5.0).one(models.announce(KEYS.namespace, [MODEL]))


def measure(url: str, requests: int, rounds: int, checkout: Path | None = None) -> dict[str, Any]:
    """checkout: another, of which nothing but the door is measured, beside this one's."""
    if checkout is not None:
        return measure_beside(checkout, requests, rounds)
    with ExitStack() as stack:

        def start(target: Callable[[str, int], None], given: str, core: int) -> Server:
            return stack.enter_context(server(target, given, core))

        tokenizer = stack.enter_context(word_tokenizer())
        engine = start(engine_forever, tokenizer, CORES[0])
        engine_url = f"http://{LOOPBACK}:{engine.port}"
        asyncio.run(register(url, engine_url))
        run(until_open(engine.port))
        counts = counts_of(settings_of(url, tokenizer), counted_shapes())
        servers = {
            "proxy": start(proxy_forever, engine_url, server_core(0)),
            "door": start(partial(door_forever, tokenizer=tokenizer), url, server_core(0)),
        }
        for one in servers.values():
            run(until_open(one.port))
        forms = shapes()
        run(until_serving(servers["door"].port, forms[0]))
        ways = {
            (shape.name, name): lambda at=at, shape=shape: run(
                load([at], url, shape, CONCURRENCY, num_of(shape, requests))
            )
            for shape in forms
            for name, at in servers.items()
        }
        cost: dict[str, dict[str, Any]] = {}
        for (form, name), loads in in_turn(ways, rounds).items():
            cost.setdefault(form, {})[name] = figures(loads)
    return {
        "counts": counts,
        "cost": cost,
        "times_proxy": {
            shape: numbers["door"]["cpu_us"] / numbers["proxy"]["cpu_us"]
            for shape, numbers in cost.items()
        },
    }


def measure_beside(other: Path, requests: int, rounds: int) -> dict[str, dict[str, float]]:
    """Compares with another checkout, by the interpreter of its .venv if it has one."""
    its_own = other / ".venv/bin/python"
    python = str(its_own) if its_own.exists() else sys.executable
    by_name = {shape.name: shape for shape in (*shapes(), *counted_shapes())}
    with ExitStack() as stack:
        tokenizer = stack.enter_context(word_tokenizer())
        engine = stack.enter_context(server(engine_forever, tokenizer, CORES[0]))
        run(until_open(engine.port))
        about = (f"http://{LOOPBACK}:{engine.port}", KEYS.namespace, f"{MODEL}={tokenizer}")
        doors = [
            stack.enter_context(door_of(checkout, interpreter, *about))
            for checkout, interpreter in ((other, python), (HERE, sys.executable))
        ]
        return compare(doors, [by_name[name] for name in COMPARED], CONCURRENCY, requests, rounds)


def show(result: dict[str, Any], console: Console) -> None:
    if "counts" not in result:
        console.print(_compared(result))
        return
    console.print(_counts(result["counts"]))
    columns = {
        "proxy, µs of CPU": "{proxy[cpu_us]:.0f}",
        "door, µs of CPU": "{door[cpu_us]:.0f}",
        "times": "{times:.2f}",
        "door, per s": "{door[per_s]:,.0f}",
    }
    rows = (
        ([shape], {**numbers, "times": result["times_proxy"][shape]})
        for shape, numbers in result["cost"].items()
    )
    console.print(grid([""], columns, rows, title=f"{CONCURRENCY} connections"))


def _compared(result: dict[str, dict[str, float]]) -> Table:
    columns = {
        "other, µs of CPU": "{other_us:.0f}",
        "this one, µs of CPU": "{here_us:.0f}",
        "times": "{times:.2f}",
    }
    return grid([""], columns, (([shape], numbers) for shape, numbers in result.items()))


def _counts(counts: dict[str, dict[str, Any]]) -> Table:
    columns = ("functions", "files", "calls", "awaits", "tasks", "futures", "timers", "redis")
    forms = {column: f"{{{column}:,}}" for column in columns}
    rows = (([shape], numbers) for shape, numbers in counts.items())
    return grid([""], forms, rows, title="What one warm request calls and makes")


main = bench(
    measure,
    show,
    option("--requests", 4000, "Requests per round."),
    option("--rounds", 5),
    option(
        "--beside checkout",
        None,
        "Another checkout, to measure its door and this one's in turn, and nothing else.",
        click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True),
    ),
    redis=True,
)

if __name__ == "__main__":
    main()
