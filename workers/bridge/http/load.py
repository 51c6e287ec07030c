"""Reads how busy an engine is, and the counters that its speed is learned from.

Names of metrics from vllm/v1/metrics/loggers.py and sglang/srt/observability/metrics_collector.py,
fields of /v1/loads from sglang/srt/managers/load_snapshot.py.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

from app.core.cache_stats import HitRate
from app.core.errors import EngineUnavailable
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import (
    BY_SOURCE,
    COMPUTED,
    TRANSFERRED,
    EngineKind,
    EngineLoad,
    EngineReading,
)

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
        """Yields them in the order of `text`, without those whose value is no number, or
        infinite."""
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
"""Times of the engine's start. The second, when it began to count, is told to the microsecond: no
two processes have it."""
SLEEP = "vllm:engine_sleep_state"
OUTPUTS = "vllm:request_generation_tokens_bucket"
AT_MOST_ONE = f"{OUTPUTS} 1.0"
"""Line of the requests that generated at most one token."""
_SPLIT_BY = {BY_SOURCE: "source", OUTPUTS: "le"}
FIGURES: dict[EngineKind, dict[str, tuple[str, ...]]] = {
    kind: {f.name: f.metadata[kind] for f in fields(EngineLoad) if f.metadata.get(kind)}
    for kind in get_args(EngineKind)
}
"""Metrics that may have a field of EngineLoad, by kind of engine and field."""
_RANK_LABELS = {"vllm": "engine", "sglang": "dp_rank", "openai": "engine"}


class LoadReader:
    """Reads the load of all ranks of an engine.

    What is a mean since the engine started is turned into one of what came since the last reading,
    but the hit rate into one of the last thousand readings: one request says next to nothing of it.
    """

    def __init__(self, engine: EngineHttp, kind: EngineKind) -> None:
        self._engine = engine
        self._kind = kind
        self._has_loads = kind == "sglang"
        names = (name for names in FIGURES[kind].values() for name in names)
        self._wanted = SamplePattern((*names, *STARTED, SLEEP, BY_SOURCE, OUTPUTS))
        self._before: dict[int, EngineLoad] = {}
        self._idle_s: dict[int, float] = {}
        self._hits: defaultdict[int, HitRate] = defaultdict(HitRate)

    @property
    def tells(self) -> bool:
        """Whether anything is known that such an engine says of its load."""
        return bool(FIGURES[self._kind])

    async def read(self) -> EngineReading:
        """Raises EngineUnavailable if the engine does not answer, and EngineUnfit if it refuses."""
        asked_s = asyncio.get_running_loop().time()
        if self._has_loads:
            loads = await self._engine.get_object(LOADS)
            if loads is not None:
                return EngineReading(_sglang_loads(loads), asked_s)
            self._has_loads = False
        text = await self._engine.get("/metrics") if self.tells else None
        return self._read(asked_s, text or b"")

    def _read(self, asked_s: float, text: bytes) -> EngineReading:
        label = _RANK_LABELS[self._kind]
        by_rank: dict[int, dict[str, float]] = defaultdict(dict)
        sleeps: dict[int, bool] = {}
        started: float | None = None
        for sample in self._wanted.samples(text):
            name, said = sample.name, sample.labels.get(label, "0")
            rank = int(said) if said.isdecimal() else 0
            if name in STARTED:
                started = max(started or 0.0, sample.value)
            elif name == SLEEP:
                if sample.labels.get("sleep_state") == "awake":
                    sleeps[rank] = not sample.value
            elif self._kind == "vllm":
                if name in _SPLIT_BY:
                    name = f"{name} {sample.labels.get(_SPLIT_BY[name], '')}"
                # One line for each reason why requests ended.
                by_rank[rank][name] = by_rank[rank].get(name, 0.0) + sample.value
            else:
                by_rank[rank][name] = sample.value  # each tensor-parallel rank has a line
        loads = {
            rank: self._load(rank, values, sleeps=sleeps.get(rank, False))
            for rank, values in sorted(by_rank.items())
        }
        return EngineReading(loads, asked_s, started)

    def _load(self, rank: int, by_name: dict[str, float], *, sleeps: bool) -> EngineLoad:
        values: dict[str, Any] = {
            field: by_name[name]
            for field, names in FIGURES[self._kind].items()
            for name in reversed(names)
            if name in by_name
        }
        counted = EngineLoad(**values)
        before, self._before[rank] = self._before.get(rank, EngineLoad()), counted
        blocks, block_s = _since(before, counted, "idle_blocks", "idle_s")
        if blocks:
            self._idle_s[rank] = block_s / blocks
        if "cached_tokens" in values and "prompt_tokens" in values:
            tokens, cached = _since(before, counted, "prompt_tokens", "cached_tokens")
            if tokens:
                self._hits[rank].add(cached, tokens)
            values["hit_rate"] = self._hits[rank].value
        if by_name.get(TRANSFERRED) and COMPUTED in by_name:
            # Else what was transferred counts as computed, and the engine seems many times as fast.
            values["prefill_computed_tokens"] = by_name[COMPUTED]
        if "kv_transfers" in values and AT_MOST_ONE in by_name:
            # For others it computes prompts, with answers of one token: they say nothing of how
            # long its own are.
            for field in ("finished_requests", "generated_tokens"):
                if field in values:
                    values[field] = max(0.0, values[field] - by_name[AT_MOST_ONE])
        if "prefill_computed_tokens" not in values and "prefill_prompt_tokens" in values:
            # Hits are counted when a request begins: of many requests it is right.
            prompt = values["prefill_prompt_tokens"]
            values["prefill_computed_tokens"] = max(0.0, prompt - values.get("cached_tokens", 0.0))
        for field in ("running", "waiting"):
            values[field] = int(values.get(field, 0))
        return EngineLoad(
            **values | {"kv_usage": min(1.0, counted.kv_usage)},
            kv_idle_before_evict_s=self._idle_s.get(rank),
            sleeps=sleeps,
        )


def _since(before: EngineLoad, now: EngineLoad, count: str, total: str) -> tuple[float, float]:
    if (getattr(before, count) or 0.0) > (getattr(now, count) or 0.0):
        before = EngineLoad()
    grown = [
        (getattr(now, name) or 0.0) - (getattr(before, name) or 0.0) for name in (count, total)
    ]
    return grown[0], max(0.0, grown[1])


def _sglang_loads(answer: dict[str, Any]) -> dict[int, EngineLoad]:
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
