"""Under which names and addresses others reach an engine, or fetch its KV."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from app.core.limits import MAX_KV_HOSTS

RESOLVE_S = 2.0


async def kv_hosts(*hosts: str) -> tuple[str, ...]:
    """The hosts, and the addresses that they have now: an engine may name either."""
    names = {host.lower() for host in hosts if host}
    for host in sorted(names):
        names |= set(await addresses(host))
    return tuple(sorted(names)[:MAX_KV_HOSTS])


async def addresses(host: str) -> list[str]:
    """None: it has none, or nobody says which."""
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(RESOLVE_S):
            infos = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return [str(address[0]) for *_, address in infos]
    return []
