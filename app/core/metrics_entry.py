"""What a worker measures of itself, as an entry of its stream in Redis, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.core.limits import MAX_MEASURED
from app.core.report_items import Item
from app.core.worker_report import (
    GPU,
    METRICS,
    NO_READINGS,
    SPEED,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
)


def encode(
    metrics: ForwardPassMetrics, speed: Speed, gpu: GpuReadings = NO_READINGS
) -> dict[str, str]:
    """Fields of the metrics stream: one per field of each class that is a number from 0 to
    MAX_MEASURED, as short text."""
    return {
        item.wire: str(value) if isinstance(value, int) else f"{value:.9g}"
        for items, report in ((METRICS, metrics), (SPEED, speed), (GPU, gpu))
        for item in items
        if (value := getattr(report, item.name)) is not None and 0 <= value <= MAX_MEASURED
    }


def decode(
    entry: Mapping[bytes, bytes],
) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """Inverse of `encode`; a missing field takes its default, an unknown one is ignored.

    Raises ValueError, naming the field, if one is not a number from 0 to MAX_MEASURED.
    """
    return (
        ForwardPassMetrics(*_numbers(entry, _OF_METRICS)),
        Speed(*_numbers(entry, _OF_SPEED)),
        GpuReadings(*_numbers(entry, _OF_GPU)),
    )


_Table = list[tuple[bytes, type[Any], Any]]


def _table(items: tuple[Item, ...]) -> _Table:
    """For each of `items`, its name in the stream, its kind and its default."""
    return [(item.wire.encode(), item.kind, item.default) for item in items]


# Every router decodes every entry, up to thousands in a second.
_OF_METRICS = _table(METRICS)
_OF_SPEED = _table(SPEED)
_OF_GPU = _table(GPU)


def _numbers(entry: Mapping[bytes, bytes], table: _Table) -> list[Any]:
    values = []
    for name, kind, value in table:
        text = entry.get(name)
        if text is not None:
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 <= value <= MAX_MEASURED:
                raise ValueError(f"{name.decode()} is {text.decode(errors='replace')}")
            value = kind(value)
        values.append(value)
    return values
