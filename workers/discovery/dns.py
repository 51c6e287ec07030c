"""Engines at the addresses of a name, as compose's services and headless Services have them, or at
the targets of its SRV records, as those and Consul have them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from app.core.errors import ConfigError, shown
from app.core.extras import extra
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from workers.discovery.engine import DiscoveredEngine, Members, Tell, port_of, settings_of

log = logging.getLogger(__name__)

LOOK_S = 5.0
DEADLINE_S = 5.0
GONE_S = 600.0
"""Seconds until an engine that answers lack is gone: name servers that give some of the addresses
give others with the next answers, and what asks them may keep an answer for minutes."""
TARGET_S = 2.0
"""Deadline of the address of a target that does not come with the records, within DEADLINE_S."""
UDP_BYTES = 1232
"""Size of answers that are asked for: without one, Consul answers with three records at most. What
is larger comes over TCP."""

Place = tuple[str, int]
Look = Callable[[], Awaitable[set[Place]]]
"""Returns what a name has now. Raises OSError while nobody says it."""


def look_of(text: str) -> Look:
    """Returns the look-up of NAME:PORT, or of the SRV records of a NAME. Raises ConfigError, and
    MissingPackage."""
    name, has_port, port_text = text.partition(":")
    port = port_of(port_text)
    if not name or (has_port and port is None):
        raise ConfigError(
            f"--engine-dns: needs NAME:PORT, or the NAME of SRV records, got {shown(text)}"
        )
    if port is not None:
        return partial(addresses, name, port)
    with extra("discovery"):
        from dns.resolver import Resolver
    return partial(srv_places, Resolver, name)


async def addresses(name: str, port: int) -> set[Place]:
    """Returns those of the older family if there are any, as an engine may have one of each. Raises
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


async def srv_places(new_resolver: Callable[[], Any], name: str) -> set[Place]:
    """Returns one place for each record, as its target may have an address of either family. The
    records' priorities and weights do not count. Raises OSError."""
    with extra("discovery"):
        from dns.exception import DNSException
        from dns.rdatatype import AAAA, A
    try:
        resolver = new_resolver()
        resolver.use_edns(0, 0, UDP_BYTES)
        # In a thread: what dnspython awaits loses a cancellation now and then, on Python 3.11.
        answer = await asyncio.to_thread(
            resolver.resolve, name, "SRV", search=True, lifetime=DEADLINE_S
        )
    except DNSException as error:
        raise OSError(f"no SRV records are known: {error}") from None
    records: list[Any] = [record for record in answer if len(record.target) > 1]
    sent = {rrset.name: rrset for rrset in answer.response.additional if rrset.rdtype == AAAA}
    sent |= {rrset.name: rrset for rrset in answer.response.additional if rrset.rdtype == A}

    async def address(target: Any) -> str | None:
        if target in sent:
            return _first(record.address for record in sent[target])
        try:
            found = await asyncio.to_thread(resolver.resolve_name, target, lifetime=TARGET_S)
        except DNSException as error:
            log.warning("%s: the address of %s is not known: %s", name, target, error)
            return None
        return _first(found.addresses())

    found = await asyncio.gather(*(address(record.target) for record in records))
    return {(at, record.port) for at, record in zip(found, records, strict=True) if at}


def _first(addresses: Iterable[str]) -> str:
    """Returns always the same one, of the older family if there is any."""
    return min(addresses, key=lambda address: (":" in address, address))


def worker_at(address: str, port: int) -> str:
    return f"{address}-{port}".replace(":", "-")


def engine_at(process: EngineAgentSettings, address: str, port: int) -> DiscoveredEngine:
    """Raises ConfigError."""
    return DiscoveredEngine(
        settings_of(process, worker_at(address, port), base_url(address, port), {})
    )


async def follow(process: EngineAgentSettings, look: Look, tell: Tell) -> None:
    """Tells of the engines at these places, time and again. While nobody knows the name, all stays
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
