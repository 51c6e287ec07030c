"""Prometheus metrics, described apart from their values: one row each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

# Otherwise each counter and histogram has a further series, with when it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SCRAPED: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
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
        """The metric itself, in `registry`, without values yet."""
        if self.kind == "histogram":
            return Histogram(
                self.name, self.help, self.labels, registry=registry, buckets=self.buckets
            )
        kind = Counter if self.kind == "counter" else Gauge
        return kind(self.name, self.help, self.labels, registry=registry)


def counter(name: str, help_text: str, *labels: str) -> Counter:
    """A row of a Table, as all three. name: without kvroute_ and _total."""
    return cast(Counter, Family(f"kvroute_{name}", "counter", help_text, labels))


def gauge(name: str, help_text: str, *labels: str) -> Gauge:
    return cast(Gauge, Family(f"kvroute_{name}", "gauge", help_text, labels))


def histogram(name: str, help_text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    return cast(Histogram, Family(f"kvroute_{name}", "histogram", help_text, labels, buckets))


class Table:
    """Metrics that are counted as things happen: a class describes each by an attribute, and in the
    place of that its instances have the metric itself, in `registry`."""

    families: ClassVar[dict[str, Family]] = {}
    """By attribute."""

    def __init_subclass__(cls) -> None:
        cls.families = {name: row for name, row in vars(cls).items() if isinstance(row, Family)}

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """registry: None: one of its own."""
        self.registry = CollectorRegistry() if registry is None else registry
        for attribute, family in self.families.items():
            setattr(self, attribute, family.register(self.registry))


MAX_CHILDREN = 2000
OTHER = "other"
M = TypeVar("M", Counter, Histogram)


class Children(Generic[M]):
    """The children of one metric, by the values of their labels.

    The library finds them under a lock and as text, which would be a tenth of the door's CPU. Past
    `most`, all new ones are one, whose labels are OTHER.
    """

    def __init__(self, metric: M, most: int = MAX_CHILDREN) -> None:
        self._metric: M = metric
        self._most = most
        self._made: dict[tuple[str, ...], M] = {}

    def __call__(self, *values: str) -> M:
        child = self._made.get(values)
        if child is None:
            if len(self._made) >= self._most:
                values = (OTHER,) * len(values)
            child = self._made[values] = self._metric.labels(*values)
        return child

    def keep(self, position: int, names: Collection[str]) -> None:
        """Forget those whose label at `position` is none of `names`."""
        for values in [values for values in self._made if values[position] not in names]:
            del self._made[values]
            self._metric.remove(*values)


Sampled = tuple[Family, Sequence[str], Any]
"""A metric, the values of its labels, and its value: a number, or the labels of an info."""


class ScrapeCollector(Collector):
    """Metrics that are read when they are scraped. read: each of their samples."""

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
