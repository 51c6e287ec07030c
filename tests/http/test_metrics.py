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


def the_librarys():
    registry = CollectorRegistry()
    kinds = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
    metrics = {}
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


def count(metrics):
    def of(name):
        return metrics[name] if isinstance(metrics, dict) else getattr(metrics, name)

    of("seen").labels("a", "x").inc()
    of("seen").labels("a", "x").inc(2.5)
    of("seen").labels("b", 'y"\n').inc()
    of("seen").labels("c", "z").inc()
    of("seen").remove("c", "z")
    of("all").inc(7)
    for amount in (0.1, 0.5, 0.6, 3.0):
        of("took").labels("a").observe(amount)
    of("took").labels("never")


def test_metrics_are_written_as_the_library_writes_its_own():
    ours = Ours()
    registry, metrics = the_librarys()
    assert generate_latest(ours.registry) == generate_latest(registry)
    count(ours)
    count(metrics)
    assert generate_latest(ours.registry) == generate_latest(registry)


def test_a_histogram_times_what_is_done_within_it_also_if_that_fails():
    ours = Ours()
    with pytest.raises(KeyError), ours.whole.time():
        raise KeyError
    found = ours.registry.get_sample_value
    assert found("kvroute_whole_seconds_count") == 1
    assert 0 < (found("kvroute_whole_seconds_sum") or 0.0) < 1


def test_labels_that_a_metric_does_not_have_are_refused():
    with pytest.raises(ValueError, match="kvroute_seen"):
        Ours().seen.labels("a")
