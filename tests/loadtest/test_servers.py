import asyncio
import gc
from itertools import islice

import click
import pytest

from app.local.redis_server import LOOPBACK
from loadtest.servers import NUM_PROMPTS, Connection, Shape, names


@pytest.mark.parametrize("connections", [1, 8, 32, 128])
def test_no_two_connections_share_a_name_and_reservations_stay_constant(connections):
    of_each = [set(islice(names(n, connections), 200)) for n in range(connections)]
    together = set[int]().union(*of_each)
    assert sum(map(len, of_each)) == len(together) == max(NUM_PROMPTS, connections)


async def test_a_decision_made_without_redis_is_an_error():
    async def answer(_, writer):
        body = b'{"policy":"latency","degraded":true,"reserved":false}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, LOOPBACK, 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        with pytest.raises(click.ClickException, match="without Redis"):
            await connection.ask(Shape("any", [b"{}"]).request(0, 0))
        connection.close()


async def test_a_connection_over_which_nothing_was_asked_ends_without_a_word(caplog):
    ended = asyncio.Event()

    async def hang_up(_, to):
        to.close()
        ended.set()

    async with await asyncio.start_server(hang_up, LOOPBACK, 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        await ended.wait()
        connection.close()
        await asyncio.sleep(0)
    del connection
    gc.collect()
    assert caplog.records == []
