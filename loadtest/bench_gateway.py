"""What a request costs where Envoy carries it and a picker decides, beside the front door.

    KVROUTE_TEST_GATEWAY=.venv-gateway python -m loadtest.bench_gateway

As loadtest/bench_door.py, whose requests, engine and door these are. Envoy has one thread, on the
core of the picker. Answers pass the picker (`picker`), or their headers alone do (`picker, no
bodies`).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from rich.console import Console

from app.core.settings.picker import PickerSettings
from app.http.server import listen, run
from app.local.envoy import rendered
from app.local.redis_server import LOOPBACK, free_port
from app.options import POSITIVE
from loadtest.bench_door import (
    CONCURRENCY,
    KEYS,
    MODEL,
    PACED_STREAMS,
    door_forever,
    first_token_ms,
    register,
    shapes,
)
from loadtest.command import Command, json_option, save, table
from loadtest.cores import CORES, cpu_s, redis_to_measure
from loadtest.instant_engine import engine_forever
from loadtest.servers import Server, load, server, server_core, until_open, until_serving
from loadtest.word_tokenizer import word_tokenizer

ENVOY = "KVROUTE_TEST_GATEWAY"
"""The environment that `make test-gateway` makes, which has Envoy."""


def picker_forever(redis_url: str, port: int, tokenizer: str) -> None:
    from app.gateway.main import serve

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
        config.write_text(rendered((LOOPBACK, port), *places, answers=answers))
        command = [str(binary), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
        process = subprocess.Popen([*command, "-l", "error"])
        os.sched_setaffinity(process.pid, {core})
        try:
            yield Server(process.pid, port)
        finally:
            process.terminate()
            process.wait()


def measure(url: str, requests: int, rounds: int) -> dict[str, Any]:
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
        passing, blind = (
            stack.enter_context(envoy(picker.port, engine.port, core, answers))
            for answers in ("FULL_DUPLEX_STREAMED", "NONE")
        )
        fronts = {"door": (door,), "picker": (passing, picker), "blind": (blind, picker)}
        forms = shapes()
        for front, *_ in fronts.values():
            run(until_serving(front.port, forms[0]))
        made: dict[str, dict[str, list[dict[str, float]]]] = {}
        for turn in range(rounds + 1):
            for shape in forms:
                for name, parts in fronts.items():
                    before = [cpu_s(one.pid) for one in parts]
                    took = run(load(parts[:1], url, shape, CONCURRENCY, requests))
                    spent = [cpu_s(one.pid) - s for one, s in zip(parts, before, strict=True)]
                    if turn:  # the first one warms up
                        by_name = made.setdefault(shape.name, {})
                        by_name.setdefault(name, []).append(
                            {
                                "python_us": spent[-1] / requests * 1e6,
                                "all_us": sum(spent) / requests * 1e6,
                                "per_s": requests / took.wall_s,
                            }
                        )
        first = {
            name: run(first_token_ms(at.port))
            for name, at in {
                "engine": engine,
                "door": door,
                "picker": passing,
                "blind": blind,
            }.items()
        }
    return {
        "cost": {
            shape: {
                name: {key: median(each[key] for each in runs) for key in runs[0]}
                for name, runs in by_name.items()
            }
            for shape, by_name in made.items()
        },
        "added_first_token_ms": {
            name: {
                f"p{q}": float(np.percentile(took, q) - np.percentile(first["engine"], q))
                for q in (50, 99)
            }
            for name, took in first.items()
            if name != "engine"
        },
    }


NAMES = {"door": "door", "picker": "picker", "blind": "picker, no bodies"}


def show(result: dict[str, Any], console: Console) -> None:
    heads = ("", "", "Python, µs of CPU", "with Envoy, µs of CPU", "per s of one core")
    cells = table(*heads, left=("", ""), title=f"{CONCURRENCY} connections")
    for shape, numbers in result["cost"].items():
        for name, each in numbers.items():
            cells.add_row(
                shape,
                NAMES[name],
                f"{each['python_us']:.0f}",
                f"{each['all_us']:.0f}",
                f"{each['per_s']:,.0f}",
            )
    console.print(cells)
    for name, added in result["added_first_token_ms"].items():
        said = ", ".join(f"{quantile} {ms:.1f}" for quantile, ms in added.items())
        console.print(
            f"Added to the first token of {PACED_STREAMS} streams, {NAMES[name]}: {said} ms"
        )


@click.command(cls=Command)
@click.option(
    "--requests", default=2000, show_default=True, type=POSITIVE, help="Requests per round."
)
@click.option("--rounds", default=5, show_default=True, type=POSITIVE)
@json_option
def main(requests: int, rounds: int, json_file: Path | None) -> None:
    """Measure a picker behind Envoy beside the front door."""
    with redis_to_measure() as url:
        result = measure(url, requests, rounds)
    show(result, Console(width=120))
    save(result, json_file)


if __name__ == "__main__":
    main()
