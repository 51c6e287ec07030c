from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from app.http.metrics import Table, counter, gauge, histogram


class Ours(Table):
    seen = counter("seen", "Things.", "who", "what")
    all = counter("all", "All.")
    took = histogram("took_seconds", "Time.", "who", buckets=(0.5, 1.0, 2.5))
    whole = histogram("whole_seconds", "Time.", buckets=(1.0,))
    now = gauge("now", "Now.")


def the_librarys() -> tuple[CollectorRegistry, dict[str, object]]:
    registry = CollectorRegistry()
    kinds = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
    metrics: dict[str, object] = {}
    for attribute, family in Ours.families.items():
        if family.kind == "histogram":
            metrics[attribute] = prometheus_client.Histogram(
                family.name, family.help, family.labels, registry=registry, buckets=family.buckets
            )
        else:
            metrics[attribute] = kinds[family.kind](
                family.name, family.help, family.labels, registry=registry
            )
    return registry, metrics


def count(metrics: dict[str, object] | Ours) -> None:
    def of(name: str) -> object:
        return metrics[name] if isinstance(metrics, dict) else getattr(metrics, name)

    of("seen").labels("a", "x").inc()  # type: ignore[attr-defined]
    of("seen").labels("a", "x").inc(2.5)  # type: ignore[attr-defined]
    of("seen").labels("b", 'y"\n').inc()  # type: ignore[attr-defined]
    of("seen").labels("c", "z").inc()  # type: ignore[attr-defined]
    of("seen").remove("c", "z")  # type: ignore[attr-defined]
    of("all").inc(7)  # type: ignore[attr-defined]
    for amount in (0.1, 0.5, 0.6, 3.0):
        of("took").labels("a").observe(amount)  # type: ignore[attr-defined]
    of("took").labels("never")  # type: ignore[attr-defined]


def test_metrics_are_written_as_the_library_writes_its_own() -> None:
    ours = Ours()
    registry, metrics = the_librarys()
    assert generate_latest(ours.registry) == generate_latest(registry)
    count(ours)
    count(metrics)
    assert generate_latest(ours.registry) == generate_latest(registry)


def test_a_histogram_times_what_is_done_within_it_also_if_that_fails() -> None:
    ours = Ours()
    with pytest.raises(KeyError), ours.whole.time():
        raise KeyError
    found = ours.registry.get_sample_value
    assert found("kvroute_whole_seconds_count") == 1
    assert 0 < (found("kvroute_whole_seconds_sum") or 0.0) < 1


def test_labels_that_a_metric_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="kvroute_seen"):
        Ours().seen.labels("a")
