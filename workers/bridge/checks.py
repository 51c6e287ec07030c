"""What makes an engine useless to routers without an error anywhere, seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress

import aiohttp
import zmq.asyncio

from app.core.check import Check
from app.core.documents import page
from app.core.errors import ConfigError, EngineUnavailable
from app.core.types import WorkerKey
from workers.bridge.discovery import discover
from workers.bridge.engine_http import EngineHttp
from workers.bridge.facts import EngineFacts, EventSource
from workers.bridge.load import IDLE
from workers.bridge.stream import EventStream
from workers.bridge.wire import Batch

EVENTS_S = 10.0


async def of_engine(
    url: str, api_key: str, block_size: int, live: Mapping[WorkerKey, str], *, probe: bool
) -> AsyncIterator[Check]:
    """Checks of one engine; none further if it cannot be followed.

    block_size: of the namespace. live: its workers, and the address of each. probe: send the engine
    a request, and see whether an event comes of it.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    async with aiohttp.ClientSession(headers=headers) as session:
        try:
            facts = await discover(session, url)
        except EngineUnavailable as error:
            yield Check(
                f"engine {url}", False, str(error), "is it running, and reachable from here?"
            )
            return
        except ConfigError as error:
            found, _, remedy = str(error).partition(": ")
            yield Check(f"engine {url}", False, found, remedy or f"see {page('engines.md')}")
            return
        engine = EngineHttp(session, url)
        yield Check(
            f"engine {url}",
            True,
            f"{facts.kind} {facts.version}, {', '.join(facts.models)}: prefix caching and KV "
            f"events are on, blocks of {facts.block_size} tokens",
        )
        yield Check(
            f"engine {url} blocks",
            facts.block_size % block_size == 0,
            f"{facts.block_size} tokens; {block_size} in the namespace",
            f"start the engine with --block-size {block_size}, or its agent in another --namespace",
        )
        keys = [key for key, address in live.items() if address.rstrip("/") == url.rstrip("/")]
        yield _registered(url, facts, keys)
        if facts.kind == "vllm":
            yield await _idle_times(url, engine)
        for source in facts.sources:
            yield await _events(url, engine, facts, source, probe=probe)


async def _idle_times(url: str, engine: EngineHttp) -> Check:
    """Whether vLLM reports how long evicted blocks were idle."""
    text = None
    with suppress(EngineUnavailable, ConfigError):
        text = await engine.get("/metrics")
    told = text is not None and IDLE.encode() in text
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


async def _events(
    url: str, engine: EngineHttp, facts: EngineFacts, source: EventSource, *, probe: bool
) -> Check:
    """Whether events come: with `probe` a batch, else the engine's answer to a question."""
    seen = False
    with suppress(TimeoutError), zmq.asyncio.Context() as context:
        async with asyncio.timeout(EVENTS_S), asyncio.TaskGroup() as tasks:
            with EventStream(context, source) as stream:
                if probe:
                    tasks.create_task(_send(engine, facts))
                async with aclosing(stream.follow()) as items:
                    async for item in items:
                        if not probe or isinstance(item, Batch):
                            seen = True
                            break
    return Check(
        f"engine {url} events",
        seen,
        f"{source.endpoint} {'sends events' if probe else 'answers'}"
        if seen
        else f"nothing came from {source.endpoint} in {EVENTS_S:g} s",
        "is the port open to this machine? In a container, publish it; in the engine's "
        "--kv-events-config, bind tcp://*:PORT",
    )


async def _send(engine: EngineHttp, facts: EngineFacts) -> None:
    """A prompt of two blocks, which no other begins with."""
    prompt = [(i * 7) % 101 + 1 for i in range(2 * facts.block_size + 1)]
    with suppress(EngineUnavailable, ConfigError):
        await engine.post_object(
            "/v1/completions", {"model": facts.models[0], "prompt": prompt, "max_tokens": 1}
        )
