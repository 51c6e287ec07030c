from __future__ import annotations

import pytest

from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    decode,
    encode,
)

METRICS = ForwardPassMetrics(
    request_active_slots=3,
    request_total_slots=256,
    kv_active_blocks=1200,
    kv_total_blocks=25_000,
    num_requests_waiting=2,
    gpu_cache_usage_perc=0.048,
    gpu_prefix_cache_hit_rate=0.75,
    kv_idle_before_evict_s=412.5,
)
SPEED = Speed(prefill_s_per_token=1.25e-5, mean_output_tokens=212.5)
READINGS = GpuReadings(
    memory_used_bytes=60_129_542_145,
    memory_total_bytes=85_899_345_920,
    utilisation=0.37,
    temperature_c=54,
    power_w=312.345,
    pcie_sent_bytes_per_s=1_250_000,
    pcie_received_bytes_per_s=87_654_321_000,
)


def read(entry: dict[str, str]) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """What is decoded of an entry once Redis has had it."""
    return decode({name.encode(): text.encode() for name, text in entry.items()})


def test_metrics_are_read_as_they_were_written() -> None:
    assert read(encode(METRICS, SPEED, READINGS)) == (METRICS, SPEED, READINGS)


def test_only_readings_that_a_gpu_has_are_written() -> None:
    entry = encode(METRICS, SPEED, GpuReadings(memory_used_bytes=60_129_542_145, power_w=0.0))
    readings = entry.items() - encode(METRICS, SPEED).items()
    assert readings == {("gpu_memory_used_bytes", "60129542145"), ("gpu_power_w", "0")}
    assert read(entry)[2] == GpuReadings(memory_used_bytes=60_129_542_145, power_w=0.0)


def test_every_field_is_written_as_short_text_under_its_own_name() -> None:
    entry = encode(METRICS, SPEED)
    assert len(entry) == 15
    assert entry["kv_total_blocks"] == "25000"
    assert entry["gpu_cache_usage_perc"] == "0.048"
    assert entry["prefill_s_per_token"] == "1.25e-05"
    assert (
        encode(ForwardPassMetrics(gpu_cache_usage_perc=1 / 3), SPEED)["gpu_cache_usage_perc"]
        == "0.333333333"
    )


def test_counts_stay_whole_numbers() -> None:
    metrics, *_ = read({"kv_total_blocks": "25000", "num_requests_waiting": "2"})
    assert (metrics.kv_total_blocks, metrics.num_requests_waiting) == (25_000, 2)
    assert isinstance(metrics.kv_total_blocks, int)


def test_a_missing_field_takes_its_default_and_an_unknown_one_is_ignored() -> None:
    metrics, speed, gpu = read({"kv_active_blocks": "5", "worker": "a:0", "colour": "red"})
    assert metrics == ForwardPassMetrics(kv_active_blocks=5)
    assert speed == DEFAULT_SPEED
    assert gpu == NO_READINGS


@pytest.mark.parametrize("field", ["kv_active_blocks", "prefill_s_per_token", "gpu_power_w"])
@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e308"])
def test_a_number_that_no_measurement_gives_is_refused(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is {text}"):
        read({field: text})


@pytest.mark.parametrize(
    "field", ["kv_active_blocks", "mean_output_tokens", "gpu_memory_used_bytes"]
)
def test_a_field_that_is_not_a_number_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="many"):
        read({field: "many"})
