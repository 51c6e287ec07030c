from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004

from app.core.embedded import EmbeddedRedis, free_port
from app.core.redis import connect
from app.core.topology import Node, NotSent, answers, exchange, first_answer

Ask = Callable[[], Awaitable[str]]
PATIENCE_S = 0.01


class Asked:
    """People to ask. begun: in which order they were; cancelled: who was still thinking."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    def who_says(self, name: str, fails: bool = False) -> Ask:
        async def ask() -> str:
            self.begun.append(name)
            if fails:
                raise ConnectionError(f"{name} is gone")
            return name

        return ask

    def who_hangs(self, name: str) -> Ask:
        async def ask() -> str:
            self.begun.append(name)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return name

        return ask


async def test_only_one_is_asked_if_it_answers() -> None:
    asked = Asked()
    assert await first_answer([asked.who_says("a"), asked.who_says("b")], PATIENCE_S) == "a"
    assert asked.begun == ["a"]


async def test_the_next_is_asked_when_one_fails_or_hangs() -> None:
    asked = Asked()
    asks = [asked.who_says("a", fails=True), asked.who_hangs("b"), asked.who_says("c")]
    assert await first_answer(asks, PATIENCE_S) == "c"
    assert asked.begun == ["a", "b", "c"]
    assert asked.cancelled == ["b"]


async def test_where_all_fail_the_last_failure_is_told() -> None:
    asked = Asked()
    with pytest.raises(ConnectionError, match="b is gone"):
        await first_answer(
            [asked.who_says("a", fails=True), asked.who_says("b", fails=True)], PATIENCE_S
        )


async def test_who_hangs_is_let_go_of_at_the_deadline() -> None:
    asked = Asked()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * PATIENCE_S):
            await first_answer([asked.who_hangs("a"), asked.who_hangs("b")], PATIENCE_S)
    assert sorted(asked.cancelled) == ["a", "b"]


async def test_all_that_answer_soon_are_heard() -> None:
    asked = Asked()
    asks = [asked.who_hangs("a"), asked.who_says("b"), asked.who_says("c", fails=True)]
    assert sorted(await answers([*asks, asked.who_says("d")], PATIENCE_S)) == ["b", "d"]
    assert asked.cancelled == ["a"]


async def test_where_nobody_answers_soon_the_first_is_waited_for() -> None:
    asked, thought = Asked(), asyncio.Event()

    async def who_thinks() -> str:
        await thought.wait()
        return "b"

    asking = asyncio.ensure_future(answers([asked.who_hangs("a"), who_thinks], PATIENCE_S))
    assert await asyncio.wait([asking], timeout=5 * PATIENCE_S) == (set(), {asking})
    thought.set()
    assert await asking == ["b"]
    with pytest.raises(ConnectionError, match="c is gone"):
        await answers([asked.who_says("c", fails=True)], PATIENCE_S)


async def test_an_exchange_has_a_reply_for_each_command_errors_among_them(redis: Redis) -> None:
    await redis.set("a", "1")
    commands = [("GET", "a"), ("HGET", "a", "b"), ("GET", "c")]
    one, error, none = await exchange(Node(redis), commands)
    assert (one, none) == (b"1", None)
    assert "WRONGTYPE" in str(error)


async def test_what_had_no_connection_was_not_sent() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0") as nowhere:
        replies = await exchange(Node(nowhere), [("GET", "a"), ("GET", "b")])
    assert [type(reply) for reply in replies] == [NotSent, NotSent]
    assert str(replies[0]).startswith("ConnectionError: ")


async def test_who_finds_no_free_connection_waits_for_one(one_redis_server: EmbeddedRedis) -> None:
    async with connect(one_redis_server.url, max_connections=2) as redis:
        ask = [exchange(Node(redis), [("CLIENT ID",)]) for _ in range(20)]
        replies = [reply for [reply] in await asyncio.gather(*ask)]
    assert len(set(replies)) == 2
    assert all(isinstance(reply, int) for reply in replies)


async def test_connections_are_given_to_those_who_wait_in_their_order(
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


async def test_who_waits_too_long_for_a_connection_gets_none(
    one_redis_server: EmbeddedRedis,
) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.02) as redis:
        connection = await redis.connection_pool.get_connection()
        [reply] = await exchange(Node(redis), [("PING",)])
        assert isinstance(reply, NotSent)
        assert str(reply) == "ConnectionError: all 1 connections were in use for 0.02 s"
        await redis.connection_pool.release(connection)
        assert await exchange(Node(redis), [("PING",)]) == [b"PONG"]


async def test_what_cannot_be_sent_takes_no_connection(one_redis_server: EmbeddedRedis) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.5) as redis:
        with pytest.raises(TypeError):
            await exchange(Node(redis), [("GET", object())])
        assert await exchange(Node(redis), [("PING",)]) == [b"PONG"]


async def test_a_connection_that_fails_is_not_in_use_for_ever() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0", max_connections=2) as nowhere:
        failures = [str(*await exchange(Node(nowhere), [("PING",)])) for _ in range(4)]
    assert len(set(failures)) == 1, failures


async def test_what_was_sent_may_have_run_when_the_connection_ends(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        with pytest.raises(ConnectionError):
            await exchange(Node(redis), [("SET", "a", "1"), ("SHUTDOWN", "NOSAVE"), ("GET", "a")])


async def test_a_cluster_s_client_closes_what_is_asked_for_while_it_closes() -> None:
    redis = connect("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=1.0)
    closed: list[Redis] = []

    def watched(node: Node) -> Redis:
        async def aclose() -> None:
            closed.append(node.client)
            if len(closed) == 1:
                for _ in range(100):  # any node is picked at random
                    watched(redis.node_of("key"))

        node.client.aclose = aclose  # type: ignore[method-assign, assignment]
        return node.client

    first = watched(redis.node_of("key"))
    await redis.aclose()
    assert first in closed
    assert len(set(closed)) >= 2
    await redis.aclose()
    assert len(closed) == len(set(closed))
