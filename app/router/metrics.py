"""Prometheus metrics of a router."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from app.core.types import Incarnation, TierOverlap
from app.core.verdicts import FAILED, State
from app.core.worker_report import GPU, METRICS, Item, WorkerInfo
from app.http.metrics import (
    Counter,
    Family,
    Sampled,
    ScrapeCollector,
    Table,
    counter,
    gauge,
    histogram,
)
from app.http.supervisor import TASK_FAILURES
from app.policy.view import View
from app.router.reuse import Reuse

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAITED_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)

LOOK_EVERY_S = 0.05
LOOKS = 100
"""Looks within five seconds; nine in ten are less late than is told."""


def _of_worker(name: str, help_text: str) -> Family:
    return Family(f"kvroute_worker_{name}", "gauge", help_text, ("worker",))


def _reported(items: Iterable[Item]) -> dict[str, Family]:
    return {
        item.gauge: _of_worker(item.gauge, f"{item.help[0].upper()}{item.help[1:]}.")
        for item in items
        if item.gauge
    }


WORKER_FAMILIES = {
    "requests": _of_worker("requests", "Requests reserved on a worker."),
    "blocks": _of_worker("blocks", "KV blocks reserved on a worker."),
    "prefill_tokens": _of_worker(
        "prefill_tokens", "Prompt tokens reserved on a worker and still to be computed."
    ),
    "queue_seconds": _of_worker(
        "queue_seconds", "Predicted length of a worker's queue of prefills."
    ),
    "others_requests": _of_worker(
        "others_requests",
        "Requests in a worker's engine that no router reserved, if there are any.",
    ),
    "state": Family(
        "kvroute_worker_state",
        "gauge",
        f"1 for what a worker is for requests: {', '.join(State)}.",
        ("worker", "state"),
    ),
    "failures": _of_worker("failures", "Requests that a worker failed in a row; 7 at most."),
    "failed_share": _of_worker(
        "failed_share", "Of a worker's tries lately, the share that failed; it fades in seconds."
    ),
    "first_token_late_seconds": _of_worker(
        "first_token_late_seconds",
        "How much later than predicted first tokens of a worker came lately, if they did.",
    ),
    "changes": _of_worker(
        "changes", "How often a worker has joined or left within the last hour, or fallen ill."
    ),
    "agent_away_seconds": _of_worker(
        "agent_away_seconds",
        "For so long a worker's agent has been away, while its engine answers and is routed to.",
    ),
    **_reported(METRICS),
    "stale": _of_worker(
        "stale",
        "1 if a worker's latest report is older than a second, else 0; with more than 256 "
        "workers, older than ten of the longer intervals.",
    ),
    **_reported(GPU),
}
"""Families by their names in what `_shown` yields. What a GPU does not report, or not lately, has
no sample; nor do failures and requests of others without any."""


def _samples(view: View | None, changes: Mapping[str, int]) -> Iterator[Sampled]:
    for worker, number in changes.items():
        yield WORKER_FAMILIES["changes"], (worker,), number
    if view is None:
        return
    for inc, info, values in _shown(view):
        worker = str(info.key)
        yield WORKER_FAMILIES["state"], (worker, view.verdict(inc).state.value), 1.0
        for name, value in values.items():
            if value is not None:
                yield WORKER_FAMILIES[name], (worker,), value


def _shown(view: View) -> Iterator[tuple[Incarnation, WorkerInfo, dict[str, float | None]]]:
    """Yields each worker with its values, by the names of WORKER_FAMILIES."""
    for inc, info in view.paused.items():
        yield inc, info, _failures(view, inc)
    for inc, info, load, measured, others, away_s in zip(
        *(view.incarnations, view.infos, view.loads, view.measured, view.others_requests),
        view.away_s,
        strict=True,
    ):
        is_stale = measured.is_stale(view.now_ms, len(view.infos))
        values = {
            "requests": load.requests,
            "blocks": load.blocks,
            "prefill_tokens": load.prefill_tokens,
            "queue_seconds": load.queue_s(view.now_ms),
            "others_requests": others or None,
            "first_token_late_seconds": view.marks[inc].first_tokens_late_s(view.now_ms),
            "agent_away_seconds": away_s,
            **_failures(view, inc),
            **_values(METRICS, measured.metrics),
            "stale": is_stale,
        }
        if not is_stale:
            values |= _values(GPU, measured.gpu)
        yield inc, info, values


def _failures(view: View, inc: Incarnation) -> dict[str, float | None]:
    failed = view.marks[inc].get(FAILED)
    if failed is None:
        return {}
    return {"failures": failed.count, "failed_share": failed.share_at(view.now_ms)}


def _values(items: Iterable[Item], report: object) -> dict[str, float | None]:
    return {item.gauge: getattr(report, item.name) for item in items if item.gauge}


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


class Telemetry(Table):
    """One router's metrics, in a registry of their own."""

    decisions = counter(
        "decisions",
        "Decisions by policy and outcome: routed, no_workers, too_large (for every worker), "
        "all_busy, overloaded, gone (the caller hung up), superseded (a later try holds the "
        "reservation), or failed (abandoned, or an internal error).",
        "policy",
        "outcome",
    )
    degraded = counter("degraded_decisions", "Decisions made without Redis, by load alone.")
    blind = counter(
        "blind_decisions",
        "Lookups without overlap, because the prompt's shard of the index was unreachable.",
    )
    decision_seconds = histogram(
        "decision_seconds",
        "Time from a request's hashes to its worker, including the reservation; for a request "
        "that had to wait, time until it began to wait.",
        buckets=_SECONDS,
    )
    redis_seconds = histogram(
        "redis_round_trip_seconds",
        "Time of Redis round trips for decisions, by step.",
        "step",
        buckets=_SECONDS,
    )
    hit_fraction = histogram(
        "hit_fraction", "Share of a prompt's blocks that its worker had cached.", buckets=_FRACTIONS
    )
    locality = counter(
        "locality",
        "Routed requests by whether the worker with the longest overlap was chosen and, if "
        "not, why: kept, none, tie, load, session, full, excluded, lease, degraded.",
        "reason",
    )
    worker_blocks = counter(
        "worker_routed_blocks",
        "Blocks of the prompts routed to a worker (isl), and those of them that it held "
        "(overlap), without degraded decisions.",
        "worker",
        "what",
    )
    isl_blocks = counter(
        "isl_blocks", "Blocks of routed prompts, without those of degraded decisions."
    )
    overlap_blocks = counter(
        "overlap_blocks",
        "Blocks of routed prompts that their worker held, by tier.",
        "tier",
    )
    saved_s = counter(
        "saved_prefill_seconds",
        "Predicted seconds of prefill that cached blocks saved.",
    )
    reservations = counter(
        "reservations",
        "Reservations by event: made, source_complete, prefill_complete, released, expired, "
        "unknown; made_again, of what a door carried while Redis lost it.",
        "event",
    )
    conflicts = counter(
        "reserve_conflicts",
        "Reservations refused, by reason: changed, full, lapsed.",
        "reason",
    )
    suspensions = counter(
        "worker_suspensions",
        "Workers that got no requests until they renewed their lease, or for longer, because they "
        "had failed some, or took no more for now.",
    )
    refusals = counter(
        "invalid_requests",
        "Requests refused as invalid, by the code of the error.",
        "code",
    )
    retries = counter("decision_retries", "Decisions made again after a refused reservation.")
    waiting = gauge("waiting_requests", "Requests waiting at this replica for a worker.")
    waited_seconds = histogram(
        "waited_seconds",
        "How long requests waited for a worker, whatever the outcome.",
        buckets=_WAITED_SECONDS,
    )
    waits = counter(
        "waits",
        "Requests that had to wait, by tenant (tenants without a weight together), priority, "
        "and outcome: routed, timed_out, crowded_out (too many were waiting), gone (the caller "
        "hung up), stopped (the replica is stopping), failed.",
        "tenant",
        "priority",
        "outcome",
    )
    metrics_age = gauge(
        "metrics_stream_lag_seconds", "Age of the newest entry in the metrics stream."
    )
    index_fill = gauge(
        "index_fill",
        "Blocks in the index over the number it was laid out for, from a sample. Above 4, "
        "changes to the index are slower.",
    )
    evicting = gauge(
        "redis_may_evict",
        "1 if Redis may drop any key once it is full, by its maxmemory-policy, else 0.",
    )
    memory_fill = gauge(
        "redis_memory_fill",
        "Used share of Redis's maxmemory, or without one of its machine's memory; 0: not known.",
    )
    loop_late_s = gauge(
        "loop_late_seconds",
        "How late the router does what is due, the 90th percentile of five seconds: it has too "
        "little CPU.",
    )
    cpu = gauge("process_cpu", "Cores that the router used, in the mean of five seconds.")
    task_failures = TASK_FAILURES
    workers = gauge(
        "workers", "Live workers that can take requests; also 0 while Redis is unreachable."
    )
    sleeps = gauge(
        "asleep",
        "1 if no worker is live that decodes, and a planner starts one for a request that waits, "
        "else 0.",
    )
    load_mean = gauge("load_avg", "Mean used fraction of the workers' KV blocks.")
    load_std = gauge(
        "load_std", "Sample standard deviation of the used fraction of the workers' KV blocks."
    )

    def __init__(self) -> None:
        super().__init__()
        # Looking up a child takes longer than counting in it, and a decision counts in many.
        self.decisions_of = cache(self.decisions.labels)
        self.locality_of = cache(self.locality.labels)
        self.overlap_of = cache(self.overlap_blocks.labels)
        self.seconds_of = cache(self.redis_seconds.labels)
        self.reservations_of = cache(self.reservations.labels)
        for tier in ("device", "host", "disk"):
            self.overlap_of(tier)
        self._counted: dict[str, tuple[Counter, Counter]] = {}
        self.reuse = Reuse(self.registry)
        self.view: View | None = None
        self.changes: Mapping[str, int] = {}
        """Times that each worker has joined or left within the last hour."""
        self.registry.register(
            ScrapeCollector(WORKER_FAMILIES.values(), lambda: _samples(self.view, self.changes))
        )

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
        counters = self._counted.get(worker)
        if counters is None:
            blocks = self.worker_blocks
            counters = blocks.labels(worker, "isl"), blocks.labels(worker, "overlap")
            self._counted[worker] = counters
        counters[0].inc(isl)
        counters[1].inc(overlap.total)

    def keep_workers(self, names: Collection[str]) -> None:
        """Forget what was counted for all other workers."""
        for gone in self._counted.keys() - set(names):
            for what in ("isl", "overlap"):
                self.worker_blocks.remove(gone, what)
            del self._counted[gone]


class Pulse:
    """Measures how well the process gets on, while `run` runs: how late its event loop is, and how
    much CPU it uses. All other metrics begin once the loop has come to a request."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        late = deque[float](maxlen=LOOKS)
        cpu = deque([(loop.time(), time.process_time())], maxlen=LOOKS)
        while True:
            # At odd times, as quotas of CPU come at even ones.
            due_s = loop.time() + random.uniform(0.5, 1.5) * LOOK_EVERY_S
            await asyncio.sleep(due_s - loop.time())
            now_s = loop.time()
            late.append(max(0.0, now_s - due_s))
            cpu.append((now_s, time.process_time()))
            self._telemetry.loop_late_s.set(sorted(late)[9 * len(late) // 10])
            self._telemetry.cpu.set((cpu[-1][1] - cpu[0][1]) / (now_s - cpu[0][0]))


async def text_of(own: Telemetry, others: Mapping[str, Telemetry]) -> bytes:
    """Returns all metrics in Prometheus text format. others: by namespace, which their samples
    name.

    Other tasks run between any two families, as one takes up to 10 ms with a thousand workers.
    """
    more: dict[str, list[Sample]] = {}
    for namespace, telemetry in others.items():
        for family in telemetry.registry.collect():
            samples = more.setdefault(family.name, [])
            for sample in family.samples:
                labels = {**sample.labels, "namespace": namespace}
                samples.append(sample._replace(labels=labels))
            await asyncio.sleep(0)
    parts = []
    for family in own.registry.collect():
        family.samples += more.get(family.name, [])
        parts.append(generate_latest(_One(family)))
        await asyncio.sleep(0)
    return b"".join(parts)
