"""What replicas say of themselves, and what it comes to together."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Counting

from app.core.types import TierOverlap
from app.ops.conditions import CONDITIONS, holding
from app.ops.figures import CountWindow, Reading, Together, read
from app.router.metrics import Telemetry


def said(telemetry, window, now_s):
    window.add(read(telemetry.registry), now_s)
    return window.figures()


def routed(telemetry, times, seconds=0.0015):
    for _ in range(times):
        telemetry.decisions_of("latency", "routed").inc()
        telemetry.locality_of("kept").inc()
        telemetry.count_blocks("w1:0", 10, TierOverlap(device=4, host=1))
        telemetry.decision_seconds.observe(seconds)


def test_rates_are_of_the_last_seconds_and_localities_of_the_last_minute():
    telemetry, window = Telemetry(), CountWindow()
    said(telemetry, window, 0.0)
    routed(telemetry, 30)
    said(telemetry, window, 20.0)
    routed(telemetry, 50)
    together = Together([said(telemetry, window, 30.0)])
    assert together.series()["requests_per_s"] == 5
    assert together.series()["predicted_share"] == 0.5
    assert together.localities() == {"kept": 80}
    together = Together([said(telemetry, window, 90.0)])
    assert together.series()["requests_per_s"] == 0
    assert together.series()["predicted_share"] is None
    assert together.localities() == {}


def test_percentiles_are_of_all_replicas_together():
    figures = []
    for seconds in (0.0015, 0.15):
        telemetry, window = Telemetry(), CountWindow()
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
def test_figures_that_make_no_sense_count_for_nothing(figures):
    telemetry, window = Telemetry(), CountWindow()
    said(telemetry, window, 0.0)
    routed(telemetry, 10)
    sound = said(telemetry, window, 5.0)
    assert Together([figures, sound]).series() == Together([sound]).series()


def test_an_alert_fires_by_the_figures_and_says_how_much():
    telemetry, window = Telemetry(), CountWindow()
    said(telemetry, window, 0.0)
    assert list(holding(Together([said(telemetry, window, 1.0)]))) == []
    telemetry.degraded.inc(3)
    telemetry.decisions_of("latency", "all_busy").inc(2)
    telemetry.decisions_of("latency", "too_large").inc(5)
    telemetry.index_fill.set(4.5)
    routed(telemetry, 10, seconds=0.2)
    found = {c.about: c.found for c in holding(Together([said(telemetry, window, 2.0)]))}
    assert found == {
        "KvrouteRequestsRefused": "2 requests were refused in the last minute",
        "KvrouteDegraded": "3 requests were routed by load alone in the last minute",
        "KvrouteSlowDecisions": "decisions take 249 ms (p99)",
        "KvrouteIndexOverfull": "the index holds 4.5 times the blocks it was laid out for",
    }


def counted(*counts, ttft=(0, 0)):
    """What a replica tells that has counted these since its last reading. ttft: first tokens that
    came in time, and later."""
    registry, window = CollectorRegistry(), CountWindow()
    metrics = {}
    window.add(read(registry), 0.0)
    for name, labels, value in counts:
        if name not in metrics:
            metrics[name] = Counting(f"kvroute_{name}", "-", tuple(labels), registry=registry)
        metrics[name].labels(**labels).inc(value)
    firsts = Histogram("kvroute_door_ttft_seconds", "-", ("model",), registry=registry)
    for seconds, number in zip((1.0, 6.0), ttft, strict=True):
        for _ in range(number):
            firsts.labels("m").observe(seconds)
    window.add(read(registry), 5.0)
    return Together([window.figures()])


def of_key(name, key, value, **labels):
    return f"key_{name}", {"key": key} | labels, value


def test_a_key_is_named_that_floods_or_is_over_its_limits():
    tokens = [of_key("tokens", key, n, kind="prompt") for key, n in (("ann", 90), ("bob", 10))]
    waited = of_key("waited_seconds", "bob", 12.0), of_key("waited_seconds", "ann", 12.0)
    asked = [of_key("requests", "bob", 30, ended="ok"), of_key("limited", "bob", 9, limit="tokens")]
    found = {c.about: c.found for c in holding(counted(*tokens, *waited, *asked))}
    assert found == {
        "KvrouteKeyFloods": "90% of the prompt tokens are ann's, and requests wait",
        "KvrouteKeyLimited": "30% of the requests of bob are over its limits",
    }
    assert not [*holding(counted(*tokens))], "nobody waits"
    assert not [*holding(counted(*tokens, waited[0]))], "hardly anybody does"
    most = of_key("waited_seconds", "bob", 9.0), of_key("waited_seconds", "ann", 90.0)
    even = [of_key("tokens", key, 50, kind="prompt") for key in ("ann", "bob")]
    [said] = holding(counted(*even, *most))
    assert said.found == "91% of the time waited is ann's, and requests wait"
    alone = (tokens[0], of_key("waited_seconds", "ann", 22.0))
    assert not [*holding(counted(*alone))], "there is no other key"


def test_a_key_is_named_that_is_new_and_makes_most_requests():
    def told(*steps):
        registry, window = CollectorRegistry(), CountWindow()
        asked = Counting("kvroute_key_requests", "-", ("key", "ended"), registry=registry)
        for second, counts in enumerate(steps, 60 - len(steps) + 1):
            for key, number in counts.items():
                asked.labels(key, "ok").inc(number)
            if second == 60 - len(steps) + 1:
                window.add(read(registry), 0.0)
            window.add(read(registry), float(second))
        return window.figures()

    def new(*replicas):
        return [c.found for c in holding(Together(replicas)) if c.about == "KvrouteKeyNew"]

    before, flood = {"bob": 3}, {"bob": 3, "ann": 17}
    text = "ann, a key that asked for nothing a minute ago, makes 74% of all requests"
    assert new(told(before, before, flood)) == [text]
    assert new(told(before, before, flood), told(before, before, flood)) == [text]
    assert not new(told(flood, before, flood)), "it is not new"
    assert not new(told(before, flood), told(flood, before, flood)), "another replica knows it"
    assert not new(told(before, {"bob": 30, "ann": 17})), "most are others'"
    assert not new(told({}, {"ann": 17})), "nobody else is there"
    assert not new(told(before, {"ann": 9})), "they are few"


def requests(outcome, times, code=200):
    return "door_requests", {"model": "m", "outcome": outcome, "code": str(code)}, times


def unknown(outcome, times, code):
    """Of requests whose model nobody knows."""
    return "door_requests", {"model": "", "outcome": outcome, "code": str(code)}, times


def at_worker(outcome, times):
    return "door_worker_requests", {"worker": "w:0", "outcome": outcome, "cause": ""}, times


def tokens(**kinds):
    return [("door_tokens", {"model": "m", "kind": kind}, n) for kind, n in kinds.items()]


def test_endings_are_rates_and_of_models_and_workers():
    together = counted(
        *(requests("ok", 50), requests("engine_error", 25, 500), requests("cut", 5)),
        *(requests("left_before_token", 10, 499), requests("left_after_token", 5)),
        *(requests("refused", 5, 400), at_worker("ok", 50), at_worker("failed", 30)),
        *(at_worker("left_before_token", 10), *tokens(output=480, output_by_router=20)),
        ttft=(50, 5),
    )
    series = together.series()
    told = {name: series[name] for name in ("ok_per_s", "failed_per_s", "cut_per_s")}
    assert told == {"ok_per_s": 10, "failed_per_s": 5, "cut_per_s": 1}
    assert (series["left_before_per_s"], series["left_after_per_s"]) == (2, 1)
    assert (series["unfit_per_s"], series["output_tokens_per_s"]) == (1, 100)
    assert series["failed_share"] == 0.3
    # 5 came late, 25 were failed, and 10 left.
    assert series["in_time_share"] == pytest.approx(50 / 90)
    assert together.models["m"]["engine"] == 25
    assert together.models["m"]["output"] == 500
    assert together.workers == {"w:0": {"ok": 50, "failed": 30, "left_before": 10}}


def test_what_an_engine_counted_before_it_was_seen_is_nothing_of_the_last_minute():
    window = CountWindow()
    window.add(Reading(), 0.0)
    for second, failed in ((1.0, 7), (2.0, 7), (3.0, 9)):
        window.add(Reading(workers={"w:0": Counter(kv_failed=failed)}), second)
        grown = window.figures()["workers"]
        assert grown == ({"w:0": {"kv_failed": 2}} if failed == 9 else {})


def test_work_is_of_models_and_workers_too():
    together = counted(
        ("door_retries", {"model": "m"}, 3.0),
        ("door_migrations", {"model": "m"}, 2.0),
        ("door_sources", {"model": "m"}, 1.0),
        ("door_worker_output_tokens", {"worker": "w:0"}, 40.0),
        ("door_worker_sources", {"worker": "w:0"}, 4.0),
    )
    assert together.models["m"] == {"retries": 3, "migrations": 2, "sources": 1}
    assert together.workers["w:0"] == {"output": 40, "sources": 4}
    assert together.series()["retries_per_s"] == 0.6


def test_what_is_cached_is_what_engines_report():
    saved = ("saved_prefill_seconds", {"of": "all"}, 10.0)
    blocks = [("isl_blocks", {"of": "all"}, 100.0), ("overlap_blocks", {"of": "all"}, 99.0)]
    none = counted(saved, *blocks, *tokens(prompt=100, told=100, cached=0, predicted=99)).series()
    assert (none["cached_share"], none["saved_s_per_s"]) == (0.0, 0.0)
    assert none["predicted_share"] == 0.99
    half = counted(saved, *tokens(prompt=200, told=100, cached=40, predicted=80)).series()
    assert (half["cached_share"], half["saved_s_per_s"]) == (0.4, 1.0)
    silent = counted(saved, *tokens(prompt=200, output=5)).series()
    assert (silent["cached_share"], silent["saved_s_per_s"]) == (None, None)


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        (
            [requests("ok", 90), requests("engine_error", 10, 500)],
            ["KvrouteRequestsFail", "KvrouteSlowFirstTokens"],
        ),
        ([requests("ok", 96), requests("cut", 4)], []),
        ([at_worker("ok", 70), at_worker("failed", 30)], ["KvrouteWorkerFailsRequests"]),
        ([at_worker("ok", 2), at_worker("failed", 5)], []),
        ([at_worker("ok", 70), at_worker("full", 300)], []),
        (
            [requests("ok", 80), requests("left_before_token", 20, 499)],
            ["KvrouteClientsLeave", "KvrouteSlowFirstTokens"],
        ),
        ([requests("ok", 80), requests("left_after_token", 80)], []),
        ([requests("ok", 10), requests("refused", 90, 400)], ["KvrouteRequestsUnfit"]),
        ([requests("ok", 80), unknown("model_not_found", 20, 404)], ["KvrouteModelsUnknown"]),
        ([requests("ok", 400), unknown("model_not_found", 10, 404)], []),
        ([requests("ok", 5), unknown("model_not_found", 2, 404)], []),
        ([requests("ok", 10), unknown("bad_request", 90, 400)], ["KvrouteRequestsUnfit"]),
        ([requests("ok", 60), unknown("bad_request", 40, 400)], []),
        ([requests("ok", 10), requests("rate_limited", 90, 429)], []),
        ([requests("ok", 10), requests("invalid_api_key", 90, 401)], ["KvrouteKeysRefused"]),
        (
            [
                ("door_tokens_from", {"model": "m", "source": "engine"}, 90),
                ("door_tokens_from", {"model": "m", "source": "router"}, 10),
                ("door_stage_seconds_sum", {"model": "m", "stage": "tokens"}, 20),
            ],
            ["KvrouteEnginesTokenize"],
        ),
        (
            [
                requests("ok", 10),
                ("door_cached_apart_tokens", {"model": "m", "worker": "w"}, 10),
                ("door_cached_compared_tokens", {"model": "m", "worker": "w"}, 100),
            ],
            ["KvrouteCacheApart"],
        ),
    ],
)
def test_a_condition_holds_above_its_threshold(counts, names):
    found = holding(counted(*counts, ttft=(80, 0)))
    assert [check.about for check in found] == names


@pytest.mark.parametrize(
    ("gauge", "name"),
    [
        ("late:w:0", "KvrouteFirstTokensLate"),
        ("queue:m", "KvrouteQueuesLong"),
        ("changes:w:0", "KvrouteWorkersRestart"),
        ("loop_late:r", "KvrouteLoopLate"),
        ("cpu:r", "KvrouteRouterBusy"),
    ],
)
def test_the_worst_of_each_worker_model_and_replica_is_named(gauge, name):
    most = next(one.threshold for one in CONDITIONS if one.name == name)
    window = CountWindow()
    for value, found in ((most, []), (1.1 * most, [name])):
        window.add(Reading(gauges={gauge: value}), value)
        checks = [*holding(Together([window.figures(), window.figures()]))]
        assert [check.about for check in checks] == found
        assert all(gauge.partition(":")[2] in check.found for check in checks)


def test_workers_are_asked_for_only_where_those_there_are_busy():
    for outcome, more, remedy in (
        ("all_busy", 0.0, "add workers"),
        ("no_workers", 0.0, "states and causes"),
        ("all_busy", 5.0, "workers fail"),
    ):
        refused = ("decisions", {"policy": "latency", "outcome": outcome}, 20.0)
        [check] = (
            check
            for check in holding(counted(refused, ("worker_suspensions", {"of": "all"}, more)))
            if check.about == "KvrouteRequestsRefused"
        )
        assert remedy in check.remedy


def test_no_share_is_told_of_a_few_requests():
    telemetry, window = Telemetry(), CountWindow()
    said(telemetry, window, 0.0)
    routed(telemetry, 2, seconds=0.2)
    assert not [*holding(Together([said(telemetry, window, 1.0)]))]
    few = counted(
        *(requests("ok", 3), requests("invalid_api_key", 4, 401)),
        ("door_tokens_from", {"model": "m", "source": "engine"}, 3),
        ("door_cached_apart_tokens", {"model": "m", "worker": "w"}, 10),
        ("door_cached_compared_tokens", {"model": "m", "worker": "w"}, 100),
        ttft=(1, 2),
    )
    assert not [*holding(few)]
