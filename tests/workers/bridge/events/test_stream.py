"""An agent and a publisher on real sockets: each batch arrives once and in order, or is said to be
lost."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from tests.eventually import eventually
from tests.fakes.events import EventSockets
from workers.bridge.events import stream as stream_module
from workers.bridge.events.events import BlockRemoved
from workers.bridge.events.stream import EventStream, Fresh, Resumption
from workers.bridge.events.vllm import Batch


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name in ("PROBE_S", "RETRY_S", "MIN_WAIT_S"):
        monkeypatch.setattr(stream_module, name, 0.05)
    monkeypatch.setattr(stream_module, "REPLY_S", 0.3)


@pytest.fixture
async def publisher():
    async with EventSockets() as publisher:
        yield publisher


class Reader:
    """What has come out of a stream: for each beginning, its word and the numbers of events."""

    def __init__(self, stream):
        self.stream = stream
        self.lives = []

    @property
    def numbers(self):
        return self.lives[-1][1] if self.lives else []

    async def run(self):
        async for item in self.stream.follow():
            if isinstance(item, Batch):
                self.lives[-1][1].extend(event.block_hashes[0] for event in item.events)
            else:
                self.lives.append((item, []))

    async def until(self, is_so):
        await eventually(lambda: asyncio.sleep(0, is_so()))


@asynccontextmanager
async def reading(publisher, after=None):
    with zmq.asyncio.Context() as context, EventStream(context, publisher.source, after) as stream:
        reader = Reader(stream)
        running = asyncio.create_task(reader.run())
        try:
            await reader.until(lambda: bool(reader.lives) or running.done())
            yield reader
        finally:
            running.cancel()
            await asyncio.wait([running])


async def publish(publisher, *numbers, times=1):
    for number in numbers:
        publisher.publish([BlockRemoved([number])], times=times)


async def test_what_was_published_before_is_replayed_and_what_follows_arrives(publisher):
    await publish(publisher, 1, 2)
    async with reading(publisher) as reader:
        await publish(publisher, 3, 4)
        await reader.until(lambda: reader.numbers == [1, 2, 3, 4])
        assert len(reader.lives) == 1
        assert reader.lives[0][0] == Fresh(joined_late=False, reason="the agent started")


async def test_an_engine_that_has_published_nothing_is_known_to_hold_nothing(publisher):
    async with reading(publisher) as reader:
        assert reader.lives == [(Fresh(joined_late=False, reason="the agent started"), [])]


async def test_one_whose_first_batches_are_gone_holds_blocks_that_nobody_knows():
    async with EventSockets(buffer=2) as publisher:
        await publish(publisher, 1, 2, 3)
        async with reading(publisher) as reader:
            await reader.until(lambda: reader.numbers == [2, 3])
            assert reader.lives[0][0] == Fresh(joined_late=True, reason="the agent started")


async def test_batches_that_do_not_arrive_are_asked_for_again(publisher):
    async with reading(publisher) as reader:
        await publish(publisher, 1)
        await reader.until(lambda: reader.numbers == [1])
        await publish(publisher, 2, 3, times=0)
        await publish(publisher, 4)
        await reader.until(lambda: reader.numbers == [1, 2, 3, 4])
        assert len(reader.lives) == 1


async def test_the_last_batch_is_missed_only_for_a_moment(publisher):
    async with reading(publisher) as reader:
        await publish(publisher, 1)
        await publish(publisher, 2, times=0)
        await reader.until(lambda: reader.numbers == [1, 2])
        assert len(reader.lives) == 1


async def test_batches_that_arrive_twice_count_once(publisher):
    async with reading(publisher) as reader:
        await publish(publisher, 1, 2, 3, times=3)
        await reader.until(lambda: reader.numbers == [1, 2, 3])
        await publish(publisher, 4)
        await reader.until(lambda: reader.numbers == [1, 2, 3, 4])
        assert reader.stream.counters.duplicates >= 4


async def test_what_is_lost_for_good_makes_all_void():
    async with EventSockets(buffer=1) as publisher, reading(publisher) as reader:
        await publish(publisher, 1)
        await reader.until(lambda: reader.numbers == [1])
        await publish(publisher, 2, 3, times=0)
        await publish(publisher, 4)
        await reader.until(lambda: reader.numbers == [4])
        first, *_, last = [word for word, _ in reader.lives]
        assert (first.joined_late, last.joined_late) == (False, True)


async def test_what_comes_over_a_new_connection_is_not_taken_for_what_was_expected(
    publisher, monkeypatch
):
    monkeypatch.setattr(stream_module, "PROBE_S", 30.0)  # no silence is asked about
    async with reading(publisher) as reader:
        await publish(publisher, 1, 2)
        await reader.until(lambda: reader.numbers == [1, 2])
        publisher.restart()
        await publish(publisher, 10, 11, times=0)

        async def is_heard():
            publisher.send([b"no batch"])
            return reader.stream.counters.unreadable

        await eventually(is_heard)
        await publish(publisher, 12)
        await reader.until(lambda: 12 in reader.numbers)
        assert reader.numbers == [10, 11, 12]


@pytest.mark.parametrize("num_after", [0, 1, 2, 5])
async def test_an_engine_that_was_started_again_is_noticed(publisher, num_after):
    async with reading(publisher) as reader:
        await publish(publisher, 1, 2)
        await reader.until(lambda: reader.numbers == [1, 2])
        publisher.restart()
        after = list(range(10, 10 + num_after))
        await publish(publisher, *after)
        # At first it says only that all is lost.
        again = Fresh(joined_late=False, reason="the engine was started again")
        await reader.until(lambda: reader.lives[-1] == (again, after))


@pytest.mark.parametrize("num_after", [0, 3])
async def test_a_stream_resumes_where_another_left_off(publisher, num_after):
    await publish(publisher, 1, 2)
    async with reading(publisher) as reader:
        await reader.until(lambda: reader.numbers == [1, 2])
        position = reader.stream.position
    missed = list(range(3, 3 + num_after))
    await publish(publisher, *missed)
    async with reading(publisher, position) as reader:
        await publish(publisher, 9)
        await reader.until(lambda: reader.numbers == [*missed, 9])
        assert [word for word, _ in reader.lives] == [Resumption()]


@pytest.mark.parametrize("num_after", [0, 1, 2, 5])
async def test_a_stream_does_not_resume_at_another_process(publisher, num_after):
    await publish(publisher, 1, 2)
    async with reading(publisher) as reader:
        await reader.until(lambda: reader.numbers == [1, 2])
        position = reader.stream.position
    publisher.restart()
    after = list(range(10, 10 + num_after))
    await publish(publisher, *after)
    async with reading(publisher, position) as reader:
        await reader.until(lambda: reader.numbers == after)
        assert isinstance(reader.lives[0][0], Fresh)
        assert not reader.lives[0][0].joined_late


async def test_a_stream_does_not_resume_where_batches_are_gone():
    async with EventSockets(buffer=2) as publisher:
        await publish(publisher, 1)
        async with reading(publisher) as reader:
            await reader.until(lambda: reader.numbers == [1])
            position = reader.stream.position
        await publish(publisher, 2, 3, 4)
        async with reading(publisher, position) as reader:
            await reader.until(lambda: reader.numbers == [3, 4])
            assert reader.lives[0][0].joined_late


@pytest.mark.parametrize("restarts", [False, True])
async def test_while_an_engine_does_not_answer_what_is_known_is_kept_and_not_current(
    publisher, restarts
):
    async with reading(publisher) as reader:
        await publish(publisher, 1)
        await reader.until(lambda: reader.numbers == [1] and reader.stream.is_current)
        publisher.answers = False
        await reader.until(lambda: not reader.stream.is_current)
        assert reader.numbers == [1]
        publisher.restart() if restarts else None
        await publish(publisher, 2, times=0)
        publisher.answers = True
        await reader.until(lambda: reader.stream.is_current)
        assert reader.numbers == ([2] if restarts else [1, 2])


async def test_without_a_replay_socket_a_gap_makes_all_void():
    async with EventSockets(replays=False) as publisher, reading(publisher) as reader:
        while not reader.numbers:  # until the subscription has reached it
            await publish(publisher, 0)
            await asyncio.sleep(0.05)
        await publish(publisher, 2, times=0)
        assert reader.stream.is_current
        await publish(publisher, 3, 4)
        await reader.until(lambda: reader.numbers == [3, 4])
        assert all(word.joined_late for word, _ in reader.lives)


async def test_batches_of_another_rank_are_counted_and_left_out(publisher):
    async with reading(publisher) as reader:
        publisher.publish([BlockRemoved([1])], rank=5)
        publisher.publish([BlockRemoved([2])], rank=None)
        await reader.until(lambda: reader.numbers == [2])
        assert reader.stream.counters.of_other_ranks == 1


async def test_what_is_no_batch_is_handed_on_as_broken(publisher):
    with zmq.asyncio.Context() as context, EventStream(context, publisher.source) as stream:
        following = stream.follow()
        assert isinstance(await anext(following), Fresh)
        pending = asyncio.ensure_future(anext(following))
        while not pending.done():
            publisher.send([b"", bytes(8), b"not msgpack"])
            publisher.send([b"only one frame"])
            await asyncio.sleep(0.05)
        batch = await pending
        assert isinstance(batch, Batch)
        assert batch.num_broken == 1
        await following.aclose()
