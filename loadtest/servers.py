"""Servers, each on a core of its own, and what a run of requests costs them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, repeat
from multiprocessing import get_context
from statistics import median
from typing import Any

import click
import httptools
import numpy as np
import stamina
import stamina.instrumentation

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from app.local.redis_server import LOOPBACK, free_port
from app.state.connect import connect
from loadtest.processes import CORES, cpu_s

NUM_PROMPTS = 64

# A log line for each attempt, while a server starts, would clutter the figures.
stamina.instrumentation.set_on_retry_hooks(())


@dataclass(frozen=True)
class Shape:
    """One form of request. bodies: one for each prompt, in order."""

    name: str
    bodies: Sequence[bytes]
    content_type: str = "application/json"
    bare: bool = False
    path: str = "/v1/route"

    def request(self, turn: int, name: int) -> bytes:
        """Returns the bytes of HTTP. turn: which of the bodies, over and over. name: of the
        balancer's."""
        body = self.bodies[turn % len(self.bodies)]
        return (
            b"POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: %s\r\nX-Request-ID: r%d\r\n"
            b"X-Balancer-ID: r%d\r\nContent-Length: %d\r\n\r\n%s"
            % (self.path.encode(), self.content_type.encode(), name, name, len(body), body)
        )


def server_core(n: int) -> int:
    """The core of the n-th server: any but the first, as long as there are others."""
    others = CORES[1:] or CORES
    return others[-1 - n % len(others)]


@dataclass(frozen=True)
class Server:
    pid: int
    port: int


@contextmanager
def server(target: Callable[[str, int], None], redis_url: str, core: int) -> Iterator[Server]:
    """A server process, pinned to a core."""
    port = free_port()
    process = get_context("spawn").Process(target=target, args=(redis_url, port), daemon=True)
    process.start()
    assert process.pid is not None
    os.sched_setaffinity(process.pid, {core})
    try:
        yield Server(process.pid, port)
    finally:
        process.terminate()
        process.join(timeout=10)


@contextmanager
def routers(number: int, redis_url: str, **settings: Any) -> Iterator[list[str]]:
    """The URLs of so many router processes, which are on any core. settings: of theirs."""
    with Cluster(
        num_workers=0,
        num_replicas=number,
        # A router that does not wait for Redis on a busy machine decides without it.
        router=RouterSettings(redis_timeout_ms=5000, log_level="warning", **settings),
        worker=WorkerSettings(),
        redis_url=redis_url,
        haproxy=False,
    ) as cluster:
        yield [member.url for member in cluster.routers]


class Connection(asyncio.Protocol):
    """A kept-alive connection to a server. aiohttp's client would take longer for a request than a
    decision does, on the core that it shares with Redis."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, port: int) -> Connection:
        async for attempt in stamina.retry_context(
            on=ConnectionRefusedError, attempts=None, timeout=120
        ):
            with attempt:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(partial(cls, port), LOOPBACK, port)
        return connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self._answer.set_result(self._body)
        self._body = b""

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server hung up"))

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    async def ask(self, request: bytes) -> None:
        """Raises ClickException for any answer but 200 and for a decision made without Redis;
        ConnectionResetError if the server has hung up."""
        if not self.is_open:
            raise ConnectionResetError("the server has hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        body = await self._answer
        if self._parser.get_status_code() != 200:
            raise click.ClickException(f"{self._parser.get_status_code()}: {body.decode()}")
        if b'"degraded":true' in body:
            raise click.ClickException("decided without Redis: the machine is too busy to measure")

    def close(self) -> None:
        self._transport.close()


async def until_open(port: int) -> None:
    (await Connection.open(port)).close()


async def until_serving(port: int, shape: Shape) -> None:
    """Waits for an answer: a router knows its workers, and decides by Redis, only a while after it
    is open."""
    one = replace(shape, bodies=shape.bodies[:1])
    async with asyncio.timeout(120):
        while True:
            connection = await Connection.open(port)
            try:
                return await connection.ask(one.request(0, 0))
            except (click.ClickException, ConnectionResetError):
                await asyncio.sleep(0.2)
            finally:
                connection.close()


@dataclass(frozen=True)
class Load:
    """The cost of a run of requests: seconds for each and for all; CPU seconds of the servers, of
    Redis and of the client; the seconds that Redis spent in scripts; the commands that Redis ran,
    also in scripts; and the bytes that Redis read and wrote."""

    latencies: list[float]
    wall_s: float
    servers_s: float
    redis_s: float
    scripts_s: float
    commands: float
    bytes: float
    client_s: float


async def load(
    servers: Sequence[Server],
    redis_url: str,
    shape: Shape,
    concurrency: int,
    requests: int,
) -> Load:
    latencies: list[float] = []
    turns = iter(range(requests))

    async def ask(connection: Connection, names: Iterator[int]) -> None:
        for turn, name in zip(turns, names, strict=False):
            request = shape.request(turn, name)
            if not connection.is_open:  # servers end those that say nothing for a while
                connection = await Connection.open(connection.port)
                connections.append(connection)
            begin = time.perf_counter()
            await connection.ask(request)
            latencies.append(time.perf_counter() - begin)

    async with connect(redis_url) as redis:

        async def used() -> list[float]:
            cpu, calls = await redis.info("cpu"), await redis.info("commandstats")
            stats = await redis.info("stats")
            return [
                time.perf_counter(),
                sum(cpu_s(server.pid) for server in servers),
                cpu["used_cpu_user"] + cpu["used_cpu_sys"],
                calls.get("cmdstat_evalsha", {"usec": 0})["usec"] / 1e6,
                sum(one["calls"] for one in calls.values()),
                stats["total_net_input_bytes"] + stats["total_net_output_bytes"],
                time.process_time(),
            ]

        ports = [servers[n % len(servers)].port for n in range(concurrency)]
        connections = [await Connection.open(port) for port in ports]
        before = await used()
        await asyncio.gather(
            *map(ask, connections, map(names, range(concurrency), repeat(concurrency)))
        )
        after = await used()
        for connection in connections:
            connection.close()
    return Load(latencies, *(b - a for a, b in zip(before, after, strict=True)))


def names(connection: int, connections: int) -> Iterator[int]:
    """Yields the names of one connection, over and over: of all together NUM_PROMPTS, or one of
    each."""
    return cycle(range(connection, max(NUM_PROMPTS, connections), connections))


def figures(loads: Sequence[Load]) -> dict[str, float]:
    """Medians over the rounds: rate, CPU per request (µs), latency (ms), and how busy each was."""

    def middle(of: Callable[[Load], float]) -> float:
        return median(map(of, loads))

    return {
        "per_s": middle(lambda made: len(made.latencies) / made.wall_s),
        "cpu_us": middle(lambda made: made.servers_s / len(made.latencies) * 1e6),
        "p50_ms": middle(lambda made: float(np.percentile(made.latencies, 50)) * 1000),
        "p99_ms": middle(lambda made: float(np.percentile(made.latencies, 99)) * 1000),
        "redis_us": middle(lambda made: made.redis_s / len(made.latencies) * 1e6),
        "scripts_us": middle(lambda made: made.scripts_s / len(made.latencies) * 1e6),
        "commands": middle(lambda made: made.commands / len(made.latencies)),
        "bytes": middle(lambda made: made.bytes / len(made.latencies)),
        "servers_busy": middle(lambda made: made.servers_s / made.wall_s),
        "redis_busy": middle(lambda made: made.redis_s / made.wall_s),
        "client_busy": middle(lambda made: made.client_s / made.wall_s),
    }
