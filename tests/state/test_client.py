import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError  # noqa: A004

from app.state.client import answers, first_answer
from tests.eventually import eventually

Ask = Callable[[], Awaitable[str]]
PATIENCE_S = 0.01


class Nodes:
    """Nodes to ask. asked: in which order they were; cancelled: those that had yet to answer."""

    def __init__(self):
        self.asked = []
        self.cancelled = []

    def answering(self, name):
        async def ask():
            self.asked.append(name)
            return name

        return ask

    def failing(self, name):
        async def ask():
            self.asked.append(name)
            raise ConnectionError(f"{name} is gone")

        return ask

    def hanging(self, name):
        async def ask():
            self.asked.append(name)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return name

        return ask


async def test_only_the_first_node_is_asked_if_it_answers():
    nodes = Nodes()
    assert await first_answer([nodes.answering("a"), nodes.answering("b")], PATIENCE_S) == "a"
    assert nodes.asked == ["a"]


async def test_the_next_node_is_asked_when_one_fails_or_hangs():
    nodes = Nodes()
    asks = [nodes.failing("a"), nodes.hanging("b"), nodes.answering("c")]
    assert await first_answer(asks, PATIENCE_S) == "c"
    assert nodes.asked == ["a", "b", "c"]
    assert nodes.cancelled == ["b"]


async def test_if_all_nodes_fail_the_last_failure_is_raised():
    nodes = Nodes()
    with pytest.raises(ConnectionError, match="b is gone"):
        await first_answer([nodes.failing("a"), nodes.failing("b")], PATIENCE_S)


async def test_questions_to_hanging_nodes_are_cancelled_with_who_asks():
    nodes = Nodes()
    asks = [nodes.hanging("a"), nodes.hanging("b")]
    asking = asyncio.ensure_future(first_answer(asks, PATIENCE_S))

    async def asked():
        return nodes.asked

    await eventually(asked, lambda names: names == ["a", "b"])
    asking.cancel()
    await asyncio.wait([asking])
    assert sorted(nodes.cancelled) == ["a", "b"]


async def test_the_answers_of_all_nodes_that_answer_soon_are_returned():
    nodes = Nodes()
    asks = [nodes.hanging("a"), nodes.answering("b"), nodes.failing("c")]
    assert sorted(await answers([*asks, nodes.answering("d")], PATIENCE_S)) == ["b", "d"]
    assert nodes.cancelled == ["a"]


async def test_if_no_node_answers_soon_the_first_answer_is_waited_for():
    nodes, go_on = Nodes(), asyncio.Event()

    async def slow():
        await go_on.wait()
        return "b"

    asking = asyncio.ensure_future(answers([nodes.hanging("a"), slow], PATIENCE_S))
    assert await asyncio.wait([asking], timeout=5 * PATIENCE_S) == (set(), {asking})
    go_on.set()
    assert await asking == ["b"]
    with pytest.raises(ConnectionError, match="c is gone"):
        await answers([nodes.failing("c")], PATIENCE_S)
