from app.core.loads import Load, Loads, Snapshot
from app.core.types import Incarnation
from app.core.worker_report import (
    DEFAULT_SPEED,
    GPU,
    METRICS,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
)
from app.policy.view import View
from app.policy.workers import Measurement, Workers
from app.router.metrics import WORKER_FAMILIES, Telemetry
from tests.lua.conftest import info

OWN = {
    "kvroute_decisions": ("counter", "policy", "outcome"),
    "kvroute_degraded_decisions": ("counter",),
    "kvroute_blind_decisions": ("counter",),
    "kvroute_decision_seconds": ("histogram",),
    "kvroute_redis_round_trip_seconds": ("histogram", "step"),
    "kvroute_hit_fraction": ("histogram",),
    "kvroute_locality": ("counter", "reason"),
    "kvroute_worker_routed_blocks": ("counter", "worker", "what"),
    "kvroute_isl_blocks": ("counter",),
    "kvroute_overlap_blocks": ("counter", "tier"),
    "kvroute_saved_prefill_seconds": ("counter",),
    "kvroute_invalid_requests": ("counter", "code"),
    "kvroute_reservations": ("counter", "event"),
    "kvroute_reserve_conflicts": ("counter", "reason"),
    "kvroute_worker_suspensions": ("counter",),
    "kvroute_decision_retries": ("counter",),
    "kvroute_task_failures": ("counter", "task"),
    "kvroute_workers": ("gauge",),
    "kvroute_asleep": ("gauge",),
    "kvroute_waiting_requests": ("gauge",),
    "kvroute_waited_seconds": ("histogram",),
    "kvroute_waits": ("counter", "tenant", "priority", "outcome"),
    "kvroute_metrics_stream_lag_seconds": ("gauge",),
    "kvroute_index_fill": ("gauge",),
    "kvroute_loop_late_seconds": ("gauge",),
    "kvroute_process_cpu": ("gauge",),
    "kvroute_redis_may_evict": ("gauge",),
    "kvroute_redis_memory_fill": ("gauge",),
    "kvroute_load_avg": ("gauge",),
    "kvroute_load_std": ("gauge",),
}
LOAD = ("requests", "blocks", "prefill_tokens", "queue_seconds")


def test_a_router_counts_under_these_names_and_labels():
    assert {f.name: (f.kind, *f.labels) for f in Telemetry.families.values()} == OWN


def test_each_metric_of_the_table_is_registered_and_is_an_attribute():
    telemetry = Telemetry()
    collected = {family.name: family for family in telemetry.registry.collect()}
    for attribute, family in Telemetry.families.items():
        metric = getattr(telemetry, attribute)
        assert metric.describe()[0].name == family.name
        assert (collected[family.name].type, collected[family.name].documentation) == (
            family.kind,
            family.help,
        )


def test_two_routers_in_a_process_count_separately():
    one, other = Telemetry(), Telemetry()
    one.retries.inc()
    names = [t.registry.get_sample_value("kvroute_decision_retries_total") for t in (one, other)]
    assert names == [1.0, 0.0]


def gauges_of(readings, now_ms):
    """The gauges of one worker that reported at 0 ms, without kvroute_worker_."""
    metrics = ForwardPassMetrics(
        kv_active_blocks=7,
        num_requests_waiting=2,
        kv_leases_ended=0,
        kv_fetched_late=0,
        kv_transfers=3,
        kv_transfers_failed=1,
    )
    measured = Measurement(metrics, DEFAULT_SPEED, readings, at_ms=0)
    inc = Incarnation(1)
    telemetry = Telemetry()
    telemetry.view = View(
        Snapshot(now_ms=now_ms, loads=Loads.of({inc: Load(requests=3, blocks=5)})),
        Workers([(inc, info("a"), measured)]),
    )
    names = {family.name for family in WORKER_FAMILIES.values()}
    collected = [family for family in telemetry.registry.collect() if family.name in names]
    samples = [sample for family in collected for sample in family.samples]
    states = [sample.labels for sample in samples if "state" in sample.labels]
    assert states == [{"worker": "a:0", "state": "serving"}]
    samples = [sample for sample in samples if "state" not in sample.labels]
    assert {tuple(sample.labels.items()) for sample in samples} == {(("worker", "a:0"),)}
    return {sample.name.removeprefix("kvroute_worker_"): sample.value for sample in samples}


def test_a_worker_shows_its_load_and_all_that_it_reports():
    readings = GpuReadings(*(float(n) for n, _ in enumerate(GPU)))
    shown = gauges_of(readings, now_ms=500)
    reported = {item.gauge for item in (*METRICS, *GPU)} - {""}
    assert shown.keys() == {*LOAD, *reported, "stale"}
    assert (shown["requests"], shown["blocks"], shown["stale"]) == (3, 5, 0)
    assert (shown["kv_active_blocks"], shown["requests_waiting"]) == (7, 2)
    assert [shown[item.gauge] for item in GPU] == list(range(len(GPU)))


def test_readings_that_a_gpu_lacks_or_that_are_stale_have_no_sample():
    some = GpuReadings(power_w=0.0)
    assert {n for n in gauges_of(some, now_ms=500) if n.startswith("gpu")} == {"gpu_power_watts"}
    stale = gauges_of(some, now_ms=60_000)
    assert stale["stale"] == 1
    assert {n for n in stale if n.startswith("gpu")} == set()
    assert {n for n in gauges_of(NO_READINGS, now_ms=500) if n.startswith("gpu")} == set()
