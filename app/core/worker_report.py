"""What a worker measures about itself, and its text form in the metrics stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ForwardPassMetrics:
    """State of an engine after a step. The wire keeps the field's customary names.

    gpu_cache_usage_perc and gpu_prefix_cache_hit_rate are fractions, 0-1, despite the name.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    """Distinct blocks that running requests use."""
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    kv_idle_before_evict_s: float = 0.0
    """Seconds for which recently evicted blocks had gone unused; 0: none was evicted."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a worker is, in wall-clock seconds, as learned from its own steps.

    The defaults are near a 70B model on four H100s. Being off by 40 % costs a few percent of TTFT.
    """

    prefill_s_per_token: float = 8.5e-5
    prefill_s_per_token2: float = 1.1e-9
    """Per pair of an uncached token and a token it attends to."""
    decode_s_per_kv_token: float = 3e-8
    """Added to every step by each token of KV that decoding requests attend to."""
    decode_s_per_seq: float = 8e-5
    """Added to every step by each decoding request."""
    host_s_per_token: float = 2e-6
    """To load one token's KV from the host tier."""
    disk_s_per_token: float = 2e-5
    mean_output_tokens: float = 300.0


DEFAULT_SPEED = Speed()


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """What a worker's GPU reports about itself. None: it does not report it, or does not answer."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """0-1: the fraction of the last moments in which anything ran."""
    temperature_c: float | None = None
    power_w: float | None = None
    pcie_sent_bytes_per_s: int | None = None
    """By the GPU, to the host or to another device."""
    pcie_received_bytes_per_s: int | None = None

    def known(self) -> dict[str, float]:
        """The readings that there are, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_READINGS = GpuReadings()
LARGEST = 1e15
"""No field's unit is so small that a value could be larger. What is computed from such values stays
finite."""
GPU_PREFIX = "gpu_"
"""Prefix of the readings' names in the stream."""


def encode(
    metrics: ForwardPassMetrics, speed: Speed, gpu: GpuReadings = NO_READINGS
) -> dict[str, str]:
    """Stream fields: one per field of each class, numbers as short text."""
    readings = {GPU_PREFIX + name: value for name, value in gpu.known().items()}
    values: dict[str, float] = asdict(metrics) | asdict(speed) | readings
    return {k: str(v) if isinstance(v, int) else f"{v:.9g}" for k, v in values.items()}


def decode(
    entry: Mapping[bytes, bytes],
) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """Inverse of `encode`; a missing field takes its default, an unknown one is ignored.

    Raises ValueError if a field is not a number from 0 to LARGEST.
    """
    return (
        ForwardPassMetrics(**_numbers(entry, _OF_METRICS)),
        Speed(**_numbers(entry, _OF_SPEED)),
        GpuReadings(**_numbers(entry, _OF_GPU)),
    )


_Table = list[tuple[bytes, str, type[int] | type[float]]]


def _table(cls: type, prefix: str = "") -> _Table:
    """For each field of `cls`, its name in the stream, its own and its type."""
    return [
        ((prefix + f.name).encode(), f.name, int if str(f.type).startswith("int") else float)
        for f in fields(cls)
    ]


# Every router decodes every entry, up to thousands in a second.
_OF_METRICS = _table(ForwardPassMetrics)
_OF_SPEED = _table(Speed)
_OF_GPU = _table(GpuReadings, GPU_PREFIX)


def _numbers(entry: Mapping[bytes, bytes], table: _Table) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name, kind in table:
        text = entry.get(key)
        if text is not None:
            value = float(text)
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{key.decode()} is {text.decode()}")
            found[name] = kind(value)
    return found
