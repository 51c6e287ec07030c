"""Prometheus metrics, described apart from their values: one row each."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Self, TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge, Metric, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# Otherwise each counter and histogram has a further series, with when it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SCRAPED: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, apart from its values. kind: counter, gauge, histogram or info. buckets: upper
    bounds, of a histogram."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def register(self, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        """Returns the metric itself, in `registry`, without values yet."""
        if self.kind == "gauge":
            return Gauge(self.name, self.help, self.labels, registry=registry)
        metric = Histogram(self) if self.kind == "histogram" else Counter(self)
        registry.register(metric)
        return metric


class _Counted(Collector):
    """Metric with the library's methods, for one thread: the library takes a lock each time, and
    ten times as long."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Any] = {}
        if not family.labels:
            self._children[()] = self

    def labels(self, *values: str) -> Self:
        child = self._children.get(values)
        if child is None:
            named = tuple(map(str, values))
            if len(named) != len(self._family.labels):
                raise ValueError(f"{self._family.name}: {named} for {self._family.labels}")
            child = self._children[named] = type(self)(self._family)
        return cast(Self, child)

    def remove(self, *values: str) -> None:
        self._children.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        metric = _SCRAPED[self._family.kind](
            self._family.name, self._family.help, labels=self._family.labels
        )
        for values, child in [*self._children.items()]:
            child._show(metric, values)
        yield metric

    def describe(self) -> list[Metric]:
        return [*self.collect()]

    @abstractmethod
    def _show(self, metric: Any, values: tuple[str, ...]) -> None: ...


class Counter(_Counted):
    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def _show(self, metric: Any, values: tuple[str, ...]) -> None:
        metric.add_metric(values, self.value)


class Histogram(_Counted):
    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self._bounds = family.buckets
        self._counts = [0.0] * (len(family.buckets) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1.0
        self._sum += amount

    @contextmanager
    def time(self) -> Iterator[None]:
        """Observes how many seconds its block took."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - begin_s)

    def _show(self, metric: Any, values: tuple[str, ...]) -> None:
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        buckets = [*zip(bounds, accumulate(self._counts), strict=True)]
        metric.add_metric(values, buckets, self._sum)


def counter(name: str, help_text: str, *labels: str) -> Counter:
    """Returns a row of a Table. name: without kvroute_ and _total."""
    return cast(Counter, Family(f"kvroute_{name}", "counter", help_text, labels))


def gauge(name: str, help_text: str, *labels: str) -> Gauge:
    return cast(Gauge, Family(f"kvroute_{name}", "gauge", help_text, labels))


def histogram(name: str, help_text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    return cast(Histogram, Family(f"kvroute_{name}", "histogram", help_text, labels, buckets))


class Table:
    """Metrics that are counted as things happen: a class describes each by an attribute, in whose
    place its instances have the metric itself, in `registry`."""

    families: ClassVar[dict[str, Family]] = {}

    def __init_subclass__(cls) -> None:
        cls.families = {name: row for name, row in vars(cls).items() if isinstance(row, Family)}

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        for attribute, family in self.families.items():
            setattr(self, attribute, family.register(self.registry))


MAX_CHILDREN = 2000
OTHER = "other"
M = TypeVar("M", Counter, Histogram)


class Children(dict[tuple[str, ...] | str, M]):
    """Children of one metric, by the value of its label, or the values of its labels. Past `most`,
    all new ones are one, whose labels are OTHER. A child that is there costs no call."""

    def __init__(self, metric: M, most: float = MAX_CHILDREN) -> None:
        super().__init__()
        self._metric: M = metric
        self._most = most

    def __missing__(self, key: tuple[str, ...] | str) -> M:
        if len(self) >= self._most:
            key = OTHER if isinstance(key, str) else (OTHER,) * len(key)
        child = self[key] = self._metric.labels(*_values_of(key))
        return child

    def keep(self, position: int, names: Collection[str]) -> None:
        """Forgets children whose label at `position` is none of `names`."""
        for key in [key for key in self if _values_of(key)[position] not in names]:
            del self[key]
            self._metric.remove(*_values_of(key))


def _values_of(key: tuple[str, ...] | str) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


Sampled = tuple[Family, Sequence[str], Any]
"""Metric, values of its labels, and its value: a number, or the labels of an info."""


class ScrapeCollector(Collector):
    """Metrics that are read when they are scraped. read: returns their samples."""

    def __init__(self, families: Iterable[Family], read: Callable[[], Iterable[Sampled]]) -> None:
        self._families = list(families)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        metrics = {
            family.name: _SCRAPED[family.kind](family.name, family.help, labels=family.labels)
            for family in self._families
        }
        for family, labels, value in self._read():
            metrics[family.name].add_metric(labels, value)
        yield from metrics.values()
