"""Registration of an engine's ranks as workers, and the names under which others reach them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from hashlib import blake2b
from urllib.parse import urlsplit

import zmq.asyncio

from app.core.limits import MAX_KV_HOSTS
from app.core.roles import Role
from app.core.settings.agent import EngineAgentSettings
from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from workers.bridge.http import kv_fingerprint
from workers.bridge.http.engine import zmq_host
from workers.bridge.http.facts import EngineFacts, EventSource


async def registration(
    settings: EngineAgentSettings,
    context: zmq.asyncio.Context,
    facts: EngineFacts,
    source: EventSource,
    block_size: int,
    probed: str,
    hosts: tuple[str, ...],
) -> WorkerInfo:
    """Returns what a rank registers. probed: the hash of its tokenizer. hosts: for its KV."""
    return WorkerInfo(
        key=WorkerKey(settings.resolved_id(), source.rank),
        address=_address(settings),
        block_size=block_size,
        kv_total_blocks=facts.capacity_tokens // block_size,
        max_requests=settings.max_requests,
        reuse_blocks=max(1, facts.reuse_tokens // block_size),
        recomputed_blocks=-(-facts.recomputed_tokens // block_size),
        lookahead_blocks=-(-facts.lookahead_tokens // block_size),
        accelerator="",
        engine=f"{facts.kind} {facts.version}".strip(),
        models=facts.models,
        adapters=facts.adapters,
        max_model_len=facts.max_model_len or 0,
        tokenizer=facts.tokenizer,
        tokenizer_hash=probed,
        event_addresses=tuple(filter(None, (source.endpoint, source.replay))),
        role=Role.parse(settings.role),
        kv_transfer=settings.kv_transfer,
        kv_lease_s=settings.kv_lease_s,
        kv_hosts=hosts,
        kv_fingerprint=await fingerprint(settings, context, facts, source.rank),
        kv_compatible=settings.kv_compatible,
        revision=settings.revision,
        engine_life=f"{facts.started_s:.3f}" if facts.started_s is not None else "",
        engine_id=await _engine_id(settings, facts, source.rank),
        bootstrap_port=settings.bootstrap_port if settings.kv_transfer == "sglang" else 0,
    )


def _address(settings: EngineAgentSettings) -> str:
    return settings.address or settings.engine_url.rstrip("/")


async def _engine_id(settings: EngineAgentSettings, facts: EngineFacts, rank: int) -> str:
    """Returns one id, whoever follows that rank of that process, under whatever name."""
    place = ""
    if facts.started_s is None or round(facts.started_s, 2) == facts.started_s:
        # As others may have started then, too.
        url = urlsplit(_address(settings))
        at = min(await addresses(url.hostname or ""), default=url.hostname)
        place = f"{url.scheme}://{at}:{url.port}{url.path}"
    text = f"{facts.kind} {facts.started_s!r} {place} {rank}"
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


async def fingerprint(
    settings: EngineAgentSettings, context: zmq.asyncio.Context, facts: EngineFacts, rank: int
) -> tuple[str, ...]:
    """Returns what decides whether the rank's KV is right elsewhere."""
    if settings.kv_transfer != "nixl":
        return kv_fingerprint.of_sglang(facts) if settings.kv_transfer else ()
    hosts = (settings.kv_host, zmq_host(_address(settings)), zmq_host(settings.engine_url))
    port = settings.side_channel_port + rank
    return await kv_fingerprint.of_vllm(context, facts, dict.fromkeys(filter(None, hosts)), port)


RESOLVE_S = 2.0


async def kv_hosts(settings: EngineAgentSettings) -> tuple[str, ...]:
    """Returns the hosts at which others fetch an engine's KV, and their present addresses: an
    engine may name either."""
    if settings.kv_transfer != "nixl":
        return ()
    hosts = urlsplit(_address(settings)).hostname, settings.kv_host
    names = {host.lower() for host in hosts if host}
    for host in sorted(names):
        names |= set(await addresses(host))
    return tuple(sorted(names)[:MAX_KV_HOSTS])


async def addresses(host: str) -> list[str]:
    """Returns the addresses that a host has now; none: it has none, or they are not known."""
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(RESOLVE_S):
            infos = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return [str(address[0]) for *_, address in infos]
    return []
