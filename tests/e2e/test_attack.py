"""Hostile input from raw connections harms neither a cluster nor its other callers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import httpx
import pytest

from app.core.config import RouterSettings, WorkerSettings
from app.door.tokens.renderer import REMEMBERED_BYTES
from app.edge.errors import ERRORS
from app.local.cluster import Cluster
from app.ops.reference import FRAMEWORK_ERRORS
from loadtest.bench_bodies import MAX_BYTES, hostile_bodies
from tests.e2e.conftest import BLOCK_SIZE, OpenProbe, Probe, prompt
from tests.e2e.hostile_inputs import Hostile, Surface, hostile, request
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_binary, require_redis

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")

SEED = int(os.environ.get("KVROUTE_TEST_SEED", "1"))
"""Another one makes other inputs."""
CONNECTIONS = 16
"""Open at once; those on which the server waits for the rest of a request come on top."""
SLOW_S = 0.5
PATIENCE_S = 40.0
"""Servers wait for 30 s at most."""
PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that resets a connection on closing."""
CODES = {
    *(meaning.code for meaning in ERRORS.values()),
    *(code for code, _, _ in FRAMEWORK_ERRORS),
    "queue_full",
    *(meaning.kind for meaning in ERRORS.values()),
    *("not_found_error", "request_too_large", "rate_limit_error"),
}
"""Of errors, as docs/api.md and docs/client.md list them."""
RAW = {"content-type": "application/octet-stream"}
MAX_GROWTH_MB = 24.0


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes = b""
    complete: bool = False

    @property
    def code(self) -> str | None:
        """The code of an error in our own shape, or its type where a client expects no code."""
        try:
            error = json.loads(self.body)["error"]
            return str(error.get("code") or error["type"])
        except (ValueError, KeyError, TypeError):
            return None


class Answers:
    """Reads what comes back on one connection; raises what is not HTTP."""

    def __init__(self) -> None:
        self.seen: list[Answer] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.seen.append(Answer(self._parser.get_status_code()))

    def on_body(self, body: bytes) -> None:
        self.seen[-1].body += body

    def on_message_complete(self) -> None:
        self.seen[-1].complete = True
        if self.seen[-1].status == 100:
            self.seen.pop()


async def exchange(address: tuple[str, int], sent: Hostile, patience_s: float) -> list[Answer]:
    """What a connection is answered. Raises HttpParserError if that is not HTTP."""
    answers = Answers()
    reader, writer = await asyncio.open_connection(*address)
    writing = asyncio.create_task(_write(writer, sent.parts))
    try:
        if sent.ending in ("hang up", "reset"):
            await writing
            if sent.ending == "reset":
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return []
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(patience_s if sent.ending == "wait" else PATIENCE_S):
                while data := await reader.read(1 << 16):
                    answers.feed(data)
        return answers.seen
    finally:
        writing.cancel()
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writing
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _write(writer: asyncio.StreamWriter, parts: tuple[bytes, ...]) -> None:
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)


@dataclass(slots=True)
class Target:
    name: str
    url: str
    surface: Surface

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


@dataclass(slots=True)
class Attack:
    """Sends inputs to all targets in turn, and notes what should not have come back."""

    targets: list[Target]
    problems: list[str] = field(default_factory=list)
    tally: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    async def send(self, first: int, count: int, patience_s: float) -> None:
        """patience_s: how long to wait for servers that wait for the rest of a request."""
        numbers = iter(range(first, first + count))
        async with asyncio.TaskGroup() as group:

            async def some() -> None:
                for number in numbers:
                    target = self.targets[number % len(self.targets)]
                    sent = hostile(SEED, number, target.surface)
                    one = group.create_task(
                        self._try_one(f"input {number}", target, sent, patience_s)
                    )
                    await asyncio.wait([one], timeout=SLOW_S)

            for _ in range(CONNECTIONS):
                group.create_task(some())

    async def send_largest(self) -> None:
        """Bodies as large as a router takes."""
        for name, body in hostile_bodies(MAX_BYTES):
            for target in self.targets:
                path = sorted(target.surface.bodies)[-1]
                sent = Hostile((request("POST", path, body),), kind="largest")
                await self._try_one(f"body {name!r}", target, sent, PATIENCE_S)

    async def _try_one(self, what: str, target: Target, sent: Hostile, patience_s: float) -> None:
        try:
            answers = await exchange(target.address, sent, patience_s)
        except (httptools.HttpParserError, OSError) as error:
            answers, wrong = [], [repr(error)]
        else:
            wrong = list(_wrong(target, sent, answers))
        outcome = " ".join(sorted({str(a.status) for a in answers})) or sent.ending
        self.tally[target.name, sent.kind, outcome] += 1
        for each in wrong:
            begin = b"".join(sent.parts)[:200]
            self.problems.append(f"{target.name}: {sent.kind}, {what}: {each}; sent {begin!r}")


def _wrong(target: Target, sent: Hostile, answers: list[Answer]) -> Iterator[str]:
    if sent.ending == "read" and not answers:
        yield "no answer"
    for answer in answers:
        shown = f"{answer.status} {answer.body[:200]!r}"
        excluded = answer.code == "no_workers" and sent.may_exclude_all
        if answer.status >= 500 and not excluded:
            yield shown
        # HAProxy answers in its own words what it cannot read.
        by_haproxy = target.name == "balancer" and answer.body.startswith(b"<html>")
        if answer.status >= 400 and answer.body and answer.code not in CODES and not by_haproxy:
            yield f"an error of another shape: {shown}"


@asynccontextmanager
async def answering(cluster: Cluster, problems: list[str]) -> AsyncIterator[None]:
    """Meanwhile, every part of the cluster must say that it is well."""
    fronts = [cluster.balancer_url, *(member.url for member in cluster.routers)]
    urls = [f"{url}{path}" for url in fronts for path in ("/health", "/readiness")]
    urls += [f"{member.url}/health" for member in cluster.workers]

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S) as http:
            for url in itertools.cycle(urls):
                try:
                    answer = await http.get(url, headers={"connection": "close"})
                    if answer.status_code != 200:
                        problems.append(f"{url}: {answer.status_code} {answer.text}")
                except httpx.HTTPError as error:
                    problems.append(f"{url}: {error!r}")
                await asyncio.sleep(PROBE_INTERVAL_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


def processes(cluster: Cluster) -> dict[str, Path]:
    """Name of each process of the cluster -> where /proc has it."""
    pids = {member.name: member.process.pid for member in cluster.members}
    assert cluster.redis is not None
    assert cluster.redis.pid is not None
    pids["redis"] = cluster.redis.pid
    return {name: Path(f"/proc/{pid}") for name, pid in pids.items()}


def memory_mb(cluster: Cluster) -> dict[str, float]:
    """Resident memory of each process."""
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    return {
        name: int((path / "statm").read_text().split()[1]) * page
        for name, path in processes(cluster).items()
    }


async def descriptors(cluster: Cluster) -> dict[str, int]:
    return {name: len(os.listdir(path / "fd")) for name, path in processes(cluster).items()}


async def verified(cluster: Cluster) -> str:
    """What `kvroute inspect verify` prints; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli", "inspect", "verify"),
        env=os.environ | {"REDIS_URL": cluster.redis_url, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()
    return text.decode()


def attacked_cluster(num_workers: int, num_replicas: int, *, haproxy: bool | None) -> Cluster:
    require_redis(default_kind())
    return Cluster(
        num_workers=num_workers,
        num_replicas=num_replicas,
        haproxy=haproxy,
        router=RouterSettings(
            # Nobody releases what an attacker reserved.
            reservation_ttl_s=0.5,
            prefill_ttl_s=0.5,
            # As many as the warm-up makes, so that what Redis holds grows no more after it.
            decisions_kept=256,
            # An attacked machine may be slow.
            redis_timeout_ms=5000,
            log_level="warning",
        ),
        worker=WorkerSettings(
            speedup=1000.0,
            block_size=BLOCK_SIZE,
            kv_pool_tokens=8192 * BLOCK_SIZE,
            log_level="warning",
        ),
    )


def doors_of(cluster: Cluster, drawn: int) -> list[Target]:
    """The front doors of the balancer and of every router."""
    surface = Surface.of_door(cluster.model, drawn, SEED)
    return [
        Target("balancer", cluster.balancer_url, surface),
        *(Target(member.name, member.url, surface) for member in cluster.routers),
    ]


async def targets_of(
    cluster: Cluster, probe: Probe, drawn: int, holder: str | None = None
) -> list[Target]:
    """The balancer, every router and a worker other than `holder`.

    What a worker under attack had cached is evicted: prompts that it serves fill it seven times.
    """
    openapi = (await probe.http.get("/openapi.json")).json()
    router = Surface.of_router(openapi, drawn, SEED)
    worker = next(member for member in cluster.workers if member.name != f"worker {holder}")
    return [
        Target("balancer", cluster.balancer_url, router),
        *(Target(member.name, member.url, router) for member in cluster.routers),
        Target("worker", worker.url, Surface.of_worker(drawn, SEED)),
    ]


async def settled(cluster: Cluster, probe: Probe) -> None:
    """Nothing is left of any request, and no process has ended."""
    await probe.all_idle(len(cluster.workers), within_s=30.0)
    await eventually(probe.reserved, lambda ids: not ids)

    async def at_work() -> int:
        reported = (await probe.workers()).values()
        return sum(w["kv_active_blocks"] + w["num_requests_waiting"] for w in reported)

    await eventually(at_work, lambda count: count == 0)
    assert cluster.ended() == {}


@pytest.mark.parametrize("at_doors", [False, True])
async def test_a_few_hostile_inputs_do_no_harm(
    open_probe: OpenProbe, capfd: pytest.CaptureFixture[str], at_doors: bool
) -> None:
    with attacked_cluster(1, 1, haproxy=None) as cluster:
        probe = open_probe(cluster)
        attack = Attack(
            doors_of(cluster, drawn=20) if at_doors else await targets_of(cluster, probe, drawn=20)
        )
        async with answering(cluster, attack.problems):
            await attack.send(0, 200, SLOW_S)
        assert attack.problems == [], f"seed {SEED}"
        await settled(cluster, probe)
    logged = "".join(capfd.readouterr())
    at = logged.find("Traceback")
    assert at < 0, logged[at : at + 7000]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at_doors", [False, True])
async def test_ten_thousand_hostile_inputs_do_no_harm(
    open_probe: OpenProbe, capfd: pytest.CaptureFixture[str], at_doors: bool
) -> None:
    require_binary("haproxy")
    with attacked_cluster(2, 2, haproxy=True) as cluster:
        probe = open_probe(cluster)
        known = prompt(seed=1, num_tokens=10 * BLOCK_SIZE)
        holder = await probe.complete(known)
        await eventually(lambda: probe.overlaps(known), lambda seen: seen == {holder: 10})
        attack = Attack(
            doors_of(cluster, drawn=500)
            if at_doors
            else await targets_of(cluster, probe, drawn=500, holder=holder)
        )
        async with answering(cluster, attack.problems):
            await asyncio.gather(attack.send(0, 2_000, SLOW_S), attack.send_largest())
            await settled(cluster, probe)
            memory, opened = memory_mb(cluster), await descriptors(cluster)
            await asyncio.gather(attack.send(2_000, 8_000, PATIENCE_S), attack.send_largest())
        assert attack.problems == [], f"seed {SEED}"
        await settled(cluster, probe)
        growth = {name: mb - memory[name] for name, mb in memory_mb(cluster).items()}
        with capfd.disabled():
            for key, n in sorted(attack.tally.items()):
                print(*key, n)  # noqa: T201 - figures of the run
            print(memory, growth, opened, await descriptors(cluster))  # noqa: T201 - figures of the run
        # Doors remember the ids of texts.
        allowed = MAX_GROWTH_MB + (REMEMBERED_BYTES / 1e6 if at_doors else 0.0)
        assert max(growth.values()) < allowed, f"seed {SEED}: {growth}"
        # Redis and HAProxy keep as many connections open as were in use at once.
        await eventually(
            lambda: descriptors(cluster),
            lambda seen: all(count <= opened[name] + CONNECTIONS for name, count in seen.items()),
        )
        assert "no contradictions found" in await verified(cluster)
        for front in (cluster.balancer_url, *(member.url for member in cluster.routers)):
            answer = await probe.http.post(
                f"{front}/v1/route?reserve=false", content=known, headers=RAW
            )
            choice = answer.json()
            assert (choice["worker_id"], choice["overlap_blocks"]["device"]) == (holder, 10)
    logged = "".join(capfd.readouterr())
    at = logged.find("Traceback")
    assert at < 0, logged[at : at + 7000]
