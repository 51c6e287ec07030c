"""Clients of one server, of a service watched by Sentinel, and of a Cluster, all used alike.

redis-py's RedisCluster is not used. Its pipelines lose all answers when one node fails, and resend
commands that may have run. Cancelling its slot lookup cuts every connection in use.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from hiredis import pack_command
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.cluster import parse_cluster_slots
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - redis-py's name
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

T = TypeVar("T")

Address = tuple[str, int]

MAX_REDIRECTS = 4
FOLLOW_INTERVAL_S = 0.25
FOLLOW_TIMEOUT_S = 1.0
KEYLESS = frozenset({"INFO", "PING", "TIME"})


class Node(NamedTuple):
    """Where to send a command. asking: an ASK redirected it there. replica: for reads only."""

    client: Redis
    asking: bool = False
    replica: bool = False


class NotSent(RedisError):
    """No connection could be obtained, so the commands certainly did not run."""


def did_not_run(reply: Any) -> bool:
    """Whether this is an error saying that the command had no effect, but may elsewhere."""
    # Before Redis 7, a script's error names READONLY, a replica's refusal, only in its text.
    return isinstance(reply, NotSent | AskError | ClusterDownError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and "-READONLY" in str(reply)
    )


async def exchange(node: Node, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """The raw replies to one pipeline, one per command, with errors as values.

    Raises RedisError or OSError if the connection fails after sending; some of the commands may
    then have run.
    """
    commands = list(commands)
    # redis-py's pipeline would take twice the CPU overall, and its packing four times.
    sent = [part for c in commands for part in (("ASKING",), c)] if node.asking else commands
    packed = b"".join([pack_command((*c[0].split(), *c[1:])) for c in sent])
    pool: Any = node.client.connection_pool
    try:
        connection = await pool.get_connection()
    except (RedisError, OSError) as error:
        return [NotSent(f"{type(error).__name__}: {error}")] * len(commands)
    replies: list[Any] = []
    try:
        await connection.send_packed_command(packed, check_health=False)
        for _ in sent:
            try:
                replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
    except BaseException:
        # Replies still to come would be taken for those to other commands.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)
    return replies[1::2] if node.asking else replies


class Client(Redis):
    """One server. Subclasses differ in where a key is, and in what they learn from an error."""

    stale = False
    """Whether `refresh` must be called before nodes are asked for."""

    async def refresh(self) -> None:
        """Learn where keys are. Raises RedisError, OSError."""

    def doubt(self) -> None:
        """Record that a node did not answer, so that a `refresh` is due."""

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        """Where `key` is. replica: for reads only, and possibly behind its master."""
        return Node(self)

    async def redirect(self, node: Node, errors: Mapping[str, Exception]) -> dict[str, Node]:
        """Where to resend what `did_not_run` on `node`, by key; keys left out go nowhere.

        errors: what `node` replied, by a key of the command.
        """
        if node.replica:
            return dict.fromkeys(errors, Node(self))
        refused = [key for key, error in errors.items() if not isinstance(error, NotSent)]
        if refused:
            # No longer a master. A new connection may find its successor, by Sentinel or by name.
            await node.client.connection_pool.disconnect(inuse_connections=False)
        return dict.fromkeys(refused, node)

    async def masters(self) -> list[Redis]:
        """A client for each server that takes writes. Raises RedisError, OSError."""
        return [self]

    async def follow(self) -> None:
        """Learn what no error reveals, until cancelled; returns if there is nothing of the kind."""


class Pool(ConnectionPool):
    """Hands out connections in the order in which they are asked for, for which callers wait up to
    `timeout` seconds.

    In redis-py's BlockingConnectionPool who asks as a connection comes free overtakes those who
    wait: with 32 callers and 16 connections, some waited for as long as the others went on. A free
    connection is handed out without a lock or a timer, which took three times as long as everything
    else here.
    """

    def __init__(self, *, timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self.timeout = timeout
        self._turns = asyncio.Semaphore(self.max_connections)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if self._turns.locked():
            try:
                async with asyncio.timeout(self.timeout):
                    await self._turns.acquire()
            except TimeoutError:
                raise ConnectionError(
                    f"all {self.max_connections} connections were in use for {self.timeout:g} s"
                ) from None
        else:
            await self._turns.acquire()
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        # redis-py's also takes a lock, and tells listeners and counters that are not in use here:
        # more than half of the time that a connection from here cost.
        try:
            self._in_use_connections.remove(connection)
            if connection.should_reconnect():  # type: ignore[no-untyped-call]
                await connection.disconnect()
            self._available_connections.append(connection)
        finally:
            self._turns.release()


class SentinelPool(SentinelConnectionPool, Pool):
    """A Pool whose new connections go to the server that the sentinels name."""

    def __init__(self, service: str, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]

    async def ensure_connection(self, connection: Any) -> None:
        """Reconnect a connection that was in use while the sentinels named another master."""
        if self.is_master and (connection.host, connection.port) != self.master_address:
            await connection.disconnect()
        await super().ensure_connection(connection)


class Sentinels(Sentinel):
    """Asks all sentinels, and believes the one that knows of the latest failover.

    patience_s: for the master, how long all sentinels are waited for before the answers that there
    are will do; for replicas, how long one sentinel is before the next is asked as well.
    """

    def __init__(self, *args: Any, patience_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._patience_s = patience_s

    async def discover_master(self, service_name: str) -> Address:
        # Sentinels inform one another only every 2 s.
        asks = [partial(self._master, sentinel, service_name) for sentinel in self.sentinels]
        found = await answers(asks, self._patience_s)
        return max(found)[1]

    async def discover_slaves(self, service_name: str) -> Sequence[Any]:
        asks = [partial(self._slaves, sentinel, service_name) for sentinel in self.sentinels]
        return await first_answer(asks, self._patience_s)

    async def _master(self, sentinel: Redis, service_name: str) -> tuple[int, Address]:
        """The number of the failover that made the master, and its address."""
        masters: Any = await sentinel.sentinel_masters()
        state = masters.get(service_name)
        if state is None or not self.check_master_state(state, service_name):
            raise MasterNotFoundError(
                f"the sentinels know of no master of {service_name!r} that is up"
            )
        return state["config-epoch"], (state["ip"], state["port"])

    async def _slaves(self, sentinel: Redis, service_name: str) -> Sequence[Any]:
        slaves: Any = await sentinel.sentinel_slaves(service_name)
        return self.filter_slaves(slaves)


class SentinelClient(Client):
    """The master of a service watched by Sentinel, looked up again for each new connection."""

    def __init__(self, sentinels: Sentinels, service: str, **options: Any) -> None:
        super().__init__(connection_pool=SentinelPool(service, sentinels, **options))
        self._sentinels = sentinels
        self._replicas = Redis.from_pool(
            SentinelPool(service, sentinels, is_master=False, **options)
        )

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        return Node(self._replicas, replica=True) if replica else Node(self)

    async def follow(self) -> None:
        """Leave a master as soon as the sentinels name another.

        The old one may still answer: after a handover, or back from a pause, it considers itself
        the master for 8 s more, until a sentinel makes it a replica and all writes it took are
        lost.
        """
        pool: Any = self.connection_pool
        while True:
            with suppress(RedisError, OSError):
                async with asyncio.timeout(FOLLOW_TIMEOUT_S):
                    await pool.get_master_address()
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.connection_pool.aclose()
        for client in (self._replicas, *self._sentinels.sentinels):
            await client.aclose()


class ClusterClient(Client):
    """All nodes of a Redis Cluster, each with its own connections.

    A command with one key goes where the key is, provided that it is the first argument or the
    first stream of an XREAD. INFO, PING and TIME go to any node. Pipelines are sent by `exchange`
    to one node.
    seeds: nodes to ask first for the list of nodes. options: of the connections to each.
    patience_s: when asking for the slots, how long one node is waited for before another is.
    """

    def __init__(
        self, seeds: Sequence[Address], options: Mapping[str, Any], patience_s: float
    ) -> None:
        self._seeds = tuple(seeds)
        self._options = options
        self._patience_s = patience_s
        self._clients: dict[tuple[Address, bool], Redis] = {}
        self._slots: dict[int, list[Address]] = {}
        """For each slot, its master and then its replicas."""
        self.stale = True
        super().__init__(connection_pool=self._client(self._seeds[0]).connection_pool)

    async def refresh(self) -> None:
        # Callers meanwhile use what is known, so that only one asks.
        self.stale = False
        try:
            known = {*self._seeds, *self._addresses()}
            asks = [partial(self._ask_slots, address) for address in known]
            random.shuffle(asks)
            self._slots = await first_answer(asks, self._patience_s)
        except BaseException:
            self.stale = True
            raise
        await self._forget_except({*self._seeds, *self._addresses()})

    def doubt(self) -> None:
        self.stale = True

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        holders = self._slots.get(key_slot(key.encode()))
        if not holders:
            # Any node will say where the key is.
            return Node(self._client(random.choice([*self._addresses()] or self._seeds)))
        if replica and len(holders) > 1:
            address = random.choice(holders[1:])
            return Node(self._client(address, read_only=True), replica=True)
        return Node(self._client(holders[0]))

    async def redirect(self, node: Node, errors: Mapping[str, Exception]) -> dict[str, Node]:
        if node.replica:
            self.stale = True
        elif not all(isinstance(error, AskError) for error in errors.values()):
            await self.refresh()
        nodes = {key: self._redirected(node, key, error) for key, error in errors.items()}
        return {key: found for key, found in nodes.items() if found != node}

    async def masters(self) -> list[Redis]:
        if self.stale or not self._slots:
            await self.refresh()
        return [self._client(a) for a in sorted({a[0] for a in self._slots.values()})]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        key = _key_of(args)
        try:
            if self.stale:
                await self.refresh()
            node = self.node_of(key)
            for _ in range(MAX_REDIRECTS + 1):
                [reply] = await exchange(node, [args])
                if not did_not_run(reply):
                    break
                nodes = await self.redirect(node, {key: reply})
                if key not in nodes:
                    break
                node = nodes[key]
        except (OSError, RedisError, asyncio.CancelledError):
            self.doubt()
            raise
        if isinstance(reply, Exception):
            raise reply
        # redis-py names the keys for its client-side cache; no parser takes them.
        options.pop("keys", None)
        parse = self.response_callbacks.get(args[0])
        return parse(reply, **options) if parse else reply

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> NoReturn:
        raise TypeError("a pipeline has one node: use exchange()")

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self.stale = True
        # Callers that are still active may create more clients meanwhile.
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()

    def _redirected(self, node: Node, key: str, error: Exception) -> Node:
        if node.replica or not isinstance(error, AskError):
            return self.node_of(key)
        # A node that has no host name for the other one means its own host.
        host = error.host or node.client.connection_pool.connection_kwargs["host"]
        address = (host, error.port)
        if not isinstance(error, MovedError):
            return Node(self._client(address), asking=True)
        self.stale = True
        return Node(self._client(address))

    async def _ask_slots(self, address: Address) -> dict[int, list[Address]]:
        node: Any = self._client(address)
        reply = await node.execute_command("CLUSTER SLOTS")
        ranges: Any = parse_cluster_slots(reply, current_host=address[0])
        slots: dict[int, list[Address]] = {}
        for (first, last), served in ranges.items():
            holders = [served["primary"], *served["replicas"]]
            slots |= dict.fromkeys(range(first, last + 1), holders)
        if not slots:
            # It has yet to join the Cluster, as a seed has that came back with an empty disk.
            raise ClusterDownError(f"{address[0]}:{address[1]} knows no slots")
        return slots

    def _addresses(self) -> set[Address]:
        return {address for holders in self._slots.values() for address in holders}

    def _client(self, address: Address, *, read_only: bool = False) -> Redis:
        client = self._clients.get((address, read_only))
        if client is None:
            options = {**self._options, "host": address[0], "port": address[1]}
            if read_only:
                options["redis_connect_func"] = _connect_read_only
            client = Redis.from_pool(Pool(**options))
            self._clients[address, read_only] = client
        return client

    async def _forget_except(self, addresses: set[Address]) -> None:
        gone = [self._clients.pop(key) for key in [*self._clients] if key[0] not in addresses]
        await asyncio.gather(*(client.aclose() for client in gone))


async def _connect_read_only(connection: AbstractConnection) -> None:
    """Connect to a Cluster replica so that it answers reads instead of naming its master."""
    await connection.on_connect()
    await connection.send_command("READONLY")
    await connection.read_response()


def _key_of(args: Sequence[Any]) -> str:
    """The key of a command; "" for one without."""
    if args[0] in KEYLESS:
        return ""
    position = args.index(b"STREAMS") + 1 if args[0] == "XREAD" else 1
    key = args[position]
    return key.decode() if isinstance(key, bytes) else str(key)


async def first_answer(asks: Sequence[Callable[[], Awaitable[T]]], patience_s: float) -> T:
    """The result of the first of `asks` to succeed; each starts when the last failed or is slow.

    patience_s: how long one is waited for before the next starts as well. If all fail, raises what
    the last one raised.
    """
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
    """The results of all `asks` that succeed within `patience_s`, or else of the first to succeed.

    There must be some. All start at once. If all fail, raises what one of the last raised.
    """
    pending = {asyncio.ensure_future(ask()) for ask in asks}
    try:
        done, pending = await asyncio.wait(pending, timeout=patience_s)
        while pending and all(task.exception() for task in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        found = [task.result() for task in done if task.exception() is None]
        return found or [done.pop().result()]  # which raises
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
