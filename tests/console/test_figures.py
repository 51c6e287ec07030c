"""What replicas say of themselves, and what it comes to together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from app.console.figures import Together, Window, read
from app.console.findings import ALERTS, firing
from app.core.types import TierOverlap
from app.router.metrics import Telemetry
from tests.test_alerts import ALERTS as DEPLOYED


def said(telemetry: Telemetry, window: Window, now_s: float) -> dict[str, Any]:
    window.add(read(telemetry.registry), now_s)
    return window.figures()


def routed(telemetry: Telemetry, times: int, seconds: float = 0.0015) -> None:
    for _ in range(times):
        telemetry.decisions_of("latency", "routed").inc()
        telemetry.locality_of("kept").inc()
        telemetry.count_blocks("w1:0", 10, TierOverlap(device=4, host=1))
        telemetry.decision_seconds.observe(seconds)


def test_rates_are_of_the_last_seconds_and_localities_of_the_last_minute() -> None:
    telemetry, window = Telemetry(), Window()
    said(telemetry, window, 0.0)
    routed(telemetry, 30)
    said(telemetry, window, 20.0)
    routed(telemetry, 50)
    together = Together([said(telemetry, window, 30.0)])
    assert together.series()["requests_per_s"] == 5
    assert together.series()["cached_share"] == 0.5
    assert together.localities() == {"kept": 80}
    together = Together([said(telemetry, window, 90.0)])
    assert together.series()["requests_per_s"] == 0
    assert together.series()["cached_share"] is None
    assert together.localities() == {}


def test_percentiles_are_of_all_replicas_together() -> None:
    figures = []
    for seconds in (0.0015, 0.15):
        telemetry, window = Telemetry(), Window()
        said(telemetry, window, 0.0)
        routed(telemetry, 100, seconds)
        figures.append(said(telemetry, window, 5.0))
    together = Together(figures)
    assert together.per_s["decisions:routed"] == 40
    # Each lies in a bucket, within which the estimate goes up in a straight line.
    assert together.quantile("decision", 0.25) == pytest.approx(0.0015)
    assert together.quantile("decision", 0.75) == pytest.approx(0.175)
    assert together.quantile("redis", 0.5) is None


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"window_s": "long", "counts": {}, "minute": {}, "buckets": {}, "gauges": {}},
        {"window_s": 1, "counts": [], "minute": {}, "buckets": {}, "gauges": {}},
        {"window_s": 1, "counts": {"a": "b"}, "minute": {}, "buckets": {}, "gauges": {}},
        {
            "window_s": 1,
            "counts": {},
            "minute": {"locality:kept": "inf"},
            "buckets": {},
            "gauges": {},
        },
        {"window_s": 1, "counts": {}, "minute": {}, "buckets": {"ttft": [1]}, "gauges": {}},
    ],
)
def test_figures_that_make_no_sense_count_for_nothing(figures: dict[str, Any]) -> None:
    telemetry, window = Telemetry(), Window()
    said(telemetry, window, 0.0)
    routed(telemetry, 10)
    sound = said(telemetry, window, 5.0)
    assert Together([figures, sound]).series() == Together([sound]).series()


def test_an_alert_fires_by_the_figures_and_says_how_much() -> None:
    telemetry, window = Telemetry(), Window()
    said(telemetry, window, 0.0)
    assert list(firing(Together([said(telemetry, window, 1.0)]))) == []
    telemetry.degraded.inc(3)
    telemetry.decisions_of("latency", "all_busy").inc(2)
    telemetry.decisions_of("latency", "too_large").inc(5)
    telemetry.index_fill.set(4.5)
    routed(telemetry, 10, seconds=0.2)
    found = {c.about: c.found for c in firing(Together([said(telemetry, window, 2.0)]))}
    assert found == {
        "KvrouteRequestsRefused": "2 requests were refused in the last minute",
        "KvrouteDegraded": "3 requests were routed by load alone in the last minute",
        "KvrouteSlowDecisions": "decisions take 249 ms (p99)",
        "KvrouteIndexOverfull": "the index holds 4.5 times the blocks it was laid out for",
    }
    assert all(alert.remedy for alert in ALERTS)


def test_every_alert_shown_is_one_of_those_that_are_deployed() -> None:
    groups = yaml.safe_load(DEPLOYED.read_text())["groups"]
    deployed = {rule["alert"] for group in groups for rule in group["rules"]}
    assert {alert.name for alert in ALERTS} <= deployed
