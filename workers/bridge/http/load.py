"""Reads how busy an engine is, and the counters that its speed is learned from.

Names of metrics from vllm/v1/metrics/loggers.py and sglang/srt/observability/metrics_collector.py,
fields of /v1/loads from sglang/srt/managers/load_snapshot.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.core.cache_stats import HitRate
from app.core.errors import EngineUnavailable
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import EngineKind, EngineLoad, EngineReading

_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class SamplePattern:
    """Finds the samples with one of these names.

    One regular expression skips all other lines without making objects of them: an engine's text
    has thousands, and is read every second.
    """

    def __init__(self, names: Iterable[str]) -> None:
        either = b"|".join(re.escape(name.encode()) for name in names)
        self._line = re.compile(rb"^(" + either + rb")(?:\{([^\n]*)\})? +(\S+)", re.MULTILINE)

    def samples(self, text: bytes) -> Iterator[Sample]:
        """In the order of `text`. Skips those whose value is no number, or is infinite."""
        for name, labels, number in self._line.findall(text):
            try:
                value = float(number)
            except ValueError:
                continue
            if abs(value) < float("inf"):
                pairs = _LABEL.findall(labels)
                yield Sample(
                    name.decode(),
                    {key.decode(): said.decode(errors="replace") for key, said in pairs},
                    value,
                )


LOADS = "/v1/loads?include=core&format=json"
STARTED = ("process_start_time_seconds", "vllm:prompt_tokens_created")
"""The second, when it began to count, is told to the microsecond: no two processes have it."""
SLEEP = "vllm:engine_sleep_state"
IDLE = "vllm:kv_block_idle_before_evict_seconds"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
TRANSFERRED, COMPUTED = f"{BY_SOURCE} external_kv_transfer", f"{BY_SOURCE} local_compute"
"""Two of its lines, by where the KV of prompt tokens came from."""
OUTPUTS = "vllm:request_generation_tokens_bucket"
AT_MOST_ONE = f"{OUTPUTS} 1.0"
"""Its line of the requests that generated at most one token."""
# For each field the metrics that may be it, the newest name first.
_VLLM: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "cached_tokens": (
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "first_tokens": ("vllm:time_to_first_token_seconds_count",),
    "generated_tokens": ("vllm:generation_tokens_total",),
    "finished_requests": ("vllm:request_success_total",),
    # All four are counted when a request ends.
    "prefills": ("vllm:request_prefill_time_seconds_count",),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum",),
    "prefill_prompt_tokens": ("vllm:request_prompt_tokens_sum",),
    "prefill_computed_tokens": ("vllm:request_prefill_kv_computed_tokens_sum",),
    "inter_tokens": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    ),
    "inter_token_s": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
    ),
    "steps": ("vllm:iteration_tokens_total_count",),
    "leases_ended": ("vllm:nixl_num_kv_expired_reqs_total",),
    "fetched_late": ("vllm:nixl_num_notifications_after_expiry_total",),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total",),
    "transfers": ("vllm:nixl_xfer_time_seconds_count",),
    "transfer_s": ("vllm:nixl_xfer_time_seconds_sum",),
    "transferred_tokens": (TRANSFERRED,),
    "idle_s": (f"{IDLE}_sum",),
    "idle_blocks": (f"{IDLE}_count",),
}
_SGLANG: dict[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "kv_usage": ("sglang:full_token_usage", "sglang:token_usage"),
    "hit_rate": ("sglang:cache_hit_rate",),
}
_NAMES = {"vllm": _VLLM, "sglang": _SGLANG, "openai": dict[str, tuple[str, ...]]()}
_RANK_LABELS = {"vllm": "engine", "sglang": "dp_rank", "openai": "engine"}
_COUNTS = ("running", "waiting")

_Values = dict[str, float]
"""By field."""


class LoadReader:
    """Reads the load of all ranks of an engine.

    What is a mean since the engine started is turned into one of what came since the last reading,
    but the hit rate into one of the last thousand readings: one request says next to nothing of it.
    """

    def __init__(self, engine: EngineHttp, kind: EngineKind) -> None:
        self._engine = engine
        self._kind = kind
        self._has_loads = kind == "sglang"
        self._names = {name: field for field, names in _NAMES[kind].items() for name in names}
        self._wanted = SamplePattern((*self._names, *STARTED, SLEEP, BY_SOURCE, OUTPUTS))
        self._before: dict[int, _Values] = {}
        self._idle_s: dict[int, float] = {}
        self._hits: defaultdict[int, HitRate] = defaultdict(HitRate)

    @property
    def tells(self) -> bool:
        """Whether anything is known that such an engine says of its load."""
        return bool(self._names)

    async def read(self) -> EngineReading:
        """Raises EngineUnavailable if the engine does not answer, and EngineUnfit if it refuses."""
        if self._has_loads:
            loads = await self._engine.get_object(LOADS)
            if loads is not None:
                return EngineReading(_sglang_loads(loads))
            self._has_loads = False
        text = await self._engine.get("/metrics") if self.tells else None
        if text is None:
            return EngineReading({})
        return self._read(list(self._wanted.samples(text)))

    def _read(self, samples: list[Sample]) -> EngineReading:
        label = _RANK_LABELS[self._kind]
        by_rank: dict[int, dict[str, float]] = defaultdict(dict)
        sleeps: dict[int, bool] = {}
        started: float | None = None
        for sample in samples:
            said = sample.labels.get(label, "0")
            rank = int(said) if said.isdecimal() else 0
            if sample.name in STARTED:
                started = max(started or 0.0, sample.value)
            elif sample.name == SLEEP:
                if sample.labels.get("sleep_state") == "awake":
                    sleeps[rank] = not sample.value
            elif self._kind == "vllm":
                name = sample.name
                if name == BY_SOURCE:
                    name = f"{BY_SOURCE} {sample.labels.get('source', '')}"
                elif name == OUTPUTS:
                    name = f"{OUTPUTS} {sample.labels.get('le', '')}"
                # One line for each reason why requests ended.
                values = by_rank[rank]
                values[name] = values.get(name, 0.0) + sample.value
            else:
                by_rank[rank][sample.name] = sample.value  # each tensor-parallel rank has a line
        loads = {
            rank: replace(self._load(rank, values), sleeps=sleeps.get(rank, False))
            for rank, values in sorted(by_rank.items())
        }
        return EngineReading(loads, started)

    def _load(self, rank: int, by_name: dict[str, float]) -> EngineLoad:
        values: _Values = {}
        for field, names in _NAMES[self._kind].items():
            name = next((name for name in names if name in by_name), None)
            if name is not None:
                values[field] = by_name[name]
        idle_s, idle_blocks = values.pop("idle_s", 0.0), values.pop("idle_blocks", 0.0)
        sums = {"idle_s": idle_s, "idle_blocks": idle_blocks, **values}
        before, self._before[rank] = self._before.get(rank, {}), sums
        blocks, block_s = _since(before, sums, "idle_blocks", "idle_s")
        if blocks:
            self._idle_s[rank] = block_s / blocks
        if "cached_tokens" in values and "prompt_tokens" in values:
            tokens, cached = _since(before, sums, "prompt_tokens", "cached_tokens")
            if tokens:
                self._hits[rank].add(cached, tokens)
            values["hit_rate"] = self._hits[rank].value
        if by_name.get(TRANSFERRED) and COMPUTED in by_name:
            # Else what was transferred counts as computed, and the engine seems many times as fast.
            values["prefill_computed_tokens"] = by_name[COMPUTED]
        if "transfers" in values and AT_MOST_ONE in by_name:
            # For others it computes prompts, with answers of one token: they say nothing of how
            # long its own are.
            for field in ("finished_requests", "generated_tokens"):
                if field in values:
                    values[field] = max(0.0, values[field] - by_name[AT_MOST_ONE])
        if "prefill_computed_tokens" not in values and "prefill_prompt_tokens" in values:
            # Hits are counted when a request begins: of many requests it is right.
            prompt = values["prefill_prompt_tokens"]
            values["prefill_computed_tokens"] = max(0.0, prompt - values.get("cached_tokens", 0.0))
        if rank in self._idle_s:
            values["idle_before_evict_s"] = self._idle_s[rank]
        return _engine_load(values)


def _since(before: _Values, sums: _Values, count: str, total: str) -> tuple[float, float]:
    """By how much both have grown since the last reading, or since the engine started."""
    if before.get(count, 0.0) > sums[count]:
        before = {}
    return sums[count] - before.get(count, 0.0), max(0.0, sums[total] - before.get(total, 0.0))


def _engine_load(values: _Values) -> EngineLoad:
    gauges = {field: values.pop(field, 0.0) for field in ("running", "waiting", "kv_usage")}
    load = EngineLoad(int(gauges["running"]), int(gauges["waiting"]), min(1.0, gauges["kv_usage"]))
    return replace(load, **values)  # type: ignore[arg-type]


def _sglang_loads(answer: dict[str, Any]) -> dict[int, EngineLoad]:
    """What SGLang's /v1/loads says of each rank."""
    try:
        return {int(load["dp_rank"]): _sglang_load(load) for load in answer["loads"]}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineUnavailable(f"{LOADS} makes no sense: {error!r}") from None


def _sglang_load(load: dict[str, Any]) -> EngineLoad:
    busy_us = load.get("total_prefill_busy_us")
    # Σ 1, Σ b, Σ t, Σ b*b, Σ b*t, Σ generated; of steps of b requests and t microseconds
    moments = load.get("decode_moments")
    return EngineLoad(
        running=int(load["num_running_reqs"]),
        waiting=int(load["num_waiting_reqs"]),
        kv_usage=min(1.0, float(load["token_usage"])),
        hit_rate=load.get("cache_hit_rate"),
        prefill_busy_s=busy_us / 1e6 if busy_us is not None else None,
        busy_tokens=load.get("total_prefill_uncached_tokens"),
        inter_tokens=moments[1] if moments else None,
        inter_token_s=moments[4] / 1e6 if moments else None,
        steps=moments[0] if moments else None,
    )
