"""Hostile input from raw connections harms neither a cluster nor its other callers."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.edge.errors import ERRORS, FRAMEWORK_ERRORS
from app.local.cluster import Cluster
from app.tokens.renderer import REMEMBERED_BYTES
from tests.attack.attack import CONNECTIONS, PATIENCE_S, SLOW_S, Attack, Target, answering
from tests.attack.inputs import Surface
from tests.e2e.conftest import BLOCK_SIZE, prompt
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_binary, require_redis

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")

SEED = int(os.environ.get("KVROUTE_TEST_SEED", "1"))
"""Another one makes other inputs."""
CODES = {
    *(meaning.code for meaning in ERRORS.values()),
    *(code for code, _, _ in FRAMEWORK_ERRORS),
    *("queue_full", "path_not_supported"),
    *(meaning.kind for meaning in ERRORS.values()),
    *("not_found_error", "request_too_large", "rate_limit_error"),
}
RAW = {"content-type": "application/octet-stream"}
MAX_GROWTH_MB = 24.0
LONG_TEXTS, MOST_MB = 16, 400.0
"""Texts of 3 MB at once, and the memory that a replica may have with them."""


def probed(cluster):
    fronts = [cluster.balancer_url, *(member.url for member in cluster.routers)]
    urls = [f"{url}{path}" for url in fronts for path in ("/health", "/readiness")]
    return urls + [f"{member.url}/health" for member in cluster.workers]


def processes(cluster):
    """Name of each process of the cluster -> where /proc has it."""
    pids = {member.name: member.process.pid for member in cluster.members}
    assert cluster.redis is not None
    assert cluster.redis.pid is not None
    pids["redis"] = cluster.redis.pid
    return {name: Path(f"/proc/{pid}") for name, pid in pids.items()}


def peak_mb(pid):
    """The most resident memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def memory_mb(cluster):
    """Resident memory of each process."""
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    return {
        name: int((path / "statm").read_text().split()[1]) * page
        for name, path in processes(cluster).items()
    }


async def descriptors(cluster):
    return {name: len(os.listdir(path / "fd")) for name, path in processes(cluster).items()}


async def verified(cluster):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli", "inspect", "verify"),
        env=os.environ | {"REDIS_URL": cluster.redis_url, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()
    return text.decode()


def attacked_cluster(num_workers, num_replicas, *, haproxy, api_key=""):
    require_redis(default_kind())
    return Cluster(
        num_workers=num_workers,
        num_replicas=num_replicas,
        haproxy=haproxy,
        router=RouterSettings(
            api_key=api_key,
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


def doors_of(cluster, drawn):
    """The front doors of the balancer and of every router."""
    surface = Surface.of_door(cluster.model, drawn, SEED)
    return [
        Target("balancer", cluster.balancer_url, surface),
        *(Target(member.name, member.url, surface) for member in cluster.routers),
    ]


async def targets_of(cluster, probe, drawn, holder=None):
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


async def settled(cluster, probe):
    """Nothing is left of any request, and no process has ended."""
    await probe.all_idle(len(cluster.workers))
    await eventually(probe.reserved, lambda ids: not ids)

    async def at_work():
        reported = (await probe.workers()).values()
        return sum(w["kv_active_blocks"] + w["num_requests_waiting"] for w in reported)

    await eventually(at_work, lambda count: count == 0)
    assert cluster.ended() == {}


async def test_a_few_hostile_inputs_do_no_harm(open_probe, capfd):
    with attacked_cluster(1, 1, haproxy=None) as cluster:
        probe = open_probe(cluster)
        for targets in (await targets_of(cluster, probe, drawn=10), doors_of(cluster, drawn=10)):
            attack = Attack(targets, CODES, seed=SEED)
            async with answering(probed(cluster), attack.problems):
                await attack.send(0, 40, SLOW_S)
                await attack.send_named()
            assert attack.problems == [], f"seed {SEED}"
            await settled(cluster, probe)
    logged = "".join(capfd.readouterr())
    at = logged.find("Traceback")
    assert at < 0, logged[at : at + 7000]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("at_doors", [False, True])
async def test_ten_thousand_hostile_inputs_do_no_harm(open_probe, capfd, at_doors):
    require_binary("haproxy")
    with attacked_cluster(2, 2, haproxy=True) as cluster:
        probe = open_probe(cluster)
        known = prompt(seed=1, num_tokens=10 * BLOCK_SIZE)
        holder = await probe.complete(known)
        await eventually(lambda: probe.overlaps(known), lambda seen: seen == {holder: 10})
        targets = (
            doors_of(cluster, drawn=500)
            if at_doors
            else await targets_of(cluster, probe, drawn=500, holder=holder)
        )
        attack = Attack(targets, CODES, seed=SEED)
        async with answering(probed(cluster), attack.problems):
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
        # What the attack had computed has evicted it.
        holder = await probe.complete(known)
        await eventually(lambda: probe.overlaps(known), lambda seen: seen.get(holder) == 10)
        for front in (cluster.balancer_url, *(member.url for member in cluster.routers)):
            answer = await probe.http.post(
                f"{front}/v1/route?reserve=false", content=known, headers=RAW
            )
            choice = answer.json()
            assert (choice["worker_id"], choice["overlap_blocks"]["device"]) == (holder, 10)
    logged = "".join(capfd.readouterr())
    at = logged.find("Traceback")
    assert at < 0, logged[at : at + 7000]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_long_texts_of_many_callers_take_little_memory(open_probe):
    with attacked_cluster(1, 1, haproxy=None) as cluster:
        http = open_probe(cluster).http
        url = f"{cluster.routers[0].url}/v1/completions"
        words = {"model": cluster.model, "max_tokens": 1, "prompt": "word after word " * 190_000}

        async def ask(prompt):
            answer = await http.post(url, json=words | {"prompt": prompt}, timeout=300.0)
            return answer.status_code

        await eventually(lambda: ask("short"), lambda status: status == 200)
        statuses = await asyncio.gather(*(ask(str(words["prompt"])) for _ in range(LONG_TEXTS)))
        assert set(statuses) == {400}
        assert peak_mb(cluster.routers[0].process.pid) < MOST_MB


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_attack_as_a_program_finds_nothing_that_should_not_come_back():
    with attacked_cluster(1, 1, haproxy=None, api_key="secret") as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attack", cluster.balancer_url, "--key=secret"),
            *(f"--redis-url={cluster.redis_url}", f"--seed={SEED}", "--count=500"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        tally, problems = await process.communicate()
        assert process.returncode == 0, problems.decode()
        assert b"no key: 401" in tally
