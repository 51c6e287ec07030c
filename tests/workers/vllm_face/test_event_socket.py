from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import zmq.asyncio

from app.core.errors import ConfigError
from workers.bridge.events.events import BlockRemoved
from workers.bridge.events.vllm import decode
from workers.vllm_face.event_socket import MAX_MESSAGE_BYTES, EventSocket

END = b"\xff" * 8


def publish(socket: EventSocket, numbers: range) -> None:
    """A batch each, which removes the block of that number."""
    for number in numbers:
        socket.publish([BlockRemoved([number])])


def numbers_of(payload: bytes) -> Iterator[object]:
    for event in decode(payload).events:
        assert isinstance(event, BlockRemoved)
        yield from event.block_hashes


@asynccontextmanager
async def other(socket: EventSocket) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that asks `socket`, which runs already."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{socket.replay_port}")
        yield dealer


@asynccontextmanager
async def asking(socket: EventSocket) -> AsyncIterator[zmq.asyncio.Socket]:
    """Runs `socket`, and asks it."""
    async with other(socket) as dealer, asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(socket.run())
        yield dealer
        answering.cancel()


async def answer(dealer: zmq.asyncio.Socket, first: int) -> list[tuple[int, object]]:
    """The number and the block of each batch, up to the end."""
    await dealer.send_multipart([b"", first.to_bytes(8, "big")])
    return await read(dealer)


async def read(dealer: zmq.asyncio.Socket) -> list[tuple[int, object]]:
    found: list[tuple[int, object]] = []
    while True:
        async with asyncio.timeout(10):
            _, topic, number, payload = await dealer.recv_multipart()
        assert topic == b""
        if number == END:
            assert payload == b""
            return found
        [block] = {*numbers_of(payload)}
        found.append((int.from_bytes(number, "big"), block))


async def test_a_subscriber_gets_topic_number_and_batch() -> None:
    with (
        closing(EventSocket("127.0.0.1", rank=3)) as socket,
        zmq.asyncio.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.connect(f"tcp://127.0.0.1:{socket.events_port}")
        subscriber.subscribe(b"")
        frames: list[bytes] = []
        block = 0
        async with asyncio.timeout(10):
            while not frames:  # what is published before the subscription arrives is lost
                publish(socket, range(block, block + 1))
                block += 1
                if await subscriber.poll(50):
                    frames = await subscriber.recv_multipart()

    topic, number, payload = frames
    assert topic == b""
    assert [int.from_bytes(number, "big")] == list(numbers_of(payload))
    assert decode(payload).rank == 3


async def test_an_answer_begins_at_the_number_asked_for() -> None:
    with closing(EventSocket("127.0.0.1")) as socket:
        publish(socket, range(5))
        async with asking(socket) as dealer:
            assert await answer(dealer, 0) == [(n, n) for n in range(5)]
            assert await answer(dealer, 3) == [(3, 3), (4, 4)]
            assert await answer(dealer, 5) == []


async def test_an_answer_without_the_batches_that_the_buffer_lost_begins_above_what_was_asked() -> (
    None
):
    with closing(EventSocket("127.0.0.1", buffered=4)) as socket:
        publish(socket, range(10))
        async with asking(socket) as dealer:
            assert [number for number, _ in await answer(dealer, 2)] == [6, 7, 8, 9]
            assert [number for number, _ in await answer(dealer, 8)] == [8, 9]


async def test_a_whole_buffer_waits_for_who_reads_it_late() -> None:
    """Of 20 MB the network alone holds only a part."""
    with closing(EventSocket("127.0.0.1")) as socket:
        for number in range(10_050):
            socket.publish([BlockRemoved([number] * 1000)])
        async with asking(socket) as dealer:
            assert await answer(dealer, 10_050) == []
            await dealer.send_multipart([b"", bytes(8)])
            async with other(socket) as after_it:
                assert await answer(after_it, 10_050) == []  # so the other answer was sent
            assert await read(dealer) == [(n, n) for n in range(50, 10_050)]


async def test_other_messages_are_ignored_and_an_empty_batch_is_not_sent() -> None:
    with closing(EventSocket("127.0.0.1")) as socket:
        socket.publish([])
        async with asking(socket) as dealer:
            await dealer.send_multipart([b"", b"what?"])
            await dealer.send_multipart([b"too", b"many", b"frames"])
            assert await answer(dealer, 0) == []


def test_a_port_that_is_taken_is_named() -> None:
    with (
        closing(EventSocket("127.0.0.1")) as first,
        pytest.raises(ConfigError, match=f"127.0.0.1:{first.events_port}"),
    ):
        EventSocket("127.0.0.1", replay_port=first.events_port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_sources_say_where_to_connect_as_vllm_does(host: str) -> None:
    with closing(EventSocket(host, rank=2)) as socket:
        assert socket.sources() == {
            "2": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{socket.events_port}",
                "replay_endpoint": f"tcp://*:{socket.replay_port}",
                "buffer_steps": 10_000,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": "",
            }
        }
        assert socket.events_port != socket.replay_port


async def test_who_sends_more_than_a_request_is_cut_off_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(EventSocket("127.0.0.1")) as socket:
        publish(socket, range(3))
        async with asking(socket) as dealer:
            for _ in range(20):
                await dealer.send_multipart([b"", b"no number"])
            async with other(socket) as stranger:
                await stranger.send_multipart([b"", b"x" * (MAX_MESSAGE_BYTES + 1)])
                assert await stranger.poll(200) == 0
            assert len(await answer(dealer, 0)) == 3
    assert [r.name for r in caplog.records if r.levelname == "WARNING"] == [
        "workers.vllm_face.event_socket"
    ]
