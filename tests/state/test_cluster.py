import asyncio

from app.local.redis_server import LOOPBACK
from app.state.cluster import ClusterClient
from app.state.connect import connect
from loadtest.topologies import NUM_SLOTS


class Cluster(ClusterClient):
    """A Cluster whose only node to ask says that these ports serve all slots."""

    def __init__(self, *ports):
        super().__init__([(LOOPBACK, 1)], {"timeout": 1.0}, patience_s=1.0)
        self.ports = ports

    async def _ask_slots(self, address):
        holders = [(LOOPBACK, port) for port in self.ports]
        await asyncio.sleep(0)
        return dict.fromkeys(range(NUM_SLOTS), holders)


async def test_nodes_that_left_a_cluster_may_be_forgotten_by_several_callers_at_once():
    """In a failover, everybody who is redirected asks for the slots."""
    redis = Cluster(2, 3)
    await redis.refresh()
    closed = []

    def watched(client):
        async def aclose():
            await asyncio.sleep(0)  # as open connections do
            closed.append(client)

        client.aclose = aclose
        return client

    left = [watched(redis.node_of("key", replica=replica).client) for replica in (False, True)]
    redis.ports = (4,)
    await asyncio.gather(redis.refresh(), redis.refresh())
    assert sorted(map(id, closed)) == sorted(map(id, left))


async def test_masters_are_never_none_even_while_the_slots_are_first_asked_for():
    redis = Cluster(2)
    _, masters = await asyncio.gather(redis.refresh(), redis.masters())
    assert [master.connection_pool.connection_kwargs["port"] for master in masters] == [2]


async def test_a_closing_cluster_client_also_closes_clients_created_meanwhile():
    redis = connect("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=1.0)
    closed = []

    def watched(node):
        async def aclose():
            closed.append(node.client)
            if len(closed) == 1:
                for _ in range(100):  # each call picks a node at random
                    watched(redis.node_of("key"))

        node.client.aclose = aclose
        return node.client

    first = watched(redis.node_of("key"))
    await redis.aclose()
    assert first in closed
    assert len(set(closed)) >= 2
    await redis.aclose()
    assert len(closed) == len(set(closed))
