from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004

from app.local.redis_server import EmbeddedRedis, free_port
from app.state.connect import connect
from app.state.round_trip import Node, NotSent, round_trip


async def test_a_round_trip_returns_a_reply_per_command_with_errors_as_values(redis: Redis) -> None:
    await redis.set("a", "1")
    commands = [("GET", "a"), ("HGET", "a", "b"), ("GET", "c")]
    one, error, none = await round_trip(Node(redis), commands)
    assert (one, none) == (b"1", None)
    assert "WRONGTYPE" in str(error)


async def test_replies_keep_their_order_however_they_arrive(redis: Redis) -> None:
    """A megabyte comes in many reads; what is behind it comes with the last of them."""
    large = b"x" * 1_000_000
    await redis.set("a", large)
    commands = [("ECHO", "1"), ("GET", "a"), ("HGET", "a", "b"), ("ECHO", "2"), ("GET", "a")]
    one, first, error, two, second = await round_trip(Node(redis), commands)
    assert (one, two) == (b"1", b"2")
    assert first == second == large
    assert "WRONGTYPE" in str(error)
    assert await round_trip(Node(redis), [("ECHO", "3")]) == [b"3"]


async def test_commands_that_got_no_connection_are_reported_as_not_sent() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0") as nowhere:
        replies = await round_trip(Node(nowhere), [("GET", "a"), ("GET", "b")])
    assert [type(reply) for reply in replies] == [NotSent, NotSent]
    assert str(replies[0]).startswith("ConnectionError: ")


async def test_a_round_trip_waits_for_a_free_connection(one_redis_server: EmbeddedRedis) -> None:
    async with connect(one_redis_server.url, max_connections=2) as redis:
        ask = [round_trip(Node(redis), [("CLIENT ID",)]) for _ in range(20)]
        replies = [reply for [reply] in await asyncio.gather(*ask)]
    assert len(set(replies)) == 2
    assert all(isinstance(reply, int) for reply in replies)


async def test_connections_are_handed_out_in_the_order_in_which_callers_ask(
    one_redis_server: EmbeddedRedis,
) -> None:
    turns: list[str] = []

    async def ask(name: str) -> None:
        for _ in range(5):
            await round_trip(Node(redis), [("PING",)])
            turns.append(name)

    async with connect(one_redis_server.url, max_connections=1) as redis:
        await asyncio.gather(*map(ask, "abc"))
    assert "".join(turns) == "abc" * 5


async def test_a_round_trip_that_waits_too_long_for_a_connection_is_not_sent(
    one_redis_server: EmbeddedRedis,
) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.02) as redis:
        connection = await redis.connection_pool.get_connection()
        [reply] = await round_trip(Node(redis), [("PING",)])
        assert isinstance(reply, NotSent)
        assert str(reply) == "ConnectionError: all 1 connections were in use for 0.02 s"
        await redis.connection_pool.release(connection)
        assert await round_trip(Node(redis), [("PING",)]) == [b"PONG"]


async def test_a_command_that_cannot_be_encoded_takes_no_connection(
    one_redis_server: EmbeddedRedis,
) -> None:
    async with connect(one_redis_server.url, max_connections=1, timeout_s=0.5) as redis:
        with pytest.raises(TypeError):
            await round_trip(Node(redis), [("GET", object())])
        assert await round_trip(Node(redis), [("PING",)]) == [b"PONG"]


async def test_connections_that_fail_do_not_use_up_the_pool() -> None:
    async with connect(f"redis://127.0.0.1:{free_port()}/0", max_connections=2) as nowhere:
        failures = [str(*await round_trip(Node(nowhere), [("PING",)])) for _ in range(4)]
    assert len(set(failures)) == 1, failures


async def test_a_connection_that_fails_after_sending_raises_since_commands_may_have_run(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        with pytest.raises(ConnectionError):
            await round_trip(Node(redis), [("SET", "a", "1"), ("SHUTDOWN", "NOSAVE"), ("GET", "a")])
