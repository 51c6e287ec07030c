"""Endpoints of workers, as gateways name them: address and port."""

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
    """Returns host and port of a base URL; no host if it is no URL."""
    try:
        parts = urlsplit(address)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0


@lru_cache(maxsize=4096)
def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def several(text: str) -> list[str]:
    """Returns the endpoints in a list of them."""
    return [each.strip() for each in text.split(",") if each.strip()]


class Endpoints:
    """Looks up names of hosts, and keeps their addresses for a while."""

    def __init__(self) -> None:
        self._looked_up: dict[str, tuple[str, float]] = {}

    async def of(self, workers: Iterable[WorkerInfo]) -> dict[WorkerKey, str]:
        """Returns `ip:port` of each worker that has an address now."""
        places = {info.key: _place(info.address) for info in workers}
        now_s = asyncio.get_running_loop().time()
        lacking = {
            host
            for host, _ in places.values()
            if host and not _is_address(host) and self._looked_up.get(host, ("", 0.0))[1] <= now_s
        }
        if lacking:  # all at once: none waits for another that nobody answers for
            await asyncio.gather(*map(self._look_up, lacking))
        found = {}
        for key, (host, port) in places.items():
            address = host if _is_address(host) else self._looked_up.get(host, ("", 0.0))[0]
            if address:
                found[key] = joined(address, port)
        return found

    async def _look_up(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        address = ""
        with suppress(OSError, TimeoutError, UnicodeError):
            async with asyncio.timeout(RESOLVED_WITHIN_S):
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        if len(self._looked_up) >= MAX_NAMES:
            self._looked_up.clear()
        self._looked_up[host] = address, loop.time() + KEPT_S
