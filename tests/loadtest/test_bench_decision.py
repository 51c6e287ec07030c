import pytest
from rich.console import Console

from loadtest.bench_decision import CONCURRENCY, CURVE, measure, shapes, show

pytestmark = pytest.mark.slow


def test_replicas_are_measured_alongside_a_bare_endpoint(own_redis_server):
    found = measure(own_redis_server.url, requests=64, rounds=1, replicas=(1, 2))
    assert list(found["one"]) == [shape.name for shape in shapes()]
    assert list(found["replicas"]) == list(CURVE)
    for by_concurrency in found["one"].values():
        assert list(by_concurrency) == [str(n) for n in CONCURRENCY]
    for by_count in found["replicas"].values():
        assert list(by_count) == ["1", "2"]
        assert all(made["scripts_us"] > 0 for made in by_count.values())
    for columns in [*found["one"].values(), *found["replicas"].values()]:
        for made in columns.values():
            assert made["per_s"] > 0
            assert 0 < made["p50_ms"] <= made["p99_ms"]
    console = Console(record=True, width=200)
    show(found, console)
    assert "bare endpoint, token ids" in console.export_text()


def test_cpu_times_too_short_to_measure_are_not_compared():
    made = dict.fromkeys(("per_s", "p50_ms", "p99_ms", "redis_us", "commands", "bytes"), 1.0)
    made["cpu_us"] = 0.0
    console = Console(record=True, width=200)
    show({"one": {"a shape": {"1": made}}, "replicas": {}}, console)
    (row,) = (line for line in console.export_text().splitlines() if "a shape" in line)
    assert row.split("│")[5].strip() == "-"
