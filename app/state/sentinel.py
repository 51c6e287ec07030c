"""Client of the master of a service watched by Sentinel, found again after each failover."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.exceptions import RedisError

from app.state.client import Address, RedisClient, answers, first_answer
from app.state.round_trip import Node, SharingPool

FOLLOW_INTERVAL_S = 0.25
FOLLOW_TIMEOUT_S = 1.0


class SentinelPool(SentinelConnectionPool, SharingPool):
    """Pool whose new connections go to the server that the sentinels name."""

    def __init__(self, service: str, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]

    async def ensure_connection(self, connection: Any) -> None:
        """Reconnects a connection that was in use while the sentinels named another master."""
        if self.is_master and (connection.host, connection.port) != self.master_address:
            await connection.disconnect()
        await super().ensure_connection(connection)


class Sentinels(Sentinel):
    """Sentinels, of which the one that knows of the latest failover is believed. patience_s: for
    the master, how long all sentinels are waited for before the answers that there are will do; for
    replicas, how long one sentinel is before the next is asked as well."""

    def __init__(self, *args: Any, patience_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._patience_s = patience_s

    async def discover_master(self, service_name: str) -> Address:
        # Sentinels inform one another only every 2 s.
        asks = [partial(self._master, sentinel, service_name) for sentinel in self.sentinels]
        masters = await answers(asks, self._patience_s)
        return max(masters)[1]

    async def discover_slaves(self, service_name: str) -> Sequence[Any]:
        asks = [partial(self._slaves, sentinel, service_name) for sentinel in self.sentinels]
        return await first_answer(asks, self._patience_s)

    async def _master(self, sentinel: Redis, service_name: str) -> tuple[int, Address]:
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


class SentinelClient(RedisClient):
    """Client of the master of a service, looked up again for each new connection."""

    has_nodes = True

    def __init__(self, sentinels: Sentinels, service: str, **options: Any) -> None:
        super().__init__(connection_pool=SentinelPool(service, sentinels, **options))
        self._sentinels = sentinels
        self._replicas = Redis.from_pool(
            SentinelPool(service, sentinels, is_master=False, **options)
        )

    def node_of(self, key: str, *, replica: bool = False) -> Node:
        return Node(self._replicas, replica=True) if replica else Node(self)

    async def follow(self) -> None:
        """Leaves a master as soon as the sentinels name another. The old one may still answer:
        after a handover, or back from a pause, it considers itself the master for 8 s more, until a
        sentinel makes it a replica and all writes it took are lost."""
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
