"""What a worker measures of itself, and its text form in the metrics stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import inf


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


def encode(metrics: ForwardPassMetrics, speed: Speed) -> dict[str, str]:
    """Stream fields: one per field of either class, numbers as short text."""
    return {name: f"{value:.9g}" for name, value in (asdict(metrics) | asdict(speed)).items()}


def decode(entry: dict[str, str]) -> tuple[ForwardPassMetrics, Speed]:
    """Inverse of `encode`; a missing field takes its default, an unknown one is ignored.

    Raises ValueError if a field is not a finite number of at least 0.
    """

    def numbers(cls: type) -> dict[str, float]:
        kinds = {f.name: int if f.type == "int" else float for f in fields(cls)}
        return {k: kind(_checked(k, entry[k])) for k, kind in kinds.items() if k in entry}

    return ForwardPassMetrics(**numbers(ForwardPassMetrics)), Speed(**numbers(Speed))  # type: ignore[arg-type]


def _checked(name: str, text: str) -> float:
    value = float(text)
    if not 0 <= value < inf:
        raise ValueError(f"{name} is {text}")
    return value
