from __future__ import annotations

import asyncio
import gc
from itertools import islice

import click
import pytest
from rich.console import Console

from app.local.redis_server import LOOPBACK, EmbeddedRedis
from loadtest.bench_decision import (
    CONCURRENCY,
    CURVE,
    NUM_PROMPTS,
    Connection,
    measure,
    names,
    shapes,
    show,
)

pytestmark = pytest.mark.slow


def test_replicas_are_measured_alongside_a_bare_endpoint(own_redis_server: EmbeddedRedis) -> None:
    found = measure(own_redis_server.url, requests=64, rounds=1, replicas=(1, 2))
    assert list(found["one"]) == [shape.name for shape in shapes()]
    assert list(found["replicas"]) == list(CURVE)
    for by_concurrency in found["one"].values():
        assert list(by_concurrency) == [str(n) for n in CONCURRENCY]
    for by_count in found["replicas"].values():
        assert list(by_count) == ["1", "2"]
        assert all(made["scripts_us"] > 0 for made in by_count.values())
    for columns in [*found["one"].values(), *found["replicas"].values()]:
        for made in columns.values():
            assert made["per_s"] > 0
            assert 0 < made["p50_ms"] <= made["p99_ms"]
    console = Console(record=True, width=200)
    show(found, console)
    assert "bare endpoint, token ids" in console.export_text()


@pytest.mark.parametrize("connections", [1, 8, 32, 128])
def test_no_two_connections_share_a_name_and_reservations_stay_constant(connections: int) -> None:
    of_each = [set(islice(names(n, connections), 200)) for n in range(connections)]
    together = set[int]().union(*of_each)
    assert sum(map(len, of_each)) == len(together) == max(NUM_PROMPTS, connections)


def test_cpu_times_too_short_to_measure_are_not_compared() -> None:
    made = {"per_s": 9.0, "cpu_us": 0.0, "p50_ms": 1.0, "p99_ms": 1.0}
    console = Console(record=True, width=200)
    show({"one": {"a shape": {"1": made}}, "replicas": {}}, console)
    (row,) = (line for line in console.export_text().splitlines() if "a shape" in line)
    assert row.split("│")[5].strip() == "-"


async def test_a_decision_made_without_redis_is_an_error() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b'{"policy":"latency","degraded":true,"reserved":false}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, LOOPBACK, 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        with pytest.raises(click.ClickException, match="without Redis"):
            await connection.ask(shapes()[0].request(0, 0))
        connection.close()


async def test_a_connection_over_which_nothing_was_asked_ends_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        to.close()
        ended.set()

    async with await asyncio.start_server(hang_up, LOOPBACK, 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        await ended.wait()
        connection.close()
        await asyncio.sleep(0)
    del connection
    gc.collect()
    assert caplog.records == []
