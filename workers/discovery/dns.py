"""Engines at the addresses of a name, as compose's services and headless Services have them, or at
the targets of its SRV records, as those and Consul have them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from app.core.errors import ConfigError, shown
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import DiscoveredEngine, Members, Tell, port_of, settings_of

log = logging.getLogger(__name__)

LOOK_S = 5.0
DEADLINE_S = 5.0
GONE_S = 600.0
"""Name servers that give some of the addresses give others with the next answers, and what asks
them may keep an answer for minutes."""

Place = tuple[str, int]
"""Address and port."""
Look = Callable[[], Awaitable[set[Place]]]
"""By which a name is looked up. Raises OSError while nobody says what it has."""


def name_and_port(text: str) -> tuple[str, int | None]:
    """port: None if SRV records are to say it. Raises ConfigError."""
    name, has_port, port = text.partition(":")
    if not name or (has_port and port_of(port) is None):
        raise ConfigError(
            f"--engine-dns: needs NAME:PORT, or the NAME of SRV records, got {shown(text)}"
        )
    return name, port_of(port)


async def addresses(name: str, port: int) -> set[Place]:
    """Those of the older family if there are any, as an engine may have one of each. Raises
    OSError."""
    look_up = partial(asyncio.get_running_loop().getaddrinfo, name, port, type=socket.SOCK_STREAM)
    try:
        try:
            answers = await look_up(family=socket.AF_INET)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise
            answers = await look_up(family=socket.AF_INET6)
    except UnicodeError as error:
        raise OSError(str(error)) from None
    return {(str(answer[4][0]), port) for answer in answers}


def worker_at(address: str, port: int) -> str:
    """The worker id of the engine there."""
    return f"{address}-{port}".replace(":", "-")


def engine_at(process: EngineAgentSettings, address: str, port: int) -> DiscoveredEngine:
    """Raises ConfigError."""
    return DiscoveredEngine(
        settings_of(process, worker_at(address, port), base_url(address, port), {})
    )


async def follow(process: EngineAgentSettings, look: Look, tell: Tell) -> None:
    """Tell of the engines at these places, time and again. While nobody knows the name, all stays
    as it was: an engine that is gone does not answer."""
    members = Members()
    while True:
        try:
            async with asyncio.timeout(DEADLINE_S):
                places = await look()
        except OSError as error:
            said = str(error) or f"no answer within {DEADLINE_S:g} s"
            log.warning("--engine-dns %s: %s", process.engine_dns, said)
        else:
            members.read_all(
                {worker_at(*at): partial(engine_at, process, *at) for at in sorted(places)}
            )
            tell(members)
        await asyncio.sleep(LOOK_S)
