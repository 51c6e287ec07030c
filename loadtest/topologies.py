"""Redis servers on this machine, as a Cluster and behind Sentinel: for benchmarks and tests."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis import Redis
from redis.cluster import parse_cluster_slots
from redis.crc import key_slot

from app.local.redis_server import LOOPBACK, PORTS, EmbeddedRedis, free_port

NUM_SLOTS = 16384
NUM_SHARDS = 3
CLUSTER_SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-node-timeout": "1000",
    "cluster-require-full-coverage": "no",
    "repl-diskless-sync-delay": "0",
    # Clients are shown a replica only after something was replicated to it; a ping is enough.
    "repl-ping-replica-period": "1",
}
SERVICE = "kvroute"
WITHIN_S = 20.0


def _cluster_port() -> int:
    """A free port; the cluster's own port, 10,000 above it, is free too, and none that somebody
    else is given meanwhile."""
    while True:
        port = free_port()
        if port + 10_000 in PORTS:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port + 10_000))
            except (OSError, OverflowError):
                continue
        return port


class ClusterServers:
    """Three masters with a third of the slots and one replica each; a context manager."""

    def __init__(self, binary: Path) -> None:
        options = [
            word for name, value in CLUSTER_SETTINGS.items() for word in (f"--{name}", value)
        ]
        self.servers = [
            EmbeddedRedis(binary, _cluster_port(), options=options) for _ in range(2 * NUM_SHARDS)
        ]
        self.masters = self.servers[:NUM_SHARDS]
        self.replicas = self.servers[NUM_SHARDS:]

    @property
    def url(self) -> str:
        """A URL that names two of the nodes."""
        return "redis+cluster://" + ",".join(f"{LOOPBACK}:{s.port}" for s in self.servers[:2])

    def shard_of(self, key: str) -> int:
        """Position of the master, and of the replica, that hold the key."""
        return key_slot(key.encode()) * NUM_SHARDS // NUM_SLOTS

    def __enter__(self) -> ClusterServers:
        """Returns once all nodes agree that the cluster is whole."""
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in self.servers:
            server.kill()

    def _join(self) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Redis(port=server.port)) for server in self.servers]
            masters = clients[:NUM_SHARDS]
            for i, master in enumerate(masters):
                slots = [s for s in range(NUM_SLOTS) if s * NUM_SHARDS // NUM_SLOTS == i]
                master.execute_command("CLUSTER ADDSLOTS", *slots)
            for client in clients[1:]:
                client.execute_command("CLUSTER MEET", LOOPBACK, self.servers[0].port)
            for master, replica in zip(masters, clients[NUM_SHARDS:], strict=True):
                master_id = master.execute_command("CLUSTER MYID").decode()
                wait_until(partial(_knows, replica, master_id))
                replica.execute_command("CLUSTER REPLICATE", master_id)
            for client in clients:
                wait_until(partial(_is_whole, client))
            for replica in clients[NUM_SHARDS:]:
                wait_until(partial(_is_in_step, replica))


class SentinelServers:
    """A master, its replica, and three sentinels that watch them; a context manager."""

    def __init__(self, binary: Path) -> None:
        self.master = EmbeddedRedis(binary)
        self.replica = EmbeddedRedis(
            binary, options=["--replicaof", LOOPBACK, str(self.master.port)]
        )
        self._folder = TemporaryDirectory(prefix="kvroute-sentinels-")
        self.sentinels = [
            EmbeddedRedis(binary, options=[self._config(i), "--sentinel"]) for i in range(3)
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(f"{LOOPBACK}:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    def __enter__(self) -> SentinelServers:
        """Returns once all sentinels know of one another and of the replica."""
        try:
            for server in (self.master, self.replica, *self.sentinels):
                server.start()
            with Redis(port=self.replica.port) as client:
                wait_until(partial(_is_in_step, client))
            for sentinel in self.sentinels:
                with Redis(port=sentinel.port) as client:
                    wait_until(partial(_sees_all, client))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.kill()
        self._folder.cleanup()

    def _config(self, number: int) -> str:
        """Path of a sentinel's configuration file, which the sentinel rewrites."""
        path = Path(self._folder.name) / f"{number}.conf"
        path.write_text(
            f"sentinel monitor {SERVICE} {LOOPBACK} {self.master.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        return str(path)


def wait_until(look: Callable[[], Any]) -> None:
    """Blocks until `look` returns something true. Raises AssertionError after WITHIN_S."""
    end = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < end, f"{WITHIN_S:g} s on, still not {look}"
        time.sleep(0.02)


def _knows(client: Any, node_id: str) -> bool:
    return node_id in str(client.execute_command("CLUSTER NODES"))


def _is_whole(client: Any) -> bool:
    """Whether a node knows a master and a replica of every slot."""
    shards = parse_cluster_slots(client.execute_command("CLUSTER SLOTS")).values()
    state = client.execute_command("CLUSTER INFO")["cluster_state"]
    return state == "ok" and [len(shard["replicas"]) for shard in shards] == [1] * NUM_SHARDS


def _is_in_step(replica: Redis) -> bool:
    """Whether a replica has received all its master's data."""
    return bool(replica.info("replication").get("master_link_status") == "up")


def _sees_all(sentinel: Any) -> bool:
    state = sentinel.sentinel_masters()[SERVICE]
    return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)
