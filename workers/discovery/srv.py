"""Where the SRV records of a name say that engines are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from dns.exception import DNSException
from dns.name import Name
from dns.rdatatype import AAAA, A
from dns.resolver import Resolver

from workers.discovery.dns import DEADLINE_S, Place

log = logging.getLogger(__name__)

TARGET_S = 2.0
"""For the address of a target that does not come with the records, within DEADLINE_S."""
UDP_BYTES = 1232
"""Without a size, Consul answers with three records at most. What is larger comes over TCP."""


async def places(name: str, new_resolver: Callable[[], Resolver] = Resolver) -> set[Place]:
    """One for each record, as its target may have an address of either family. The records'
    priorities and weights do not count. Raises OSError."""
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

    async def address(target: Name) -> str | None:
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
    """Always the same one, of the older family if there is any."""
    return min(addresses, key=lambda address: (":" in address, address))
