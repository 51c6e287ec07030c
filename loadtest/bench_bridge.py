"""An agent beside a vLLM: its cost, and its delay from the bytes on the socket to Redis.

    python -m loadtest.bench_bridge --json out/bench_bridge.json

A process publishes as vLLM does, and the agent's own parts read it, translate it and publish it:
chains that are stored, then removed. For the idle figure `kvroute
agent` runs beside that process. The namespaces are deleted at the end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import orjson
import zmq.asyncio
from aiohttp import web
from redis import Redis
from rich.console import Console

from app.core.chains import GROUP_BLOCKS, bucket_name
from app.core.hashing import compute_local_hashes, compute_sequence_hashes
from app.core.keys import Keyspace
from app.core.types import SequenceHash, WorkerKey
from app.core.worker_report import WorkerInfo
from app.http.server import collect_seldom, run
from app.ops.namespaces import delete_namespace
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.bench_engines import agent_beside
from loadtest.command import option
from loadtest.harness import bench, percentiles
from loadtest.holders import BLOCK_SIZE
from loadtest.processes import CORES, child, cpu_s, received
from workers.agent.agent import AgentSettings
from workers.bridge.events.events import BlockRemoved, BlockStored
from workers.bridge.events.vllm import encode
from workers.bridge.health import EngineHealth
from workers.bridge.http.facts import EngineFacts, EventSource
from workers.bridge.rank import Rank
from workers.bridge.speed import EngineSpeed

KEYS = Keyspace("bench-bridge")
CHAIN_BLOCKS = 64
SEEN_CHAINS = 400
SEEN_PER_S = 5_000
IDLE_S = 20.0
POLL_S = 0.002
LOOK_S = 0.0002
DEADLINE_S = 120.0


def tokens_of(chain: int) -> list[int]:
    rng = np.random.default_rng(chain)
    tokens: list[int] = rng.integers(0, 128_000, CHAIN_BLOCKS * BLOCK_SIZE).tolist()
    return tokens


def names_of(chain: int) -> list[bytes]:
    """Returns the engine's names of the blocks: 32 bytes each, as with vLLM's sha256."""
    rng = np.random.default_rng((chain, 1))
    return [rng.bytes(32) for _ in range(CHAIN_BLOCKS)]


def hashes_of(chain: int) -> list[SequenceHash]:
    return compute_sequence_hashes(compute_local_hashes(tokens_of(chain), BLOCK_SIZE))


class Publisher:
    """Publishes as vLLM does, but keeps nothing that could be asked for again."""

    def __init__(self) -> None:
        context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
        self._pub, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._pub.set_hwm(0)
        at = "tcp://127.0.0.1"
        self.ports = [each.bind_to_random_port(at) for each in (self._pub, self._replay)]
        self._number = 0
        self._is_heard = False

    async def heard(self) -> None:
        """Waits until somebody has subscribed: what is published before that is lost."""
        if not self._is_heard:
            await self._pub.recv()
            self._is_heard = True

    async def publish(
        self, batches: Sequence[BlockStored | BlockRemoved], per_s: float
    ) -> list[float]:
        """Sends `per_s` blocks a second at most; returns when each batch was sent."""
        sent: list[float] = []
        due = time.perf_counter()
        for batch in batches:
            await asyncio.sleep(due - time.perf_counter())
            due += CHAIN_BLOCKS / per_s
            sent.append(time.perf_counter())
            number = self._number.to_bytes(8, "big")
            await self._pub.send_multipart((b"", number, encode(time.time(), [batch])))
            self._number += 1
        return sent

    async def answer(self) -> None:
        while True:
            asked = await self._replay.recv_multipart()
            await self._replay.send_multipart((asked[0], b"", b"", b"\xff" * 8, b""))


def engine(to: Connection) -> None:
    """Publishes, in a process of its own, what `to` asks for, and answers with when each was sent,
    in seconds on time.perf_counter."""

    async def serve() -> None:
        publisher = Publisher()
        answering = asyncio.ensure_future(publisher.answer())
        runner = web.AppRunner(_app(*publisher.ports), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        to.send((*publisher.ports, runner.addresses[0][1]))
        while (asked := await asyncio.to_thread(to.recv)) is not None:
            kind, chains, per_s = asked
            batches = [
                BlockStored(names_of(n), None, tokens_of(n), BLOCK_SIZE, medium="GPU")
                if kind == "stored"
                else BlockRemoved(names_of(n)[::-1], "GPU")
                for n in chains
            ]
            await publisher.heard()
            to.send(None)
            await asyncio.to_thread(to.recv)
            to.send(await publisher.publish(batches, per_s))
        answering.cancel()

    run(serve())


def _app(events_port: int, replay_port: int) -> web.Application:
    labels = 'engine="0",model_name="m"'
    shown = (
        f"process_start_time_seconds {time.time()}\n"
        f'vllm:cache_config_info{{{labels},block_size="{BLOCK_SIZE}",enable_prefix_caching="True",'
        f'num_gpu_blocks="10000"}} 1.0\n'
        f"vllm:num_requests_running{{{labels}}} 0.0\n"
    )
    card = {"id": "m", "owned_by": "vllm", "max_model_len": 32_768}
    source: dict[str, object] = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    source |= {"endpoint": f"tcp://*:{events_port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    answers: dict[str, bytes] = {
        "/health": b"",
        "/version": orjson.dumps({"version": "0.33.0"}),
        "/v1/models": orjson.dumps({"object": "list", "data": [card]}),
        "/kv_event_sources": orjson.dumps({"0": source}),
        "/metrics": shown.encode(),
    }

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=answers[request.path])

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in answers])
    return app


class Engine:
    """The process that publishes. url: where it says what it is."""

    def __init__(self, to: Connection, source: EventSource, url: str) -> None:
        self.source, self.url = source, url
        self._to = to

    async def prepare(self, kind: str, chains: Sequence[int], per_s: float) -> None:
        """per_s: blocks that it will publish in a second, at most."""
        self._to.send((kind, chains, per_s))
        await asyncio.to_thread(received, self._to)

    def go(self) -> None:
        self._to.send(None)

    async def sent(self) -> list[float]:
        times: list[float] = await asyncio.to_thread(received, self._to)
        return times


@contextmanager
def running_engine() -> Iterator[Engine]:
    with child(engine) as to:
        events, replay, port = received(to)
        at = "127.0.0.1"
        source = EventSource(0, f"tcp://{at}:{events}", f"tcp://{at}:{replay}")
        yield Engine(to, source, f"http://{at}:{port}")


@asynccontextmanager
async def running_rank(url: str, source: EventSource, blocks: int) -> AsyncIterator[Rank]:
    """A rank whose engine has said that nothing is held yet. blocks: that it may hold."""
    facts = EngineFacts(
        kind="vllm",
        version="",
        models=("m",),
        adapters=(),
        max_model_len=None,
        block_size=BLOCK_SIZE,
        capacity_tokens=blocks * BLOCK_SIZE,
        reuse_tokens=BLOCK_SIZE,
        recomputed_tokens=0,
        sources=(source,),
        announces_copies=True,
        started_s=None,
    )
    context = zmq.asyncio.Context()
    async with connect(url) as redis:
        rank = Rank(
            context,
            source,
            facts,
            WorkerInfo(WorkerKey("w0"), "http://127.0.0.1:1", BLOCK_SIZE, blocks, 256),
            AgentSettings(lease_ttl_s=60.0, index_blocks=blocks),
            ScriptRunner(redis, timeout_s=10.0),
            KEYS,
            EngineSpeed(blocks * BLOCK_SIZE),
            EngineHealth(0.0, stall_s=0.0),
            None,
        )
        collect_seldom()  # as agents do
        running = asyncio.create_task(rank.run())
        try:
            await _until(lambda: rank.agent.incarnation is not None)
            yield rank
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            context.destroy(linger=0)
            await delete_namespace(redis, KEYS)


async def published_per_s(url: str, chains: int) -> dict[str, float]:
    """Blocks a second from the engine's first batch until all are in Redis, in bursts. The agent is
    on a core that neither Redis nor the engine is on, if there is another."""
    figures: dict[str, float] = {}
    with running_engine() as published:
        os.sched_setaffinity(0, CORES[-1:])
        async with running_rank(url, published.source, chains * CHAIN_BLOCKS) as rank:
            for number, kind in enumerate(("stored", "removed"), 1):
                await published.prepare(kind, range(chains), float("inf"))
                begin = time.perf_counter()
                published.go()
                await _until_published(rank, number * chains)
                figures[kind] = chains * CHAIN_BLOCKS / (time.perf_counter() - begin)
                await published.sent()
    return figures


async def _until_published(rank: Rank, batches: int) -> None:
    stream, last = rank.stream, batches - 1
    assert stream is not None
    await _until(lambda: stream.position is not None and stream.position.seq == last)
    assert await rank.agent.published(), "Redis cannot be reached"


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(POLL_S)


def watch(to: Connection, url: str, chains: Sequence[Sequence[SequenceHash]]) -> None:
    """Sends, from a process of its own, the times at which each chain's last block was seen, in
    seconds on time.perf_counter, which counts alike in all processes."""
    shard = KEYS.of_shard(0)
    with Redis.from_url(url) as redis:
        bits = int(redis.hget(shard["shard"], "bucket_bits") or 0)
        seen: list[float] = []
        to.send(None)
        for chain in chains:
            last = len(chain) - 1
            leader = chain[last - last % GROUP_BLOCKS]
            key = shard[f"blocks:{bucket_name(leader >> (64 - bits), bits)}"]
            while not redis.hexists(key, f"{chain[last]:016x}"):
                time.sleep(LOOK_S)
            seen.append(time.perf_counter())
        to.send(seen)


async def visible_ms(url: str) -> dict[str, float]:
    """Time from an engine's batch until another process sees its last block in Redis, ms."""
    chains = range(SEEN_CHAINS)
    with running_engine() as published:
        os.sched_setaffinity(0, CORES)
        async with running_rank(url, published.source, SEEN_CHAINS * CHAIN_BLOCKS):
            await published.prepare("stored", chains, SEEN_PER_S)
            with child(watch, url, [hashes_of(chain) for chain in chains]) as watcher:
                await asyncio.to_thread(received, watcher)
                published.go()
                sent = await published.sent()
                seen = await asyncio.to_thread(received, watcher)
    return percentiles(np.subtract(seen, sent) * 1000, 50, 90, 99)


def idle_share(url: str) -> float:
    """CPU of `kvroute agent` beside an engine without requests, as a share of one core."""
    os.sched_setaffinity(0, CORES)
    with running_engine() as beside, agent_beside(beside.url, url, KEYS.namespace, "w0") as agent:
        time.sleep(2.0)  # what is done once is done
        before = cpu_s(agent)
        time.sleep(IDLE_S)
        return (cpu_s(agent) - before) / IDLE_S


async def measure(url: str, chains: int) -> dict[str, Any]:
    """chains: how many are published in bursts, of CHAIN_BLOCKS each."""
    return {
        "blocks": chains * CHAIN_BLOCKS,
        "published_per_s": await published_per_s(url, chains),
        "visible_ms": await visible_ms(url),
        "idle_share": await asyncio.to_thread(idle_share, url),
    }


def show(result: dict[str, Any], console: Console) -> None:
    rates = result["published_per_s"]
    console.print(
        f"Blocks a second from the socket to Redis, agent on one core: {rates['stored']:,.0f} "
        f"stored, {rates['removed']:,.0f} removed"
    )
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in result["visible_ms"].items())
    console.print(f"From a batch until its blocks are seen, at {SEEN_PER_S:,}/s: {shown} ms")
    console.print(f"CPU of an agent whose engine is idle: {result['idle_share']:.1%} of a core")


main = bench(
    measure,
    show,
    option("--chains", 2_000, f"Of {CHAIN_BLOCKS} blocks, that are published in bursts."),
    redis=True,
)

if __name__ == "__main__":
    main()
