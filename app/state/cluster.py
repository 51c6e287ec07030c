"""Client of all nodes of a Redis Cluster.

redis-py's RedisCluster is not used. Its pipelines lose all answers when one node fails, and resend
commands that may have run. Cancelling its slot lookup cuts every connection in use.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.cluster import parse_cluster_slots
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError

from app.state.client import MAX_REDIRECTS, Address, RedisClient, first_answer
from app.state.round_trip import Node, SharingPool, did_not_run, round_trip

KEYLESS = frozenset({"INFO", "PING", "TIME"})
COMMAND_S = 60.0
"""Bound of one command. Callers have deadlines of their own, which are shorter."""


class ClusterClient(RedisClient):
    """Nodes of a Redis Cluster, each with its own connections.

    A command with one key goes where the key is, provided that it is the first argument or the
    first stream of an XREAD. INFO, PING and TIME go to any node. Pipelines are sent by `round_trip`
    to one node.
    seeds: nodes to ask first for the list of nodes. options: of the connections to each.
    patience_s: how long a node that is asked for the slots is waited for before another is asked.
    """

    has_nodes = True

    def __init__(
        self, seeds: Sequence[Address], options: Mapping[str, Any], patience_s: float
    ) -> None:
        self._seeds = tuple(seeds)
        self._options = options
        self._patience_s = patience_s
        self._clients: dict[tuple[Address, bool], Redis] = {}
        self._slots: dict[int, list[Address]] = {}
        """Slot -> its master and then its replicas."""
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
        return {key: other for key, other in nodes.items() if other != node}

    async def masters(self) -> list[Redis]:
        if self.stale or not self._slots:
            await self.refresh()
        return [self._client(a) for a in sorted({a[0] for a in self._slots.values()})]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        key = _key_of(args)
        until_s = asyncio.get_running_loop().time() + COMMAND_S
        try:
            if self.stale:
                await self.refresh()
            node = self.node_of(key)
            for _ in range(MAX_REDIRECTS + 1):
                [reply] = await round_trip(node, [args], until_s)
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
        raise TypeError("a pipeline has one node: use round_trip()")

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
            client = Redis.from_pool(SharingPool(**options))
            self._clients[address, read_only] = client
        return client

    async def _forget_except(self, addresses: set[Address]) -> None:
        gone = [self._clients.pop(key) for key in [*self._clients] if key[0] not in addresses]
        await asyncio.gather(*(client.aclose() for client in gone))


async def _connect_read_only(connection: AbstractConnection) -> None:
    await connection.on_connect()
    await connection.send_command("READONLY")
    await connection.read_response()


def _key_of(args: Sequence[Any]) -> str:
    if args[0] in KEYLESS:
        return ""
    position = args.index(b"STREAMS") + 1 if args[0] == "XREAD" else 1
    key = args[position]
    return key.decode() if isinstance(key, bytes) else str(key)
