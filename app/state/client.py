"""Client of one Redis server, and base of those for Sentinel and Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004 - redis-py's name

from app.state.round_trip import Node, NotSent

T = TypeVar("T")

Address = tuple[str, int]

MAX_REDIRECTS = 4


class RedisClient(Redis):
    """Client of one server. Subclasses differ in where a key is, and in what errors tell them."""

    has_nodes = False
    """Whether `node_of` tells nodes apart; else every key is here."""
    stale = False
    """Whether `refresh` must be called before `node_of`."""

    async def refresh(self) -> None:
        """Looks up where keys are. Raises RedisError, OSError."""

    def doubt(self) -> None:
        """Makes a `refresh` due, as a node did not answer."""

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        """Returns the node of `key`. replica: for reads only, and possibly behind its master."""
        return Node(self)

    async def redirect(self, node: Node, errors: Mapping[str, Exception]) -> dict[str, Node]:
        """Returns the nodes to resend to what `did_not_run` on `node`, by key; other keys go
        nowhere. errors: what `node` replied, by a key of the command."""
        if node.replica:
            return dict.fromkeys(errors, Node(self))
        refused = [key for key, error in errors.items() if not isinstance(error, NotSent)]
        if refused:
            # No longer a master. A new connection may find its successor, by Sentinel or by name.
            await node.client.connection_pool.disconnect(inuse_connections=False)
        return dict.fromkeys(refused, node)

    async def masters(self) -> list[Redis]:
        """Returns a client for each server that takes writes. Raises RedisError, OSError."""
        return [self]

    async def follow(self) -> None:
        """Follows what no error reveals, until cancelled; returns if there is nothing of the
        kind."""


async def first_answer(asks: Sequence[Callable[[], Awaitable[T]]], patience_s: float) -> T:
    """Returns the result of the first of `asks` to succeed; each starts when the last failed or is
    slow. patience_s: how slow. If all fail, raises what the last one raised."""
    waiting = list(reversed(asks))
    pending: set[asyncio.Future[T]] = set()
    error: BaseException | None = None
    try:
        while waiting or pending:
            if waiting:
                pending.add(asyncio.ensure_future(waiting.pop()()))
            done, pending = await asyncio.wait(
                pending,
                timeout=patience_s if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            errors = [task.exception() for task in done]
            for task, error in zip(done, errors, strict=True):
                if error is None:
                    return task.result()
        raise error or ConnectionError("there is no node to ask")
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def answers(asks: Sequence[Callable[[], Awaitable[T]]], patience_s: float) -> list[T]:
    """Returns the results of all `asks` that succeed within `patience_s`, or else of the first to
    succeed. All start at once; there must be some. If all fail, raises what one of the last raised.
    """
    pending = {asyncio.ensure_future(ask()) for ask in asks}
    try:
        done, pending = await asyncio.wait(pending, timeout=patience_s)
        while pending and all(task.exception() for task in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in done if task.exception() is None]
        return results or [done.pop().result()]  # which raises
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
