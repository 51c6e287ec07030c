"""What a request costs where Envoy carries it and a picker decides, beside the front door.

    KVROUTE_TEST_GATEWAY=.venv-gateway python -m loadtest.bench_gateway

As loadtest/bench_door.py, whose requests, engine and door these are. Envoy has one thread, on the
core of the picker. Answers pass the picker (`picker`), or their headers alone do (`picker, no
bodies`), or nobody is asked (`Envoy alone`).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from app.core.settings.router import PickerSettings
from app.http.server import listen, run
from app.local.envoy import rendered
from app.local.redis_server import LOOPBACK, free_port
from loadtest.bench_door import CONCURRENCY, KEYS, MODEL, door_forever, register, shapes
from loadtest.command import option
from loadtest.cores import CORES, cpu_s
from loadtest.harness import bench, grid, in_turn, medians, percentiles
from loadtest.instant_engine import engine_forever
from loadtest.servers import (
    Connection,
    Server,
    Shape,
    load,
    server,
    server_core,
    until_open,
    until_serving,
)
from loadtest.word_tokenizer import word_tokenizer

ALONE = "alone"
"""In place of how answers pass a picker: none is asked."""
NAMES = {
    "engine": "engine",
    ALONE: "Envoy alone",
    "door": "door",
    "picker": "picker",
    "blind": "picker, no bodies",
}
_FILTERS = "                  - name: envoy.filters.http."
ENVOY = "KVROUTE_TEST_GATEWAY"
"""The environment that `make test-gateway` makes, which has Envoy."""


def picker_forever(redis_url: str, port: int, tokenizer: str) -> None:
    from app.gateway.processor import serve

    settings = PickerSettings(
        redis_url=redis_url,
        namespace=KEYS.namespace,
        tokenizers=f"{MODEL}={tokenizer}",
        redis_timeout_ms=5000,  # see bench_decision
        grpc_port=port,
        comment_every_s=0.0,
        log_level="error",
    )
    run(serve(settings, listen(LOOPBACK, 0)))


@contextmanager
def envoy(picker: int, engine: int, core: int, answers: str) -> Iterator[Server]:
    """One that asks the picker at that port."""
    binary = Path(os.environ.get(ENVOY, ".venv-gateway")) / "bin" / "envoy"
    if not binary.is_file():
        raise click.ClickException(f"{binary} is missing; {ENVOY} names a folder with bin/envoy")
    port = free_port()
    with TemporaryDirectory() as folder:
        config = Path(folder) / "envoy.yaml"
        places = [[(LOOPBACK, each)] for each in (picker, engine)]
        text = rendered((LOOPBACK, port), *places, answers=answers)
        if answers == ALONE:
            before, _, filters = text.partition(f"{_FILTERS}ext_proc")
            text = f"{before}{_FILTERS}router{filters.partition(f'{_FILTERS}router')[2]}"
        config.write_text(text)
        command = [str(binary), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
        process = subprocess.Popen([*command, "-l", "error"])
        os.sched_setaffinity(process.pid, {core})
        try:
            yield Server(process.pid, port)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def started(url: str) -> Iterator[dict[str, tuple[Server, ...]]]:
    """What there is to ask, by NAMES, and what works behind it."""
    with ExitStack() as stack:

        def start(target: Callable[[str, int], None], given: str, core: int) -> Server:
            return stack.enter_context(server(target, given, core))

        tokenizer = stack.enter_context(word_tokenizer())
        engine = start(engine_forever, tokenizer, CORES[0])
        asyncio.run(register(url, f"http://{LOOPBACK}:{engine.port}"))
        core = server_core(0)
        door = start(partial(door_forever, tokenizer=tokenizer), url, core)
        picker = start(partial(picker_forever, tokenizer=tokenizer), url, core)
        for one in (engine, door):  # the picker speaks no HTTP/1
            run(until_open(one.port))
        alone, passing, blind = (
            stack.enter_context(envoy(picker.port, engine.port, core, answers))
            for answers in (ALONE, "FULL_DUPLEX_STREAMED", "NONE")
        )
        asked = {
            "engine": (engine,),
            ALONE: (alone,),
            "door": (door,),
            "picker": (passing, picker),
            "blind": (blind, picker),
        }
        for front, *_ in asked.values():
            run(until_serving(front.port, shapes()[0]))
        yield asked


def cost(url: str, parts: tuple[Server, ...], shape: Shape, requests: int) -> dict[str, float]:
    """Of the last part, and of all: CPU for a request."""
    before = [cpu_s(one.pid) for one in parts]
    run(load(parts[:1], url, shape, CONCURRENCY, requests))
    spent = [cpu_s(one.pid) - s for one, s in zip(parts, before, strict=True)]
    return {
        "python_us": spent[-1] / requests * 1e6,
        "all_us": sum(spent) / requests * 1e6,
    }


async def ask_each(
    asked: dict[str, tuple[Server, ...]],
    shape: Shape,
    requests: int,
    took_ms: dict[str, list[float]],
) -> None:
    """Ask one after another, so that what else the machine does is the same for all, and add how
    long each took."""
    connections = {name: await Connection.open(parts[0].port) for name, parts in asked.items()}
    for turn, (name, connection) in product(range(requests), connections.items()):
        begin = time.perf_counter()
        await connection.ask(shape.request(turn, 0))
        took_ms[name].append((time.perf_counter() - begin) * 1000)
    for connection in connections.values():
        connection.close()


def measure(url: str, requests: int, rounds: int) -> dict[str, Any]:
    forms = shapes()
    costs: dict[str, dict[str, Any]] = {}
    took_ms: dict[str, list[float]] = {name: [] for name in NAMES}
    with started(url) as asked:
        ways = {
            (shape.name, name): partial(cost, url, parts, shape, requests)
            for shape, (name, parts) in product(forms, asked.items())
            if name != "engine"
        }
        for (form, name), made in in_turn(ways, rounds).items():
            costs.setdefault(form, {})[name] = medians(made)
        run(ask_each(asked, forms[0], (rounds + 1) * (requests // 4 or 1), took_ms))
    return {
        "cost": costs,
        "took_ms": {name: percentiles(took, 50, 99) for name, took in took_ms.items()},
    }


def show(result: dict[str, Any], console: Console) -> None:
    costs = (
        (
            [shape, NAMES[name]],
            {
                "python": "" if name == ALONE else f"{each['python_us']:.0f}",
                "all": each["all_us"],
                "per_s": 1e6 / each["all_us"],
            },
        )
        for shape, numbers in result["cost"].items()
        for name, each in numbers.items()
    )
    columns = {
        "Python, µs of CPU": "{python}",
        "with Envoy, µs of CPU": "{all:.0f}",
        "per s of CPU": "{per_s:,.0f}",
    }
    console.print(grid(["", ""], columns, costs, title=f"{CONCURRENCY} connections"))
    columns = {"p50, ms": "{p50:.2f}", "p99, ms": "{p99:.2f}"}
    took = (([NAMES[name]], each) for name, each in result["took_ms"].items())
    console.print(grid([""], columns, took, title="one connection, 800 characters"))


main = bench(
    measure,
    show,
    option("--requests", 2000, "Requests per round."),
    option("--rounds", 5),
    redis=True,
)

if __name__ == "__main__":
    main()
