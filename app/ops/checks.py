"""Checks for what makes cache-aware routing useless without an error anywhere, by asking Redis."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import orjson

from app.core.check import Check, page
from app.core.errors import KvrouteError, RedisUnavailable, cut
from app.core.keys import DATA_VERSION, Keyspace
from app.core.registration import version_in
from app.core.verdicts import State
from app.ops import namespaces, worker_checks
from app.ops.names import names_of
from app.ops.terminal import counted
from app.ops.worker_checks import START_ONE
from app.state import decisions, events, replicas
from app.state.client import RedisClient
from app.state.connect import OLDEST, deadline, memory_of
from app.state.events import NamespaceEvent
from app.state.reading import read_control

TIMEOUT_S = 5.0
PINGS = 20
SLOW_S = 0.005
"""A decision is two round trips."""
CLOCK_S = 5.0
NEARLY_FULL = 0.9
MAX_EVENTS, TRAFFIC_MS = 100, 900_000
LOST_MS = 600_000
"""Time for which a router that was lost is told."""
QUIET, SOME_PER_S = 2, 0.1
"""Minutes without a request, after so many requests a second, that are told."""
MAX_ANSWER_BYTES = 1 << 20


async def of_server(redis: RedisClient) -> AsyncIterator[Check]:
    """Yields checks of Redis itself, the last one where Redis is away."""
    try:
        took_s = await _pings(redis)
        async with deadline(TIMEOUT_S):
            info: Any = await redis.info("server")
            seconds, micros = await redis.time()
        danger, fill = await memory_of(redis, TIMEOUT_S)
    except RedisUnavailable as error:
        yield Check("redis", False, str(error), "start it, or name another: --redis-url")
        return
    version = str(info.get("redis_version", "?"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    oldest = ".".join(map(str, OLDEST))
    yield Check(
        "redis version", numbers >= OLDEST, version, f"kvroute needs {oldest} or newer: update it"
    )
    yield Check(
        "redis latency",
        took_s <= SLOW_S,
        f"{took_s * 1000:.2f} ms, median of {PINGS}",
        "run routers in the same zone as Redis, on a machine with a core to spare for it",
    )
    yield Check(
        "redis eviction",
        not danger,
        danger or "it drops no keys when its memory is full",
        "CONFIG SET maxmemory-policy noeviction",
    )
    yield Check(
        "redis memory",
        fill < NEARLY_FULL,
        f"{fill:.0%} in use" if fill else "not known",
        "raise maxmemory, or give it a machine with more: full, it takes no writes, so that leases "
        "lapse and requests are routed by load alone",
    )
    ahead_s = time.time() - (seconds + micros / 1e6)
    yield Check(
        "clocks",
        abs(ahead_s) <= CLOCK_S,
        f"this machine is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} Redis",
        "synchronise both (NTP), as logs and traces would not fit together; decisions are safe",
    )


async def _pings(redis: RedisClient) -> float:
    took = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        async with deadline(TIMEOUT_S):
            await redis.ping()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


async def of_namespace(redis: RedisClient, keyspace: Keyspace) -> AsyncIterator[Check]:
    """Yields checks of the workers of a namespace, and of what they publish."""
    name = keyspace.namespace
    try:
        summary = await namespaces.summary(redis, keyspace)
        others = await namespaces.names(redis)
        control = await read_control(redis, keyspace)
    except KvrouteError as error:
        yield Check(f"namespace {name}", False, str(error), f"see {page('upgrading.md')}")
        return
    if summary is None:
        remedy = f"--namespace {others[0]}" if others else START_ONE
        yield Check(f"namespace {name}", False, "no worker has ever registered there", remedy)
        return
    routed_to = [w for w in summary.workers if w.is_routed_to and w.info is not None]
    live = [w for w in routed_to if w.verdict.state is not State.AWAY]
    states = Counter(w.state for w in summary.workers)
    text = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    infos = [w.info for w in routed_to if w.info]
    away_s = [None if w in live else w.verdict.told(control.now_ms)["since_s"] for w in routed_to]
    alive = [w.info for w in summary.workers if w.info and w.current]
    for check in worker_checks.of_fleet(text, infos, away_s, alive):
        yield check
    tainted = [str(w.info.key) for w in summary.workers if w.state == State.TAINTED and w.info]
    if tainted:
        yield Check(
            "tainted workers",
            False,
            f"{cut(', '.join(tainted))}: what they hold may be other prompts' KV, fetched after a "
            "lease had ended; they get no requests",
            "restart their engines, and ask for a longer kv_lease_duration: see "
            f"{page('disaggregation.md')}",
        )
    if not live:
        return
    yield _versions(control.workers.values())
    names = await names_of(redis, name, [w.info for w in live if w.info])
    for check in worker_checks.of_workers(live, name, names):
        yield check
    most = worker_checks.MAX_DECISIONS * len(live)
    records = [one async for one in _first(decisions.read(redis, keyspace), most)]
    yield worker_checks.predicted(records, live)


async def of_routers(redis: RedisClient, keyspace: Keyspace) -> list[Check]:
    """Checks whether all routers are there, and requests still come. Raises RedisUnavailable."""
    now_ms, said = await replicas.read(redis, keyspace)
    happened = await events.read(redis, keyspace, "", MAX_EVENTS)
    samples = await replicas.history(redis, keyspace, now_ms - TRAFFIC_MS, minute=True)
    there = [name for name, (at_ms, _) in said.items() if now_ms - at_ms <= replicas.SPOKE_MS]
    rates = [values.get("requests_per_s") for _, values in samples]
    return [
        lost_replicas(there, happened, now_ms),
        gone_traffic([rate if isinstance(rate, int | float) else None for rate in rates]),
    ]


def lost_replicas(there: Iterable[str], events: Iterable[NamespaceEvent], now_ms: int) -> Check:
    """Checks whether routers have gone without a word. there: names of replicas. events: the newest
    first. now_ms: Redis clock."""
    present = set(there)
    lost = [
        f"{event.subject} was lost {(now_ms - event.at_ms) / 1000:.0f} s ago"
        for event in events
        if event.kind == "replica_lost"
        and event.subject not in present
        and now_ms - event.at_ms < LOST_MS
    ]
    return Check(
        "replicas",
        not lost,
        cut("; ".join(lost), 200) or f"{counted(len(present), 'replica')} of routers",
        "did its process end? Its own log says why; the others go on without it",
    )


def gone_traffic(per_s: Sequence[float | None]) -> Check:
    rates = [rate for rate in per_s if rate is not None]
    now, before = rates[-QUIET:], rates[:-QUIET]
    mean = sum(before) / len(before) if before else 0.0
    is_gone = len(now) == QUIET and not any(now) and mean > SOME_PER_S
    return Check(
        "traffic",
        not is_gone,
        f"no request for {QUIET} minutes, after {mean:.1f} a second" if is_gone else "as before",
        "is the balancer up, and does it know these routers?",
    )


def _versions(texts: Iterable[bytes]) -> Check:
    spoken = set()
    for text in texts:
        try:
            spoken.add(version_in(text))
        except ValueError:
            continue
    return Check(
        "versions",
        spoken <= {DATA_VERSION},
        f"workers speak version {', '.join(map(str, sorted(spoken))) or '?'} of the data model",
        f"this release speaks {DATA_VERSION}: run one release in a namespace; see "
        f"{page('upgrading.md')}",
    )


async def of_router(url: str) -> Check:
    """Checks what a router says in /readiness."""
    about = f"router {url}"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            readiness = orjson.loads(await asyncio.to_thread(_get, f"{url.rstrip('/')}/readiness"))
        ready, missing = bool(readiness["ready"]), [str(what) for what in readiness["missing"]]
    except (HTTPException, OSError, ValueError, LookupError, TypeError) as error:
        text = f"no answer of a router: {error or type(error).__name__}"
        return Check(about, False, cut(text), "is it running, and reachable from here?")
    return Check(
        about,
        ready and not missing,
        "; ".join(missing) or "ready",
        f"{page('tokenization.md')} and {page('operating.md')} say what each of these means",
    )


def _get(url: str) -> bytes:
    direct = build_opener(ProxyHandler({}))
    try:
        answer = direct.open(url, timeout=TIMEOUT_S)
    except HTTPError as error:
        answer = error
    with answer:
        body: bytes = answer.read(MAX_ANSWER_BYTES)
        return body


async def _first(records: AsyncIterator[Any], most: int) -> AsyncIterator[Any]:
    seen = 0
    async for record in records:
        yield record
        seen += 1
        if seen >= most:
            return
        if seen % 64 == 0:
            await asyncio.sleep(0)
