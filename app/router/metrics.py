"""What a router counts about itself, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from functools import cache, partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.core.types import TierOverlap
from app.policy.view import View

# Otherwise each counter and histogram has a further series, with when it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAITED_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)

WORKER_LOAD = {
    "requests": "Requests reserved on a worker.",
    "blocks": "KV blocks reserved on a worker.",
    "prefill_tokens": "Prompt tokens reserved on a worker and still to be computed.",
    "queue_seconds": "Predicted length of a worker's queue of prefills.",
    "kv_active_blocks": "KV blocks in use on a worker, as it reports.",
    "requests_waiting": "Requests waiting in a worker, as it reports.",
    "cache_usage": "Share of a worker's KV blocks in use, as it reports; 0-1.",
    "stale": "1 if a worker's latest report is older than a second, else 0; with more than 256 "
    "workers, older than ten of the longer intervals.",
}
WORKER_GPU = {
    "memory_used_bytes": ("memory_used_bytes", "Memory in use on a worker's GPU."),
    "memory_total_bytes": ("memory_total_bytes", "Memory of a worker's GPU."),
    "utilisation": ("utilisation", "Share of time during which a worker's GPU ran anything; 0-1."),
    "temperature_c": ("temperature_celsius", "Temperature of a worker's GPU."),
    "power_w": ("power_watts", "Power draw of a worker's GPU."),
    "pcie_sent_bytes_per_s": (
        "pcie_sent_bytes_per_second",
        "Rate at which a worker's GPU sends over PCIe.",
    ),
    "pcie_received_bytes_per_s": (
        "pcie_received_bytes_per_second",
        "Rate at which a worker's GPU receives over PCIe.",
    ),
}
"""By the names of GpuReadings. What a GPU does not report, or not lately, has no sample."""


class WorkerGauges(Collector):
    """What a view shows of its workers. view: None shows nothing."""

    def __init__(self) -> None:
        self.view: View | None = None

    def collect(self) -> Iterator[Metric]:
        shown = [] if self.view is None else list(_shown(self.view))
        for name, text in WORKER_LOAD.items():
            family = GaugeMetricFamily(f"kvroute_worker_{name}", text, labels=["worker"])
            for worker, load, _ in shown:
                family.add_metric([worker], load[name])
            yield family
        for reading, (name, text) in WORKER_GPU.items():
            family = GaugeMetricFamily(f"kvroute_worker_gpu_{name}", text, labels=["worker"])
            for worker, _, gpu in shown:
                if reading in gpu:
                    family.add_metric([worker], gpu[reading])
            yield family


def _shown(view: View) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Each worker with its values, by the names in WORKER_LOAD and in WORKER_GPU."""
    for info, load, measured in zip(view.infos, view.loads, view.measured, strict=True):
        reported = measured.metrics
        is_stale = measured.is_stale(view.now_ms, len(view.infos))
        values = {
            "requests": load.requests,
            "blocks": load.blocks,
            "prefill_tokens": load.prefill_tokens,
            "queue_seconds": load.queue_s(view.now_ms),
            "kv_active_blocks": reported.kv_active_blocks,
            "requests_waiting": reported.num_requests_waiting,
            "cache_usage": reported.gpu_cache_usage_perc,
            "stale": is_stale,
        }
        yield str(info.key), values, {} if is_stale else measured.gpu.known()


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


class Telemetry:
    """One router's metrics, in a registry of their own. All names begin with `kvroute_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.decisions = counter(
            "kvroute_decisions",
            "Decisions by policy and outcome: routed, no_workers, too_large (for every worker), "
            "all_busy, overloaded, gone (the caller hung up while waiting), or failed (abandoned, "
            "or an internal error).",
            ["policy", "outcome"],
        )
        self.degraded = counter(
            "kvroute_degraded_decisions", "Decisions made without Redis, by load alone."
        )
        self.blind = counter(
            "kvroute_blind_decisions",
            "Lookups without overlap, because the prompt's shard of the index was unreachable.",
        )
        self.decision_seconds = histogram(
            "kvroute_decision_seconds",
            "Time from a request's hashes to its worker, including the reservation; for a request "
            "that had to wait, time until it began to wait.",
            buckets=_SECONDS,
        )
        self.redis_seconds = histogram(
            "kvroute_redis_round_trip_seconds",
            "Time of Redis round trips for decisions, by step.",
            ["step"],
            buckets=_SECONDS,
        )
        self.hit_fraction = histogram(
            "kvroute_hit_fraction",
            "Share of a prompt's blocks that its worker held.",
            buckets=_FRACTIONS,
        )
        self.locality = counter(
            "kvroute_locality",
            "Routed requests by whether the worker with the longest overlap was chosen and, if "
            "not, why: kept, none, tie, load, session, full, excluded, lease, degraded.",
            ["reason"],
        )
        self.worker_blocks = counter(
            "kvroute_worker_routed_blocks",
            "Blocks of the prompts routed to a worker (isl), and those of them that it held "
            "(overlap), without degraded decisions.",
            ["worker", "what"],
        )
        self.isl_blocks = counter(
            "kvroute_isl_blocks", "Blocks of routed prompts, without those of degraded decisions."
        )
        self.overlap_blocks = counter(
            "kvroute_overlap_blocks",
            "Blocks of routed prompts that their worker held, by tier.",
            ["tier"],
        )
        self.reservations = counter(
            "kvroute_reservations",
            "Reservations by event: made, prefill_complete, released, expired, unknown.",
            ["event"],
        )
        self.conflicts = counter(
            "kvroute_reserve_conflicts",
            "Reservations refused, by reason: changed, full, lapsed.",
            ["reason"],
        )
        self.suspensions = counter(
            "kvroute_worker_suspensions",
            "Workers that got no requests until they renewed their lease, because a request that "
            "they had failed was released with worker_failed.",
        )
        self.retries = counter(
            "kvroute_decision_retries", "Decisions made again after a refused reservation."
        )
        self.waiting = gauge(
            "kvroute_waiting_requests", "Requests waiting at this replica for a worker."
        )
        self.waited_seconds = histogram(
            "kvroute_waited_seconds",
            "How long requests waited for a worker, whatever the outcome.",
            buckets=_WAITED_SECONDS,
        )
        self.waits = counter(
            "kvroute_waits",
            "Requests that had to wait, by tenant (tenants without a weight together), priority, "
            "and outcome: routed, timed_out, crowded_out (too many were waiting), gone (the caller "
            "hung up), stopped (the replica is stopping), failed.",
            ["tenant", "priority", "outcome"],
        )
        self.metrics_age = gauge(
            "kvroute_metrics_stream_lag_seconds", "Age of the newest entry in the metrics stream."
        )
        self.index_fill = gauge(
            "kvroute_index_fill",
            "Blocks in the index over the number it was laid out for, from a sample. Above 4, "
            "changes to the index are slower.",
        )
        self.load_mean = gauge("kvroute_load_avg", "Mean used fraction of the workers' KV blocks.")
        self.load_std = gauge(
            "kvroute_load_std",
            "Sample standard deviation of the used fraction of the workers' KV blocks.",
        )
        # Looking up a child takes longer than counting in it, and a decision counts in many.
        self.decisions_of = cache(self.decisions.labels)
        self.locality_of = cache(self.locality.labels)
        self.overlap_of = cache(self.overlap_blocks.labels)
        self.seconds_of = cache(self.redis_seconds.labels)
        self.reservations_of = cache(self.reservations.labels)
        for tier in ("device", "host", "disk"):
            self.overlap_of(tier)
        self._counted: dict[str, tuple[Counter, Counter]] = {}
        self.workers = WorkerGauges()
        self.registry.register(self.workers)

    async def text(self) -> bytes:
        """All metrics in Prometheus text format. Other tasks run between any two of them, as one
        takes up to 10 ms with a thousand workers."""
        parts = []
        for family in self.registry.collect():
            parts.append(generate_latest(_One(family)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def count_blocks(self, worker: str, isl: int, overlap: TierOverlap) -> None:
        """Count a prompt of `isl` blocks, routed to a worker that held `overlap` of them."""
        self.isl_blocks.inc(isl)
        if overlap.device:
            self.overlap_of("device").inc(overlap.device)
        if overlap.host:
            self.overlap_of("host").inc(overlap.host)
        if overlap.disk:
            self.overlap_of("disk").inc(overlap.disk)
        self.hit_fraction.observe(overlap.total / isl)
        known = self._counted.get(worker)
        if known is None:
            blocks = self.worker_blocks
            known = blocks.labels(worker, "isl"), blocks.labels(worker, "overlap")
            self._counted[worker] = known
        known[0].inc(isl)
        known[1].inc(overlap.total)

    def keep_workers(self, names: Collection[str]) -> None:
        """Forget what was counted for all other workers."""
        for gone in self._counted.keys() - set(names):
            for what in ("isl", "overlap"):
                self.worker_blocks.remove(gone, what)
            del self._counted[gone]
