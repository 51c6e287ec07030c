"""A cluster of real processes: how it starts, serves and stops."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from redis import Redis

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster, ClusterError
from tests.e2e.conftest import listens, prompt, small_cluster
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_binary, require_redis

BALANCERS = [pytest.param("haproxy", marks=pytest.mark.slow), "shared socket"]


def with_balancer(kind, *, num_workers, num_replicas):
    if kind == "haproxy":
        require_binary("haproxy")
    return small_cluster(
        num_workers=num_workers, num_replicas=num_replicas, haproxy=kind == "haproxy"
    )


@pytest.fixture(scope="module", params=BALANCERS)
def cluster(request):
    """Two workers and two replicas behind each kind of balancer; do not kill any."""
    with with_balancer(request.param, num_workers=2, num_replicas=2) as started:
        assert started.redis is not None
        pids = [member.process.pid for member in started.members] + [started.redis.pid or 0]
        urls = [member.url for member in started.members]
        urls += [started.balancer_url, started.redis_url]
        assert all(map(exists, pids))
        assert all(map(listens, urls))
        yield started
    # A closed cluster leaves no process and no open port.
    assert [pid for pid in pids if exists(pid)] == []
    assert [url for url in urls if listens(url)] == []
    # They stopped when asked; none had to be killed.
    statuses = {m.name: m.process.returncode for m in [*started.workers, *started.routers]}
    assert set(statuses.values()) == {0}, statuses


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_started_cluster_has_all_its_workers_and_no_reservations(cluster, open_probe):
    workers = await open_probe(cluster).workers()
    assert {name: w["address"] for name, w in workers.items()} == {
        f"w{i}": member.url for i, member in enumerate(cluster.workers)
    }
    assert {name: w["kv_total_blocks"] for name, w in workers.items()} == {"w0": 1024, "w1": 1024}
    await open_probe(cluster).all_idle(2)


async def test_a_request_runs_from_routing_to_release(cluster, open_probe):
    probe = open_probe(cluster)
    tokens = prompt(seed=1, num_tokens=10 * 16 + 5)
    choice = await probe.route(tokens, request_id="req-1")
    name = choice["worker_id"]
    assert (choice["isl_tokens"], choice["isl_blocks"]) == (165, 11)
    assert choice["overlap_blocks"] == {"device": 0, "host": 0, "disk": 0}
    assert choice["reserved"] is True
    assert (await probe.loads())[name] == (1, 11, 165)

    answer = await probe.http.post(
        f"{choice['address']}/v1/completions?max_tokens=3&request_id=req-1",
        content=tokens,
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.json()["usage"]["prompt_tokens"] == 165
    assert len(answer.json()["choices"][0]["token_ids"]) == 3

    confirmed = await probe.http.post("/v1/requests/req-1/prefill_complete")
    assert confirmed.json() == {"request_id": "req-1", "found": True}
    assert (await probe.loads())[name] == (1, 11, 0)
    assert await probe.release("req-1")
    assert not await probe.release("req-1")
    assert (await probe.loads())[name] == (0, 0, 0)

    # From now on that worker holds the prompt's ten full blocks, which attract the same prompt.
    assert await eventually(lambda: probe.overlaps(tokens)) == {name: 10}
    again = await probe.route(tokens, reserve="false")
    assert (again["worker_id"], again["overlap_blocks"]["device"]) == (name, 10)


async def test_every_replica_sees_what_any_of_them_reserved(cluster, open_probe):
    probe = open_probe(cluster)
    choice = await probe.route(prompt(seed=2, num_tokens=64), request_id="req-2")
    for member in cluster.routers:
        found = (await probe.http.get(f"{member.url}/v1/workers")).json()["workers"]
        loads = {w["worker_id"]: w["active_requests"] for w in found}
        assert loads[choice["worker_id"]] == 1
    other = await probe.http.delete(f"{cluster.routers[1].url}/v1/requests/req-2")
    assert other.json()["found"] is True
    await probe.all_idle(2)


async def test_callers_that_share_a_request_id_free_only_what_is_their_own(cluster, open_probe):
    probe = open_probe(cluster)

    async def route():
        answer = await probe.http.post(
            "/v1/route", json={"token_ids": [1, 2, 3]}, headers={"x-request-id": "shared"}
        )
        return answer.json()["reservation_id"]

    async def num_reserved():
        return sum(requests for requests, _, _ in (await probe.loads()).values())

    held = await asyncio.gather(*(route() for _ in range(4)))
    for left in (3, 2, 1, 0):
        assert await probe.release(held[left])
        assert await num_reserved() == left


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("host", "kind"),
    [pytest.param("::1", "haproxy", marks=pytest.mark.slow), ("::", "shared socket")],
)
async def test_a_cluster_can_listen_on_ipv6(host, kind, open_probe):
    require_redis(default_kind())
    if kind == "haproxy":
        require_binary("haproxy")
    with Cluster(
        num_workers=1,
        num_replicas=1,
        host=host,
        haproxy=kind == "haproxy",
        router=RouterSettings(host="::1", log_level="error", no_auth=True),
        worker=WorkerSettings(host="::1", speedup=20.0, log_level="error"),
    ) as cluster:
        assert cluster.balancer_url.startswith("http://[::1]:")
        assert await open_probe(cluster).complete(prompt(seed=3, num_tokens=64)) == "w0"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_no_command_line_shows_the_redis_password(own_redis_server):
    with Redis.from_url(own_redis_server.url) as client:
        client.config_set("requirepass", "sesame")
    with Cluster(
        num_workers=1,
        num_replicas=1,
        haproxy=False,
        redis_url=f"redis://:sesame@127.0.0.1:{own_redis_server.port}/0",
        router=RouterSettings(log_level="error"),
        worker=WorkerSettings(log_level="error"),
    ) as cluster:
        for member in cluster.members:
            line = Path(f"/proc/{member.process.pid}/cmdline").read_bytes()
            assert b"app.cli" in line
            assert b"sesame" not in line


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing_running():
    require_redis(default_kind())
    cluster = Cluster(
        num_workers=1,
        num_replicas=1,
        haproxy=False,
        router=RouterSettings(log_level="error"),
        worker=WorkerSettings(profile="abacus"),
    )
    with pytest.raises(ClusterError, match="worker w0 exited with status 1"), cluster:
        pass
    assert [m.name for m in cluster.members if m.process.poll() is None] == []
    assert cluster.redis is not None
    assert cluster.redis.pid is None
