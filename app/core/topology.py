"""Clients of one server, of a service watched by Sentinel, and of a Cluster, used alike.

redis-py's RedisCluster is not used: its pipelines lose all answers when one node fails, and send
commands again that may have run; a cancelled look-up of its slots cuts every connection in use.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from hiredis import pack_command
from redis.asyncio import BlockingConnectionPool, Redis
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
    """Where to send a command. asking: it was sent there by an ASK. replica: only reads."""

    client: Redis
    asking: bool = False
    replica: bool = False


class NotSent(RedisError):
    """No connection was to be had, so that what was to be sent surely did not run."""


def did_not_run(reply: Any) -> bool:
    """Whether this is an error that says that the command had no effect, and may elsewhere."""
    # Before Redis 7, a script's error has READONLY, the refusal of a replica, only in its text.
    return isinstance(reply, NotSent | AskError | ClusterDownError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and "-READONLY" in str(reply)
    )


async def exchange(node: Node, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """The replies to one pipeline as they came, one a command, errors among them as values.

    Raises RedisError or OSError if the connection fails after sending: then some of the commands
    may have run.
    """
    commands = list(commands)
    pool: Any = node.client.connection_pool
    try:
        connection = await pool.get_connection()
    except (RedisError, OSError) as error:
        return [NotSent(f"{type(error).__name__}: {error}")] * len(commands)
    # Not by redis-py's pipeline, which takes twice the CPU in all, nor packed by it, four times.
    sent = [part for c in commands for part in (("ASKING",), c)] if node.asking else commands
    packed = b"".join([pack_command((*c[0].split(), *c[1:])) for c in sent])
    replies: list[Any] = []
    try:
        await connection.send_packed_command(packed, check_health=False)
        for _ in sent:
            try:
                replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
    except BaseException:
        # What is still to come would be taken for the replies to other commands.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)
    return replies[1::2] if node.asking else replies


class Client(Redis):
    """One server. The others differ in where a key lies, and in what an error teaches."""

    stale = False
    """Whether it must `refresh` before it is asked for nodes."""

    async def refresh(self) -> None:
        """Learn where keys lie. Raises RedisError, OSError."""

    def doubt(self) -> None:
        """Somebody did not answer: the next `refresh` is due."""

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        """Where `key` lies. replica: for reading only, and possibly behind its master."""
        return Node(self)

    async def redirect(self, node: Node, errors: Mapping[str, Exception]) -> dict[str, Node]:
        """Where to send again what `did_not_run` on `node`, by key; nowhere for keys left out.

        errors: what `node` replied, by a key of the command.
        """
        if node.replica:
            return dict.fromkeys(errors, Node(self))
        refused = [key for key, error in errors.items() if not isinstance(error, NotSent)]
        if refused:
            # A master no more. A new connection may find its successor, by Sentinel or by name.
            await node.client.connection_pool.disconnect(inuse_connections=False)
        return dict.fromkeys(refused, node)

    async def masters(self) -> list[Redis]:
        """A client of each server that takes writes. Raises RedisError, OSError."""
        return [self]

    async def follow(self) -> None:
        """Learns what no error tells, until cancelled; returns where there is no such thing."""


class Pool(BlockingConnectionPool):
    """Waits for a free connection. One that is free now it hands out without a lock and a timer,
    which took three times as long as all else that it does."""

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if not self.can_get_connection():
            return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection


class SentinelPool(SentinelConnectionPool, Pool):
    """A Pool; each new connection goes to whom the sentinels name."""

    def __init__(self, service: str, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]

    async def ensure_connection(self, connection: Any) -> None:
        """Connects anew what was in use while the sentinels named another master."""
        if self.is_master and (connection.host, connection.port) != self.master_address:
            await connection.disconnect()
        await super().ensure_connection(connection)


class Sentinels(Sentinel):
    """Asks all sentinels, and believes the one that knows of the latest failover.

    patience_s: how long those that are slow are waited for once there is an answer.
    """

    def __init__(self, *args: Any, patience_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._patience_s = patience_s

    async def discover_master(self, service_name: str) -> Address:
        # They tell one another every 2 s only.
        asks = [partial(self._master, sentinel, service_name) for sentinel in self.sentinels]
        found = await answers(asks, self._patience_s)
        return max(found)[1]

    async def discover_slaves(self, service_name: str) -> Sequence[Any]:
        asks = [partial(self._slaves, sentinel, service_name) for sentinel in self.sentinels]
        return await first_answer(asks, self._patience_s)

    async def _master(self, sentinel: Redis, service_name: str) -> tuple[int, Address]:
        """The master, behind the number of the failover that made it one."""
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
    """The master of a service that Sentinel watches, found anew for each new connection."""

    def __init__(self, sentinels: Sentinels, service: str, **options: Any) -> None:
        super().__init__(connection_pool=SentinelPool(service, sentinels, **options))
        self._sentinels = sentinels
        self._replicas = Redis.from_pool(
            SentinelPool(service, sentinels, is_master=False, **options)
        )

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        return Node(self._replicas, replica=True) if replica else Node(self)

    async def follow(self) -> None:
        """Leaves a master as soon as the sentinels name another.

        It may still answer: handed over, or back after a pause, it takes itself for the master for
        8 s more, until a sentinel makes it a replica and all that it took is lost.
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
    """All nodes of a Redis Cluster, each with connections of its own.

    Commands with one key go where it lies, if it is their first argument or the first stream of
    an XREAD; INFO, PING and TIME to any node. Pipelines are sent by `exchange` to one node.
    seeds: nodes to ask first which there are. options: of the connections to each.
    patience_s: how long one node is waited for alone when asked for the slots.
    """

    def __init__(
        self, seeds: Sequence[Address], options: Mapping[str, Any], patience_s: float
    ) -> None:
        self._seeds = tuple(seeds)
        self._options = options
        self._patience_s = patience_s
        self._clients: dict[tuple[Address, bool], Redis] = {}
        self._slots: dict[int, list[Address]] = {}
        """The master of each slot, then its replicas."""
        self.stale = True
        super().__init__(connection_pool=self._client(self._seeds[0]).connection_pool)

    async def refresh(self) -> None:
        # Whoever comes meanwhile uses what is known, so that only one asks.
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
            # Any node will say more.
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
        if self.stale:
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
        parse = self.response_callbacks.get(args[0])
        return parse(reply, **options) if parse else reply

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> NoReturn:
        raise TypeError("a pipeline has one node: use exchange()")

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self.stale = True
        # Whoever still asks meanwhile may make more of them.
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()

    def _redirected(self, node: Node, key: str, error: Exception) -> Node:
        if node.replica or not isinstance(error, AskError):
            return self.node_of(key)
        # A node that knows no name of the other one means its own.
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
        for key in [key for key in self._clients if key[0] not in addresses]:
            await self._clients.pop(key).aclose()


async def _connect_read_only(connection: AbstractConnection) -> None:
    """What a replica in a Cluster is told before it answers instead of naming its master."""
    await connection.on_connect()
    await connection.send_command("READONLY")
    await connection.read_response()


def _key_of(args: Sequence[Any]) -> str:
    """The key of a command; any for one without."""
    if args[0] in KEYLESS:
        return ""
    position = args.index(b"STREAMS") + 1 if args[0] == "XREAD" else 1
    key = args[position]
    return key.decode() if isinstance(key, bytes) else str(key)


async def first_answer(asks: Sequence[Callable[[], Awaitable[T]]], patience_s: float) -> T:
    """What the first of `asks` returns; each begins when the one before failed or took long.

    patience_s: how long one is waited for before the next begins too. Raises what the last one
    raised if all fail.
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
    """What those of `asks` return that do so within `patience_s`, or else the first one to do so.

    All begin at once. Raises what the last one raised if all fail.
    """
    tasks = [asyncio.ensure_future(ask()) for ask in asks]
    found: list[T] = []
    error: BaseException | None = None
    timeout: float | None = patience_s
    pending = set(tasks)
    try:
        while pending and not found:
            done, pending = await asyncio.wait(
                pending,
                timeout=timeout,
                return_when=asyncio.ALL_COMPLETED if timeout else asyncio.FIRST_COMPLETED,
            )
            timeout = None
            for task in done:
                error = task.exception() or error
                if task.exception() is None:
                    found.append(task.result())
        if not found:
            raise error or ConnectionError("there is no node to ask")
        return found
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
