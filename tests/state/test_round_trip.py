import asyncio

import pytest
from redis.exceptions import ConnectionError  # noqa: A004

from app.http.server import run
from app.local.redis_server import free_port
from app.state.connect import connect
from app.state.round_trip import Node, NotSent, round_trip
from tests.eventually import eventually
from tests.redis_servers import stopped


async def asked(redis, *commands, within_s=10.0):
    until_s = asyncio.get_running_loop().time() + within_s
    return await round_trip(Node(redis), commands, until_s)


async def test_a_round_trip_returns_a_reply_per_command_with_errors_as_values(redis):
    await redis.set("a", "1")
    commands = [("GET", "a"), ("HGET", "a", "b"), ("GET", "c")]
    one, error, none = await asked(redis, *commands)
    assert (one, none) == (b"1", None)
    assert "WRONGTYPE" in str(error)


async def test_replies_keep_their_order_however_they_arrive(redis):
    """A megabyte comes in many reads; what is behind it comes with the last of them."""
    large = b"x" * 1_000_000
    await redis.set("a", large)
    commands = [("ECHO", "1"), ("GET", "a"), ("HGET", "a", "b"), ("ECHO", "2"), ("GET", "a")]
    one, first, error, two, second = await asked(redis, *commands)
    assert (one, two) == (b"1", b"2")
    assert first == second == large
    assert "WRONGTYPE" in str(error)
    assert await asked(redis, ("ECHO", "3")) == [b"3"]


async def test_commands_that_got_no_connection_are_reported_as_not_sent():
    async with connect(f"redis://127.0.0.1:{free_port()}/0") as nowhere:
        replies = await asked(nowhere, ("GET", "a"), ("GET", "b"))
    assert [type(reply) for reply in replies] == [NotSent, NotSent]
    assert str(replies[0]).startswith("ConnectionError: ")


async def test_callers_share_one_connection(one_redis_server):
    async with connect(one_redis_server.url) as redis:
        replies = await asyncio.gather(*(asked(redis, ("CLIENT", "ID")) for _ in range(20)))
    assert len({client for [client] in replies}) == 1


async def test_a_caller_that_is_cancelled_or_late_leaves_its_place_to_nobody(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        [client] = await asked(redis, ("CLIENT", "ID"))
        with stopped(own_redis_server.pid):
            cancelled = asyncio.ensure_future(asked(redis, ("ECHO", "cancelled")))
            late = asyncio.ensure_future(asked(redis, ("ECHO", "late"), within_s=0.05))
            last = asyncio.ensure_future(asked(redis, ("ECHO", "last"), ("CLIENT", "ID")))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(TimeoutError):
                await late
        assert await last == [b"last", client]
        assert cancelled.cancelled()


async def test_a_server_that_was_silent_is_asked_on_a_new_connection(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        [client] = await asked(redis, ("CLIENT", "ID"))
        with stopped(own_redis_server.pid):
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asked(redis, ("ECHO", "late"), within_s=0.05)
        assert await asked(redis, ("CLIENT", "ID")) != [client]
        [open_ones] = await eventually(
            lambda: asked(redis, ("CLIENT", "LIST")), lambda got: got[0].count(b"\n") == 1
        )
        assert open_ones.count(b"\n") == 1


async def test_a_command_that_cannot_be_encoded_disturbs_no_other(redis):
    with pytest.raises(TypeError):
        await asked(redis, ("GET", object()))
    assert await asked(redis, ("PING",)) == [b"PONG"]


async def test_no_more_pipelines_wait_than_there_is_room_for(own_redis_server, monkeypatch):
    monkeypatch.setattr("app.state.round_trip.MAX_WAITING", 2)
    async with connect(own_redis_server.url) as redis:
        await asked(redis, ("PING",))
        with stopped(own_redis_server.pid):
            waiting = [asyncio.ensure_future(asked(redis, ("PING",))) for _ in range(2)]
            await asyncio.sleep(0)
            [refused] = await asked(redis, ("PING",))
        assert isinstance(refused, NotSent)
        assert await asyncio.gather(*waiting) == [[b"PONG"]] * 2


async def test_connections_that_fail_do_not_use_up_the_pool():
    async with connect(f"redis://127.0.0.1:{free_port()}/0", max_connections=2) as nowhere:
        failures = [str(*await asked(nowhere, ("PING",))) for _ in range(4)]
    assert len(set(failures)) == 1, failures


async def test_a_connection_that_fails_after_sending_raises_since_commands_may_have_run(
    own_redis_server,
):
    async with connect(own_redis_server.url) as redis:
        with pytest.raises(ConnectionError):
            await asked(redis, ("SET", "a", "1"), ("SHUTDOWN", "NOSAVE"), ("GET", "a"))


def test_a_deadline_that_is_past_disturbs_no_caller_after_it(one_redis_server):
    async def late_and_last():
        async with connect(one_redis_server.url) as redis:
            await asked(redis, ("ECHO", "first"))  # opens the connection
            late = asked(redis, ("ECHO", "late"), within_s=-1.0)
            return await asyncio.gather(
                late, asked(redis, ("ECHO", "last")), return_exceptions=True
            )

    # The loop of processes, whose handle of a time that is past is another.
    [late, last] = run(late_and_last())
    assert isinstance(late, (TimeoutError, list))
    assert last == [b"last"]
