"""Prometheus metrics of a worker's engine, read from the engine when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry

from app.http.metrics import Family, Sampled, ScrapeCollector
from workers.engines.base import Engine
from workers.tasks import FAILURES

REQUESTS = Family("kvroute_engine_requests", "gauge", "Requests running and waiting.", ("state",))
BLOCKS = Family(
    "kvroute_engine_kv_blocks", "gauge", "Device KV blocks: in use and in total.", ("what",)
)
HIT_RATE = Family(
    "kvroute_engine_prefix_cache_hit_rate",
    "gauge",
    "Share of the prompt tokens of the last 1,000 requests that was cached; 0-1.",
)
IDLE = Family(
    "kvroute_engine_kv_idle_before_evict_seconds",
    "gauge",
    "How long recently evicted KV blocks had gone unused; 0: none was evicted.",
)
EVENTS = Family(
    "kvroute_engine_kv_block_events",
    "counter",
    "Blocks, by what became of them: evicted, loaded, stored, stores_dropped (too much was being "
    "stored, or nothing was free below), failed (the copy failed), recomputed (instead of loaded), "
    "fetched (from another worker), lost (not fetched as they should be, and so computed), "
    "unconfirmed (slot freed before Redis confirmed the eviction); and fallbacks: requests that "
    "computed what they were to load.",
    ("event",),
)
KV_PORT = Family(
    "kvroute_engine_kv_connections",
    "counter",
    "Connections to the port for KV that have ended, by outcome: sent, declined (the target needed "
    "nothing), refused (no frame, no key, nothing kept, other bits), stalled (too slow), lost (it "
    "broke), crowded (closed for others), failed (a fault of this worker).",
    ("outcome",),
)
FAMILIES = (REQUESTS, BLOCKS, HIT_RATE, IDLE, EVENTS, KV_PORT)


def _samples(engine: Engine) -> Iterator[Sampled]:
    now = engine.metrics()
    yield REQUESTS, ("running",), now.request_active_slots
    yield REQUESTS, ("waiting",), now.num_requests_waiting
    yield BLOCKS, ("used",), now.kv_active_blocks
    yield BLOCKS, ("total",), now.kv_total_blocks
    yield HIT_RATE, (), now.gpu_prefix_cache_hit_rate
    yield IDLE, (), now.kv_idle_before_evict_s
    for event, number in engine.block_events().items():
        yield EVENTS, (event,), number
    for outcome, number in engine.kv_connections().items():
        yield KV_PORT, (outcome,), number


def registry_of(engine: Engine) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(FAILURES)
    registry.register(ScrapeCollector(FAMILIES, partial(_samples, engine)))
    return registry
