"""What the front door's memory is with many streams open, and whether it grows under steady load.

    python -m loadtest.bench_door_memory --json out/bench_door_memory.json

Processes as in bench_door. Streams have said their first token and say nothing more until all are
open. The load is then paced, a third of it streams and a third of it prompts never seen before;
what the door's process takes after the first part of it is compared with its end.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console

from app.http.server import run
from app.local.redis_server import LOOPBACK
from app.options import Number
from loadtest.bench_door import MODEL, PATH, door_forever, register, shapes
from loadtest.command import option
from loadtest.cores import CORES
from loadtest.harness import bench
from loadtest.instant_engine import engine_forever
from loadtest.servers import (
    NUM_PROMPTS,
    Connection,
    Server,
    server,
    server_core,
    until_open,
    until_serving,
)

AT_ONCE = 64
WARM_SHARE = 0.1
"""Of the minutes of load, at their beginning."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def request_of(prompt: list[int], number: int, **more: object) -> bytes:
    body = orjson.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 16, **more})
    return (
        b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"X-Request-ID: m%d\r\nContent-Length: %d\r\n\r\n%b"
        % (PATH.encode(), number, len(body), body)
    )


async def bytes_per_stream(door: Server, streams: int) -> float:
    """By how much the door's process grows for each stream that is open."""
    before = rss_bytes(door.pid)
    turns = iter(range(streams))
    writers: list[asyncio.StreamWriter] = []

    async def some() -> None:
        for number in turns:
            reader, writer = await asyncio.open_connection(LOOPBACK, door.port)
            writers.append(writer)
            prompt = [number % 1000 + 1] * 128
            writer.write(request_of(prompt, number, stream=True, user="held"))
            await reader.readuntil(b"data: ")

    async with asyncio.timeout(600):
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    grown = rss_bytes(door.pid) - before
    for writer in writers:
        writer.close()
    return grown / streams


async def growth(door: Server, minutes: float, rate: float) -> dict[str, float]:
    """Bytes of the door's process after the first part of the load, and at its end."""
    rng = np.random.default_rng(4)
    numbers = count()
    known = shapes()[0]
    idle: list[Connection] = []
    begin = time.perf_counter()
    end_s = minutes * 60

    async def one(number: int) -> None:
        while idle and not idle[-1].is_open:
            idle.pop()
        connection = idle.pop() if idle else await Connection.open(door.port)
        request = known.request(number, number % NUM_PROMPTS)
        if number % 3:
            prompt = rng.integers(10_000, 99_999, 130).tolist()
            request = request_of(prompt, number, stream=number % 3 == 1)
        await connection.ask(request)
        idle.append(connection)

    warm = 0
    async with asyncio.TaskGroup() as tasks:
        while (passed_s := time.perf_counter() - begin) < end_s:
            if not warm and passed_s > WARM_SHARE * end_s:
                warm = rss_bytes(door.pid)
            number = next(numbers)
            await asyncio.sleep(max(0.0, number / rate - passed_s))
            tasks.create_task(one(number))
    made = next(numbers)
    for connection in idle:
        connection.close()
    return {"warm": warm, "end": rss_bytes(door.pid), "per_s": made / end_s}


def measure(url: str, streams: int, minutes: float, rate: float) -> dict[str, Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        engine = stack.enter_context(server(engine_forever, "", CORES[0]))
        asyncio.run(register(url, f"http://{LOOPBACK}:{engine.port}"))
        door = stack.enter_context(server(door_forever, url, server_core(0)))
        for one in (engine, door):
            run(until_open(one.port))
        run(until_serving(door.port, shapes()[0]))
        run(growth(door, 0.1, rate))  # what is made once is made
        per_stream = run(bytes_per_stream(door, streams))
        run(growth(door, 0.1, rate))  # what the streams have left is used again
        steady = run(growth(door, minutes, rate))
    return {
        "streams": streams,
        "bytes_per_stream": per_stream,
        "minutes": minutes,
        **steady,
        "growth": steady["end"] / steady["warm"] - 1,
    }


def show(result: dict[str, Any], console: Console) -> None:
    each_kb = result["bytes_per_stream"] / 1000
    console.print(f"With {result['streams']:,} streams open: {each_kb:.1f} kB each")
    console.print(
        f"{result['per_s']:.0f} requests/s for {result['minutes']:g} minutes: "
        f"{result['growth']:+.1%} after the first {WARM_SHARE:.0%} of that, "
        f"to {result['end'] / 1e6:.0f} MB"
    )


main = bench(
    measure,
    show,
    option("--streams", 5_000),
    option("--minutes", 20.0, "How long the load goes on.", Number(0, 1440, min_open=True)),
    option("--rate", 200, "Requests per second."),
    redis=True,
)

if __name__ == "__main__":
    main()
