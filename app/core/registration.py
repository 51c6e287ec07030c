"""Encoding of what workers register and measure, as text in Redis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from app.core.errors import shown
from app.core.keys import DATA_VERSION
from app.core.limits import MAX_COUNT, MAX_MEASURED, MAX_NAME, MAX_NAMES
from app.core.types import WorkerKey
from app.core.worker_report import (
    GPU,
    INFO,
    METRICS,
    NO_READINGS,
    SPEED,
    ForwardPassMetrics,
    GpuReadings,
    Item,
    Speed,
    WorkerInfo,
)

WITHIN = f"at most {MAX_NAMES} names of 1 to {MAX_NAME} printable characters"


class WrongField(ValueError):
    """A bad field of a registration. name: as in Redis."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__(f"{name} is {shown(value)}, not {wanted}")
        self.name, self.value, self.wanted = name, value, wanted


def fitting(info: WorkerInfo) -> WorkerInfo:
    """Returns `info` without what is over a limit; its findings name what was left out."""
    kept: dict[str, Any] = {}
    findings = list(info.findings)
    for item in INFO:
        value = getattr(info, item.name)
        if item.kind == tuple[str, ...]:
            kept[item.name] = _within(value)
            if num := len(value) - len(kept[item.name]):
                findings.append(f"{num} of {len(value)} {item.wire} are left out: {WITHIN}")
        elif item.kind in (int, float):
            kept[item.name] = min(max(item.least, value), MAX_COUNT)
            if kept[item.name] != value:
                findings.append(f"{item.wire} of {value} counts as {kept[item.name]}: its limit")
    return replace(info, **kept | {"findings": _within(findings)})


def _within(names: Iterable[str]) -> tuple[str, ...]:
    fit = [one for one in names if 0 < len(one) <= MAX_NAME and one.isprintable()]
    return tuple(fit[:MAX_NAMES])


def encode_info(info: WorkerInfo, lease_ttl_ms: int) -> bytes:
    """Returns a JSON object with the fields of `fitting(info)`, `lease_ttl_ms`, and the data
    model's `version`."""
    info = fitting(info)
    values = {item.wire: getattr(info, item.name) for item in INFO}
    values |= {"lease_ttl_ms": lease_ttl_ms, "version": DATA_VERSION}
    return orjson.dumps(values, default=WorkerKey.__str__)


def version_in(text: bytes | str) -> int:
    """Returns the version of the data model that a registration says, 1 if none. Raises ValueError
    for text that is no registration."""
    values = orjson.loads(text)
    version = values.get("version", 1) if isinstance(values, dict) else None
    if type(version) is not int:
        raise ValueError(f"version is {shown(version)}, not a whole number")
    return version


def decode_info(text: bytes | str) -> WorkerInfo:
    """Returns the WorkerInfo that `encode_info` wrote. Raises ValueError for anything else."""
    values = orjson.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"not an object: {shown(values)}")
    return read_info(values)


def read_info(values: Mapping[str, Any]) -> WorkerInfo:
    """Returns the WorkerInfo with these fields; a missing field takes its default, an unknown one
    is ignored. Raises WrongField for the first that is bad, or missing without having a default."""
    return WorkerInfo(*(_read(item, values) for item in INFO))


def _read(item: Item, values: Mapping[str, Any]) -> Any:
    value = values.get(item.wire, item.default)
    if item.kind in (int, float):
        if type(value) in (int, item.kind) and item.least <= value <= MAX_COUNT:
            return value
        number = "whole number" if item.kind is int else "number"
        raise WrongField(item.wire, value, f"a {number} from {item.least} to {MAX_COUNT}")
    if item.kind == tuple[str, ...]:
        return _names(item.wire, value)
    if item.kind is bool:
        if type(value) is bool:
            return value
        raise WrongField(item.wire, value, "true or false")
    if not isinstance(value, str):
        raise WrongField(item.wire, value, "text")
    if item.kind is str:
        return value
    try:
        return item.kind.parse(value)
    except ValueError:
        raise WrongField(item.wire, value, item.help) from None


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return _within(value)
    raise WrongField(name, value, WITHIN)


def encode_metrics(
    metrics: ForwardPassMetrics, speed: Speed, gpu: GpuReadings = NO_READINGS
) -> dict[str, str]:
    """Returns the fields of an entry in the metrics stream: one, as short text, for each number
    from 0 to MAX_MEASURED."""
    return {
        item.wire: str(value) if isinstance(value, int) else f"{value:.9g}"
        for items, report in ((METRICS, metrics), (SPEED, speed), (GPU, gpu))
        for item in items
        if (value := getattr(report, item.name)) is not None and 0 <= value <= MAX_MEASURED
    }


def decode_metrics(entry: Mapping[bytes, bytes]) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """Returns what `encode_metrics` wrote; a missing field takes its default, an unknown one is
    ignored. Raises ValueError, naming the field, if one is not a number from 0 to MAX_MEASURED."""
    return (
        ForwardPassMetrics(*_numbers(entry, _METRICS_TABLE)),
        Speed(*_numbers(entry, _SPEED_TABLE)),
        GpuReadings(*_numbers(entry, _GPU_TABLE)),
    )


_Table = list[tuple[bytes, type[Any], Any]]


def _table(items: tuple[Item, ...]) -> _Table:
    return [(item.wire.encode(), item.kind, item.default) for item in items]


# Every router decodes every entry, up to thousands in a second.
_METRICS_TABLE = _table(METRICS)
_SPEED_TABLE = _table(SPEED)
_GPU_TABLE = _table(GPU)


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
