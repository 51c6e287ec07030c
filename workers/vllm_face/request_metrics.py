"""Metrics of requests and load, under vLLM's names: counted step by step, read when scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.core.worker_report import ForwardPassMetrics
from app.simulation.steps import Finished, Step

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = tuple(float(10**power * digit) for power in range(6) for digit in (1, 2, 5))


@dataclass(slots=True)
class _MeasuredRequest:
    """Times are monotonic seconds."""

    prompt_tokens: int
    arrived_s: float
    cached_tokens: int = 0
    begun_s: float | None = None
    """When the first step that computes its prompt began."""
    first_s: float | None = None
    """When its first token was there."""
    last_s: float | None = None


class RequestMetrics:
    """Registers its metrics, labelled with the model and the engine's data-parallel rank."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: dict[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._labels = labels
        self._now = now
        self._requests: dict[str, _MeasuredRequest] = {}
        self._left: dict[str, _MeasuredRequest] = {}
        """Since the last step; in it they may have produced tokens."""
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found when looked up.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, computed or cached.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens that were cached.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that finished.",
            [*labels, "finished_reason"],
            registry=registry,
        )
        self._ttft = self._seconds("time_to_first_token", "From arrival to the first token.")
        self._gap = self._seconds("inter_token_latency", "Between two tokens of a request.")
        self._queue = self._seconds("request_queue_time", "From arrival to the first step.")
        self._prefill = self._seconds(
            "request_prefill_time", "From the first step to the first token."
        )
        self._decode = self._seconds("request_decode_time", "From the first token to the last.")
        self._whole = self._seconds("e2e_request_latency", "From arrival to the last token.")
        self._lengths = self._histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._batches = self._histogram("iteration_tokens_total", "Tokens of a step.", TOKENS)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", TOKENS
        )

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        self._requests[request_id] = _MeasuredRequest(prompt_tokens, self._now())

    def left(self, request_id: str) -> None:
        """Finished or cancelled, maybe in the step under way."""
        self._left.setdefault(request_id, self._requests.pop(request_id))

    def stepped(self, step: Step, seconds: float) -> None:
        """A step has ended that took this long."""
        now_s = self._now()
        for request_id, cached_tokens in step.begun:
            request = self._of(request_id)
            request.begun_s = max(request.arrived_s, now_s - seconds)
            request.cached_tokens = cached_tokens
            self._queries.inc(request.prompt_tokens)
            self._hits.inc(cached_tokens)
        first = set(step.first_tokens)
        for request_id in step.emitted:
            request = self._of(request_id)
            if request_id in first:
                request.first_s = now_s
                self._prompt.inc(request.prompt_tokens)
                self._cached.inc(request.cached_tokens)
                self._ttft.observe(now_s - request.arrived_s)
            elif request.last_s is not None:
                self._gap.observe(now_s - request.last_s)
            request.last_s = now_s
        self._generated.inc(len(step.emitted))
        self._batches.observe(step.prefill_tokens + step.decode_seqs)
        for finished in step.finished:
            self._finish(self._of(finished.request_id), finished)
        self._left.clear()

    def _of(self, request_id: str) -> _MeasuredRequest:
        # The id of a request that left during the step may be in use again by now. If it left just
        # before the step, its successor is mistaken for it, and counts only from the next step on.
        return self._left.get(request_id) or self._requests[request_id]

    def _finish(self, request: _MeasuredRequest, finished: Finished) -> None:
        self._success.labels(*self._labels.values(), finished.finish_reason).inc()
        if request.begun_s is None or request.first_s is None or request.last_s is None:
            return
        self._queue.observe(request.begun_s - request.arrived_s)
        self._prefill.observe(request.first_s - request.begun_s)
        self._decode.observe(request.last_s - request.first_s)
        self._whole.observe(request.last_s - request.arrived_s)
        self._lengths.observe(finished.prompt_tokens)
        self._computed.observe(finished.prompt_tokens - finished.cached_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(
            **self._labels
        )

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, SECONDS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry
        ).labels(**self._labels)


class LoadCollector(Collector):
    """An engine's load, and what its cache is: `config` is its labels, all text."""

    def __init__(
        self,
        measure: Callable[[], ForwardPassMetrics],
        labels: dict[str, str],
        config: dict[str, str],
    ) -> None:
        self._measure = measure
        self._labels = labels
        self._config = config

    def collect(self) -> Iterator[Metric]:
        now = self._measure()
        yield self._gauge("num_requests_running", "Requests running.", now.request_active_slots)
        yield self._gauge("num_requests_waiting", "Requests waiting.", now.num_requests_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV blocks in use; 0-1.", now.gpu_cache_usage_perc
        )
        yield self._gauge("engine_sleep_state", "1: the state it is in.", 1, sleep_state="awake")
        yield self._gauge("cache_config_info", "What the KV cache is.", 1, **self._config)

    def _gauge(self, name: str, text: str, value: float, **labels: Any) -> Metric:
        labels |= self._labels
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
