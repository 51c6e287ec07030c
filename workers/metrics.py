"""Prometheus metrics of a worker's engine, read from the engine when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from workers.engines.base import Engine


class EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        now = self._engine.metrics()
        requests = GaugeMetricFamily(
            "kvroute_engine_requests", "Requests running and waiting.", labels=["state"]
        )
        requests.add_metric(["running"], now.request_active_slots)
        requests.add_metric(["waiting"], now.num_requests_waiting)
        yield requests
        blocks = GaugeMetricFamily(
            "kvroute_engine_kv_blocks", "Device KV blocks: in use and in total.", labels=["what"]
        )
        blocks.add_metric(["used"], now.kv_active_blocks)
        blocks.add_metric(["total"], now.kv_total_blocks)
        yield blocks
        yield GaugeMetricFamily(
            "kvroute_engine_prefix_cache_hit_rate",
            "Share of the prompt tokens of the last 1,000 requests that was cached; 0-1.",
            now.gpu_prefix_cache_hit_rate,
        )
        yield GaugeMetricFamily(
            "kvroute_engine_kv_idle_before_evict_seconds",
            "How long recently evicted KV blocks had gone unused; 0: none was evicted.",
            now.kv_idle_before_evict_s,
        )
        events = CounterMetricFamily(
            "kvroute_engine_kv_block_events",
            "Blocks, by what became of them: evicted, loaded, stored, stores_dropped (too much was "
            "being stored, or nothing was free below), failed (the copy failed), recomputed "
            "(instead of loaded), unconfirmed (slot freed before Redis confirmed the eviction); "
            "and fallbacks: requests that computed what they were to load.",
            labels=["event"],
        )
        for event, number in self._engine.block_events().items():
            events.add_metric([event], number)
        yield events


def registry_of(engine: Engine) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry
