"""Engines at the addresses that a name has: of compose's services, or of headless Services."""

from __future__ import annotations

import asyncio
import logging
import socket

from app.core.errors import ConfigError
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import Engine, Tell, settings_of

log = logging.getLogger(__name__)

LOOK_S = 5.0
DEADLINE_S = 5.0


def name_and_port(text: str) -> tuple[str, int]:
    """Raises ConfigError."""
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--engine-dns: needs NAME:PORT, got {text!r}")
    return name, int(port)


def engine_at(process: EngineAgentSettings, address: str, port: int) -> Engine:
    worker_id = f"{address}-{port}".replace(":", "-")
    return Engine(settings_of(process, worker_id, base_url(address, port), {}))


async def follow(process: EngineAgentSettings, tell: Tell) -> None:
    """Tell of the engines at these addresses, time and again. While nobody knows the name, all
    stays as it was: an engine that is gone does not answer."""
    name, port = name_and_port(process.engine_dns)
    loop = asyncio.get_running_loop()
    while True:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("--engine-dns %s: %s", process.engine_dns, error or type(error).__name__)
        else:
            addresses = sorted({str(answer[4][0]) for answer in answers})
            tell({address: engine_at(process, address, port) for address in addresses})
        await asyncio.sleep(LOOK_S)
