"""Calls of one warm request in a router, by package: whoever adds some says why here."""

import asyncio

from app.http.server import run
from app.local.redis_server import LOOPBACK
from loadtest.bench_door import counted_shapes, register, settings_of
from loadtest.instant_engine import engine_forever, word_tokenizer
from loadtest.processes import CORES
from loadtest.request_counts import counts_of
from loadtest.servers import server, until_open

PACKAGES = ("http", "core", "edge", "door", "router", "policy", "tokens", "state")
MOST = {
    "streamed chat": dict(zip(PACKAGES, (137, 84, 34, 164, 115, 100, 40, 104), strict=True)),
    "/v1/route, 2,048 ids": dict(zip(PACKAGES, (66, 74, 28, 3, 70, 94, 0, 84), strict=True)),
}


def test_a_warm_request_calls_no_more_than_it_did(one_redis_server):
    url = one_redis_server.url
    with word_tokenizer() as tokenizer, server(engine_forever, tokenizer, CORES[0]) as engine:
        asyncio.run(register(url, f"http://{LOOPBACK}:{engine.port}"))
        run(until_open(engine.port))
        counts = counts_of(settings_of(url, tokenizer), counted_shapes())
    for shape, most in MOST.items():
        calls = counts[shape]["packages"]
        over = {package: n for package, n in calls.items() if n > most.get(package, 0)}
        assert not over, f"{shape}: {over} calls, where {most} is what there was"
        assert sum(calls.values()) > 0.8 * sum(most.values()), f"{shape}: {calls}: lower the bounds"
        assert (counts[shape]["tasks"], counts[shape]["timers"]) <= (4, 7)
