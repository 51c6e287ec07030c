"""What a worker measures of itself, and its text form in the metrics stream."""

from __future__ import annotations

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
    """Seconds for which the blocks that were evicted lately had not been used; 0: none was."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a worker is, in wall-clock seconds, as learned from its own steps.

    The defaults are near a 70B model on four H100s. Off by 40 % they cost a few percent of TTFT.
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
    """What a worker's GPU says of itself. None: it does not say that, or does not answer."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """Fraction of the last moments, 0-1, in which anything ran."""
    temperature_c: float | None = None
    power_w: float | None = None
    pcie_sent_bytes_per_s: int | None = None
    """By the GPU, to the host or to another device."""
    pcie_received_bytes_per_s: int | None = None

    def known(self) -> dict[str, float]:
        """By name, what there is."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_READINGS = GpuReadings()
LARGEST = 1e15
"""No unit of any field is so small. What is computed from such numbers stays finite."""
GPU_PREFIX = "gpu_"
"""Of the readings' names in the stream."""


def encode(
    metrics: ForwardPassMetrics, speed: Speed, gpu: GpuReadings = NO_READINGS
) -> dict[str, str]:
    """Stream fields: one per field of each class, numbers as short text."""
    readings = {GPU_PREFIX + name: value for name, value in gpu.known().items()}
    values: dict[str, float] = asdict(metrics) | asdict(speed) | readings
    return {k: str(v) if isinstance(v, int) else f"{v:.9g}" for k, v in values.items()}


def decode(entry: dict[str, str]) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """Inverse of `encode`; a missing field takes its default, an unknown one is ignored.

    Raises ValueError if a field is not a number from 0 to LARGEST.
    """

    def numbers(cls: type, prefix: str = "") -> dict[str, Any]:
        kinds = {f.name: int if str(f.type).startswith("int") else float for f in fields(cls)}
        return {
            name: kind(_checked(prefix + name, entry[prefix + name]))
            for name, kind in kinds.items()
            if prefix + name in entry
        }

    return (
        ForwardPassMetrics(**numbers(ForwardPassMetrics)),
        Speed(**numbers(Speed)),
        GpuReadings(**numbers(GpuReadings, GPU_PREFIX)),
    )


def _checked(name: str, text: str) -> float:
    value = float(text)
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{name} is {text}")
    return value
