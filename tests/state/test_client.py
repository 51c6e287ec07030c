from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004

from app.local.redis_server import LOOPBACK, EmbeddedRedis, free_port
from app.state.client import (
    Address,
    ClusterClient,
    Node,
    NotSent,
    answers,
    exchange,
    first_answer,
)
from app.state.connect import connect
from loadtest.topologies import NUM_SLOTS

Ask = Callable[[], Awaitable[str]]
PATIENCE_S = 0.01


class Nodes:
    """Nodes to ask. asked: in which order they were; cancelled: those that had yet to answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    def answering(self, name: str) -> Ask:
        async def ask() -> str:
            self.asked.append(name)
            return name

        return ask

    def failing(self, name: str) -> Ask:
        async def ask() -> str:
            self.asked.append(name)
            raise ConnectionError(f"{name} is gone")

        return ask

    def hanging(self, name: str) -> Ask:
        async def ask() -> str:
            self.asked.append(name)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return name

        return ask


async def test_only_the_first_node_is_asked_if_it_answers() -> None:
    nodes = Nodes()
    assert await first_answer([nodes.answering("a"), nodes.answering("b")], PATIENCE_S) == "a"
    assert nodes.asked == ["a"]


async def test_the_next_node_is_asked_when_one_fails_or_hangs() -> None:
    nodes = Nodes()
    asks = [nodes.failing("a"), nodes.hanging("b"), nodes.answering("c")]
    assert await first_answer(asks, PATIENCE_S) == "c"
    assert nodes.asked == ["a", "b", "c"]
    assert nodes.cancelled == ["b"]


async def test_if_all_nodes_fail_the_last_failure_is_raised() -> None:
    nodes = Nodes()
    with pytest.raises(ConnectionError, match="b is gone"):
        await first_answer([nodes.failing("a"), nodes.failing("b")], PATIENCE_S)


async def test_questions_to_hanging_nodes_are_cancelled_at_the_deadline() -> None:
    nodes = Nodes()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * PATIENCE_S):
            await first_answer([nodes.hanging("a"), nodes.hanging("b")], PATIENCE_S)
    assert sorted(nodes.cancelled) == ["a", "b"]


async def test_the_answers_of_all_nodes_that_answer_soon_are_returned() -> None:
    nodes = Nodes()
    asks = [nodes.hanging("a"), nodes.answering("b"), nodes.failing("c")]
    assert sorted(await answers([*asks, nodes.answering("d")], PATIENCE_S)) == ["b", "d"]
    assert nodes.cancelled == ["a"]


async def test_if_no_node_answers_soon_the_first_answer_is_waited_for() -> None:
    nodes, go_on = Nodes(), asyncio.Event()

    async def slow() -> str:
        await go_on.wait()
        return "b"

    asking = asyncio.ensure_future(answers([nodes.hanging("a"), slow], PATIENCE_S))
    assert await asyncio.wait([asking], timeout=5 * PATIENCE_S) == (set(), {asking})
    go_on.set()
    assert await asking == ["b"]
    with pytest.raises(ConnectionError, match="c is gone"):
        await answers([nodes.failing("c")], PATIENCE_S)


async def test_an_exchange_returns_a_reply_per_command_with_errors_as_values(redis: Redis) -> None:
    await redis.set("a", "1")
    commands = [("GET", "a"), ("HGET", "a", "b"), ("GET", "c")]
    one, error, none = await exchange(Node(redis), commands)
    assert (one, none) == (b"1", None)
    assert "WRONGTYPE" in str(error)


async def test_commands_that_got_no_connection_are_reported_as_not_sent() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0") as nowhere:
        replies = await exchange(Node(nowhere), [("GET", "a"), ("GET", "b")])
    assert [type(reply) for reply in replies] == [NotSent, NotSent]
    assert str(replies[0]).startswith("ConnectionError: ")


async def test_an_exchange_waits_for_a_free_connection(one_redis_server: EmbeddedRedis) -> None:
    async with connect(one_redis_server.url, max_connections=2) as redis:
        ask = [exchange(Node(redis), [("CLIENT ID",)]) for _ in range(20)]
        replies = [reply for [reply] in await asyncio.gather(*ask)]
    assert len(set(replies)) == 2
    assert all(isinstance(reply, int) for reply in replies)


async def test_connections_are_handed_out_in_the_order_in_which_callers_ask(
    one_redis_server: EmbeddedRedis,
) -> None:
    turns: list[str] = []

    async def ask(name: str) -> None:
        for _ in range(5):
            await exchange(Node(redis), [("PING",)])
            turns.append(name)

    async with connect(one_redis_server.url, max_connections=1) as redis:
        await asyncio.gather(*map(ask, "abc"))
    assert "".join(turns) == "abc" * 5


async def test_an_exchange_that_waits_too_long_for_a_connection_is_not_sent(
    one_redis_server: EmbeddedRedis,
) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.02) as redis:
        connection = await redis.connection_pool.get_connection()
        [reply] = await exchange(Node(redis), [("PING",)])
        assert isinstance(reply, NotSent)
        assert str(reply) == "ConnectionError: all 1 connections were in use for 0.02 s"
        await redis.connection_pool.release(connection)
        assert await exchange(Node(redis), [("PING",)]) == [b"PONG"]


async def test_a_command_that_cannot_be_encoded_takes_no_connection(
    one_redis_server: EmbeddedRedis,
) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.5) as redis:
        with pytest.raises(TypeError):
            await exchange(Node(redis), [("GET", object())])
        assert await exchange(Node(redis), [("PING",)]) == [b"PONG"]


async def test_connections_that_fail_do_not_use_up_the_pool() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0", max_connections=2) as nowhere:
        failures = [str(*await exchange(Node(nowhere), [("PING",)])) for _ in range(4)]
    assert len(set(failures)) == 1, failures


async def test_a_connection_that_fails_after_sending_raises_since_commands_may_have_run(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        with pytest.raises(ConnectionError):
            await exchange(Node(redis), [("SET", "a", "1"), ("SHUTDOWN", "NOSAVE"), ("GET", "a")])


class Cluster(ClusterClient):
    """A Cluster whose only node to ask says that these ports serve all slots."""

    def __init__(self, *ports: int) -> None:
        super().__init__([(LOOPBACK, 1)], {"timeout": 1.0}, patience_s=1.0)
        self.ports = ports

    async def _ask_slots(self, address: Address) -> dict[int, list[Address]]:
        holders = [(LOOPBACK, port) for port in self.ports]
        await asyncio.sleep(0)
        return dict.fromkeys(range(NUM_SLOTS), holders)


async def test_nodes_that_left_a_cluster_may_be_forgotten_by_several_callers_at_once() -> None:
    """In a failover, everybody who is redirected asks for the slots."""
    redis = Cluster(2, 3)
    await redis.refresh()
    closed: list[Redis] = []

    def watched(client: Redis) -> Redis:
        async def aclose() -> None:
            await asyncio.sleep(0)  # as open connections do
            closed.append(client)

        client.aclose = aclose  # type: ignore[method-assign, assignment]
        return client

    left = [watched(redis.node_of("key", replica=replica).client) for replica in (False, True)]
    redis.ports = (4,)
    await asyncio.gather(redis.refresh(), redis.refresh())
    assert sorted(map(id, closed)) == sorted(map(id, left))


async def test_masters_are_never_none_even_while_the_slots_are_first_asked_for() -> None:
    redis = Cluster(2)
    _, masters = await asyncio.gather(redis.refresh(), redis.masters())
    assert [master.connection_pool.connection_kwargs["port"] for master in masters] == [2]


async def test_a_closing_cluster_client_also_closes_clients_created_meanwhile() -> None:
    redis = connect("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=1.0)
    closed: list[Redis] = []

    def watched(node: Node) -> Redis:
        async def aclose() -> None:
            closed.append(node.client)
            if len(closed) == 1:
                for _ in range(100):  # each call picks a node at random
                    watched(redis.node_of("key"))

        node.client.aclose = aclose  # type: ignore[method-assign, assignment]
        return node.client

    first = watched(redis.node_of("key"))
    await redis.aclose()
    assert first in closed
    assert len(set(closed)) >= 2
    await redis.aclose()
    assert len(closed) == len(set(closed))
