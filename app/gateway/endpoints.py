"""Where workers are, as gateways name that: by address and port."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlsplit

from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo

KEPT_S, RESOLVED_WITHIN_S = 10.0, 2.0
MAX_NAMES = 4096


@lru_cache(maxsize=4096)
def _place(address: str) -> tuple[str, int]:
    """Host and port of a base URL."""
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


@lru_cache(maxsize=4096)
def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def several(text: str) -> list[str]:
    """The endpoints in a list of them."""
    return [each.strip() for each in text.split(",") if each.strip()]


class Endpoints:
    """Looks names of hosts up, and keeps what they stand for, for a while."""

    def __init__(self) -> None:
        self._looked_up: dict[str, tuple[str, float]] = {}

    async def of(self, workers: Iterable[WorkerInfo]) -> dict[WorkerKey, str]:
        """`ip:port` of each; what has no address now is left out."""
        found = {}
        for info in workers:
            host, port = _place(info.address)
            address = host if _is_address(host) else await self._look_up(host)
            if address:
                found[info.key] = joined(address, port)
        return found

    async def _look_up(self, host: str) -> str:
        """ "" : nobody knows it."""
        loop = asyncio.get_running_loop()
        address, until_s = self._looked_up.get(host, ("", 0.0))
        if loop.time() < until_s:
            return address
        address = ""
        with suppress(OSError, TimeoutError, UnicodeError):
            async with asyncio.timeout(RESOLVED_WITHIN_S):
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        if len(self._looked_up) >= MAX_NAMES:
            self._looked_up.clear()
        self._looked_up[host] = address, loop.time() + KEPT_S
        return address
