"""Checks of an engine from outside: faults that cause no error and leave it useless to routers."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import aiohttp
import zmq.asyncio

from app.core.check import Check, page
from app.core.errors import EngineUnavailable, EngineUnfit
from app.core.trust import TOP
from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from workers.bridge.events.stream import EventStream
from workers.bridge.http.discovery import discover
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import IDLE_TIMES, EngineFacts, EventSource

EVENTS_S = 10.0
CAPACITY_GAP = 0.05
"""Share by which engine and agent may differ: agents count whole blocks."""
EVENT_S = 2.0
"""Seconds to wait for the event of one request."""
_LOOPBACK = re.compile(r"tcp://(127(\.\d+){3}|localhost|\[::1\]):")


async def of_engine(
    url: str, api_key: str, live: Sequence[WorkerInfo], *, probe: bool
) -> AsyncIterator[Check]:
    """Yields the checks of one engine; none further if it cannot be followed. live: the workers of
    the namespace. probe: send the engine a request, and see whether an event comes of it."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    async with aiohttp.ClientSession(headers=headers) as session:
        try:
            facts = await discover(session, url)
        except EngineUnavailable as error:
            yield Check(
                f"engine {url}", False, str(error), "is it running, and reachable from here?"
            )
            return
        except EngineUnfit as error:
            wrong, _, remedy = str(error).partition(": ")
            yield Check(f"engine {url}", False, wrong, remedy or f"see {page('engines.md')}")
            return
        engine = EngineHttp(session, url)
        if live:
            facts = facts.beside(live[0].block_size)
        yield _caching(url, facts)
        own = [info for info in live if info.address.rstrip("/") == url.rstrip("/")]
        yield _registered(url, facts, [info.key for info in own])
        yield _capacity(url, facts, own)
        heard_at = {info.key.dp_rank: info.event_addresses for info in own}
        if facts.kind == "vllm":
            yield await _idle_times(url, engine)
        for source in facts.sources if facts.rung == TOP else ():
            listened = _as_by_agent(source, heard_at.get(source.rank, ()), engine.host)
            yield await _events(url, engine, facts, source, listened, probe=probe)


def _caching(url: str, facts: EngineFacts) -> Check:
    name = f"{facts.kind} {facts.version}".strip() + f", {', '.join(facts.models)}"
    if facts.rung != TOP:
        return Check(f"engine {url}", None, f"{name}: {facts.rung.trust}: {facts.rung.trust_cause}")
    text = f"{name}: prefix caching and KV events are on, blocks of {facts.block_size} tokens"
    return Check(f"engine {url}", True, text)


async def _idle_times(url: str, engine: EngineHttp) -> Check:
    text = None
    with suppress(EngineUnavailable, EngineUnfit):
        text = await engine.get("/metrics")
    told = text is not None and IDLE_TIMES.encode() in text
    return Check(
        f"engine {url} idle times",
        told or None,
        "told when it evicts" if told else "not known: add --kv-cache-metrics to the engine",
    )


def _registered(url: str, facts: EngineFacts, keys: list[WorkerKey]) -> Check:
    missing = {source.rank for source in facts.sources} - {key.dp_rank for key in keys}
    return Check(
        f"engine {url} agent",
        not missing,
        f"registered as {', '.join(map(str, keys))}"
        if not missing
        else f"no live worker has this address for rank {', '.join(map(str, sorted(missing)))}",
        f"kvroute agent --engine-url {url}",
    )


def _capacity(url: str, facts: EngineFacts, own: Sequence[WorkerInfo]) -> Check:
    said, taken = facts.capacity_tokens, [info.kv_total_blocks * info.block_size for info in own]
    differs = any(abs(tokens - said) > CAPACITY_GAP * said for tokens in taken)
    text = f"{said:,} tokens" + (f", and its agent says {max(taken):,}" if taken else "")
    remedy = "start its agent without --capacity-tokens"
    return Check(f"engine {url} capacity", not differs if said else None, text, remedy)


def _as_by_agent(source: EventSource, addresses: Sequence[str], host: str) -> EventSource:
    """Returns the source at the addresses that its agent uses, if it has one. host: the engine's,
    which an agent beside it calls its own."""
    if not addresses:
        return source
    endpoint, *replay = (_LOOPBACK.sub(f"tcp://{host}:", address) for address in addresses)
    return replace(source, endpoint=endpoint, replay=replay[0] if replay else None)


async def _events(
    url: str,
    engine: EngineHttp,
    facts: EngineFacts,
    said: EventSource,
    source: EventSource,
    *,
    probe: bool,
) -> Check:
    """Whether `source` is there and answers for missed events, with `probe` also whether a request
    causes an event. said: where the engine says that it publishes."""
    asked, at = source.endpoint, "where its agent listens; the engine publishes at"
    told: str | None = said.endpoint
    problem = ""
    with zmq.asyncio.Context() as context:
        try:
            async with asyncio.timeout(EVENTS_S):
                await _hears(context, source, engine, facts if probe else None)
            if source.replay is not None:
                asked, told = source.replay, said.replay
                at = "where its agent asks for missed events; the engine answers that at"
                async with asyncio.timeout(EVENTS_S):
                    await _answers(context, source)
        except TimeoutError:
            problem = f"nothing came from {asked} in {EVENTS_S:g} s"
    if problem and told is not None and asked != told:
        problem += f", {at} {told}"
    elif problem and asked == source.replay:
        problem += ", its replay endpoint"
    return Check(
        f"engine {url} events",
        not problem,
        problem or f"{source.endpoint} {'sends events' if probe else 'answers'}",
        "is the port open to this machine? In a container, publish it; in the engine's "
        "--kv-events-config, bind tcp://*:PORT, which is the agent's --events-endpoint or "
        "--replay-endpoint",
    )


async def _hears(
    context: zmq.asyncio.Context, source: EventSource, engine: EngineHttp, facts: EngineFacts | None
) -> None:
    """Returns once a publisher was reached there. facts: of an engine to send a request to; then,
    once an event has come."""
    with context.socket(zmq.SUB) as socket:
        socket.subscribe(source.topic.encode())
        # Before both have said what they are, anything that listens would do.
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(source.endpoint)
            await monitor.recv_multipart()
            socket.disable_monitor()
        while facts is not None:
            # Again, as the engine may publish before it has heard of the subscription.
            await _send(engine, facts)
            if await socket.poll(round(EVENT_S * 1000)):
                return


async def _answers(context: zmq.asyncio.Context, source: EventSource) -> None:
    with EventStream(context, source) as stream:
        async with aclosing(stream.follow()) as items:
            await anext(items)


async def _send(engine: EngineHttp, facts: EngineFacts) -> None:
    """Sends a prompt of two blocks that the engine has not seen before."""
    prompt = random.choices(range(1, 100), k=2 * facts.block_size + 1)
    with suppress(EngineUnavailable, EngineUnfit):
        await engine.post_object(
            "/v1/completions", {"model": facts.models[0], "prompt": prompt, "max_tokens": 1}
        )
