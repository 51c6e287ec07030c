import random
from dataclasses import replace

import orjson
import pytest

from app.core.limits import MAX_COUNT, MAX_MEASURED
from app.core.registration import (
    WrongField,
    decode_info,
    decode_metrics,
    encode_info,
    encode_metrics,
    read_info,
    version_in,
)
from app.core.roles import Role
from app.core.trust import Trust
from app.core.types import WorkerKey
from app.core.worker_report import (
    DEFAULT_SPEED,
    GPU,
    INFO,
    METRICS,
    NO_READINGS,
    SPEED,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)

WORKER = WorkerInfo(
    key=WorkerKey("gpu-7", 3),
    address="http://10.0.0.7:8081",
    block_size=16,
    kv_total_blocks=25_000,
    max_requests=256,
    accelerator="NVIDIA H100",
    reuse_blocks=4,
    recomputed_blocks=2,
    lookahead_blocks=1,
    chunk_blocks=4,
    engine="vllm 0.33.0",
    models=("llama", "llama-8b"),
    adapters=("sql",),
    max_model_len=8192,
    tokenizer="meta-llama/Llama-3.1-8B",
    tokenizer_hash="0123456789abcdef",
    ill="does not answer",
    trust=Trust.APPROXIMATE,
    trust_cause="no events: start it with --kv-events-config",
    findings=("7 of 74 engines have no agent",),
    role=Role.DECODE,
    kv_transfer="nixl",
    tp_size=4,
    kv_lease_s=120.0,
    engine_life="1751.250+1f",
    engine_id="a1b2",
    kv_fingerprint=("block=16", "handshake=?"),
    kv_compatible="a",
    revision="r7",
    kv_hosts=("10.0.0.7",),
    bootstrap_port=8998,
    host_total_blocks=50_000,
    event_addresses=("tcp://10.0.0.7:5557",),
)
WORKER_TEXT = (
    b'{"worker":"gpu-7:3","address":"http://10.0.0.7:8081","block_size":16,'
    b'"kv_total_blocks":25000,"max_requests":256,"accelerator":"NVIDIA H100",'
    b'"reuse_blocks":4,"recomputed_blocks":2,"lookahead_blocks":1,"chunk_blocks":4,'
    b'"engine":"vllm 0.33.0",'
    b'"models":["llama","llama-8b"],"adapters":["sql"],"max_model_len":8192,'
    b'"tokenizer":"meta-llama/Llama-3.1-8B","tokenizer_hash":"0123456789abcdef",'
    b'"ill":"does not answer","trust":"approximate",'
    b'"trust_cause":"no events: start it with --kv-events-config",'
    b'"findings":["7 of 74 engines have no agent"],'
    b'"role":"decode","kv_transfer":"nixl","tp_size":4,'
    b'"kv_lease_s":120.0,"engine_life":"1751.250+1f",'
    b'"engine_id":"a1b2",'
    b'"kv_fingerprint":["block=16","handshake=?"],"kv_compatible":"a","revision":"r7",'
    b'"kv_hosts":["10.0.0.7"],"bootstrap_port":8998,'
    b'"host_total_blocks":50000,'
    b'"event_addresses":["tcp://10.0.0.7:5557"],'
    b'"lease_ttl_ms":3000,"version":5}'
)
METRICS_SEEN = ForwardPassMetrics(
    request_active_slots=3,
    request_total_slots=256,
    kv_active_blocks=1200,
    kv_total_blocks=25_000,
    num_requests_waiting=2,
    gpu_cache_usage_perc=0.048,
    gpu_prefix_cache_hit_rate=0.75,
    kv_idle_before_evict_s=412.5,
    late_s=1.5,
    kv_leases_ended=3,
    kv_fetched_late=1,
    kv_transfers=40,
    kv_transfers_failed=2,
    engine_steps=900,
    device_blocks=20_000,
    host_blocks=3000,
    disk_blocks=0,
    reserved_requests=4,
    reserved_decoding=2,
    reserved_blocks=1100,
    read_s_ago=0.25,
    mean_prefill_tokens=812.5,
)
SPEED_LEARNT = Speed(prefill_s_per_token=1.25e-5, mean_output_tokens=212.5)
READINGS = GpuReadings(
    memory_used_bytes=60_129_542_145,
    memory_total_bytes=85_899_345_920,
    utilisation=0.37,
    temperature_c=54,
    power_w=312.345,
    pcie_sent_bytes_per_s=1_250_000,
    pcie_received_bytes_per_s=87_654_321_000,
)
ENTRY_TEXT = """
    request_active_slots=3 request_total_slots=256 kv_active_blocks=1200 kv_total_blocks=25000
    num_requests_waiting=2 gpu_cache_usage_perc=0.048 gpu_prefix_cache_hit_rate=0.75
    kv_idle_before_evict_s=412.5 late_s=1.5 kv_leases_ended=3 kv_fetched_late=1 kv_transfers=40
    kv_transfers_failed=2 engine_steps=900 device_blocks=20000 host_blocks=3000 disk_blocks=0
    reserved_requests=4 reserved_decoding=2 reserved_blocks=1100 read_s_ago=0.25
    mean_prefill_tokens=812.5 prefill_s_per_token=1.25e-05 prefill_s_per_token2=1.1e-09
    decode_s_per_kv_token=3e-08 decode_s_per_seq=8e-05 host_s_per_token=2e-06 disk_s_per_token=2e-05
    mean_output_tokens=212.5 transfer_s=0.01 transfer_s_per_token=2.6e-05 decode_s=0.018
    gpu_memory_used_bytes=60129542145 gpu_memory_total_bytes=85899345920 gpu_utilisation=0.37
    gpu_temperature_c=54 gpu_power_w=312.345 gpu_pcie_sent_bytes_per_s=1250000
    gpu_pcie_received_bytes_per_s=87654321000
"""
ENTRY = dict(pair.split("=") for pair in ENTRY_TEXT.split())

HIDDEN = """
    worker engine_life engine_id kv_fingerprint kv_compatible revision kv_hosts bootstrap_port
    host_total_blocks event_addresses request_active_slots request_total_slots engine_steps
    device_blocks host_blocks disk_blocks reserved_requests reserved_decoding reserved_blocks
    read_s_ago mean_prefill_tokens
"""
IN_ANSWERS = """
    address block_size kv_total_blocks max_requests accelerator reuse_blocks recomputed_blocks
    lookahead_blocks chunk_blocks engine models adapters max_model_len tokenizer tokenizer_hash ill
    trust trust_cause findings role kv_transfer tp_size kv_lease_s gpu_prefix_cache_hit_rate
    kv_idle_before_evict_s
"""
SHOWN = {
    **dict.fromkeys(HIDDEN.split(), ("", "")),
    **{name: (name, "") for name in IN_ANSWERS.split()},
    "kv_active_blocks": ("kv_active_blocks", "kv_active_blocks"),
    "num_requests_waiting": ("num_requests_waiting", "requests_waiting"),
    "gpu_cache_usage_perc": ("gpu_cache_usage", "cache_usage"),
    "late_s": ("late_s", "late_seconds"),
    "kv_leases_ended": ("", "kv_leases_ended"),
    "kv_fetched_late": ("", "kv_fetched_late"),
    "kv_transfers": ("", "kv_transfers"),
    "kv_transfers_failed": ("", "kv_transfers_failed"),
    "gpu_memory_used_bytes": ("memory_used_bytes", "gpu_memory_used_bytes"),
    "gpu_memory_total_bytes": ("memory_total_bytes", "gpu_memory_total_bytes"),
    "gpu_utilisation": ("utilisation", "gpu_utilisation"),
    "gpu_temperature_c": ("temperature_c", "gpu_temperature_celsius"),
    "gpu_power_w": ("power_w", "gpu_power_watts"),
    "gpu_pcie_sent_bytes_per_s": ("pcie_sent_bytes_per_s", "gpu_pcie_sent_bytes_per_second"),
    "gpu_pcie_received_bytes_per_s": (
        "pcie_received_bytes_per_s",
        "gpu_pcie_received_bytes_per_second",
    ),
}
"""By name in Redis: the names in GET /v1/workers and, after kvroute_worker_, in /metrics."""


def read(entry):
    """What is decoded of an entry once Redis has had it."""
    return decode_metrics({name.encode(): text.encode() for name, text in entry.items()})


def test_a_registration_is_this_text_and_is_read_as_it_was_written():
    assert encode_info(WORKER, 3000) == WORKER_TEXT
    assert decode_info(WORKER_TEXT) == WORKER
    assert decode_info(WORKER_TEXT.decode()) == WORKER
    assert version_in(WORKER_TEXT) == 5


def test_a_registration_without_a_version_is_of_the_first():
    assert version_in(b'{"worker":"gpu-7:3"}') == 1
    for text in (b'{"version":"2"}', b'{"version":true}', b"[]", b"2"):
        with pytest.raises(ValueError, match=r"version is .*, not a whole number"):
            version_in(text)


def test_routers_show_what_workers_say_under_these_names():
    # The measured total repeats the registered one, and is not shown.
    measured = [item for item in METRICS if item.name != "kv_total_blocks"]
    items = [*INFO, *measured, *GPU]
    assert {item.wire: (item.answer, item.gauge) for item in items} == SHOWN


def test_a_registration_with_the_smallest_numbers_is_read():
    smallest = replace(WORKER, block_size=1, kv_total_blocks=0, max_requests=0)
    assert decode_info(encode_info(smallest, 3000)) == smallest


def test_a_field_that_a_later_version_registers_is_ignored():
    assert read_info(orjson.loads(WORKER_TEXT) | {"colour": "red"}) == WORKER


@pytest.mark.parametrize("item", INFO, ids=lambda item: item.wire)
def test_a_field_missing_from_a_registration_takes_its_default_or_is_refused(item):
    values = orjson.loads(WORKER_TEXT)
    del values[item.wire]
    if item.default is None:
        with pytest.raises(WrongField, match=f"{item.wire} is None, not "):
            read_info(values)
    else:
        assert read_info(values) == replace(WORKER, **{item.name: item.default})


def test_only_what_most_workers_have_in_common_has_a_default_in_a_registration():
    defaults = {item.wire: item.default for item in INFO if item.default is not None}
    expected = {
        "accelerator": "cpu",
        **dict.fromkeys(("reuse_blocks", "chunk_blocks", "tp_size"), 1),
        **dict.fromkeys(
            (
                "recomputed_blocks",
                "lookahead_blocks",
                "max_model_len",
                "bootstrap_port",
                "host_total_blocks",
            ),
            0,
        ),
        **dict.fromkeys(
            (
                "engine",
                "tokenizer",
                "tokenizer_hash",
                "ill",
                "trust_cause",
                "kv_transfer",
                "engine_life",
                "engine_id",
                "kv_compatible",
                "revision",
            ),
            "",
        ),
        **dict.fromkeys(
            ("models", "adapters", "findings", "kv_fingerprint", "kv_hosts", "event_addresses"), ()
        ),
        "trust": "exact",
        "role": "both",
        "kv_lease_s": 0.0,
    }
    assert defaults == expected


@pytest.mark.parametrize("names", [["a", 1], "a"])
def test_names_of_models_are_text(names):
    with pytest.raises(WrongField, match="models is "):
        read_info(orjson.loads(WORKER_TEXT) | {"models": names})


@pytest.mark.parametrize("text", ["", "gpu-7", '{"worker": "gpu-7"'])
def test_a_registration_that_is_not_json_is_refused(text):
    with pytest.raises(ValueError, match="line 1 column"):
        decode_info(text)


def test_a_registration_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match=r"not an object: \[\]"):
        decode_info("[]")


@pytest.mark.parametrize("value", [":0", "gpu-7", 7, None])
def test_a_registration_of_a_nameless_worker_is_refused(value):
    with pytest.raises(WrongField, match=f"worker is {value!r}, not "):
        read_info(orjson.loads(WORKER_TEXT) | {"worker": value})


@pytest.mark.parametrize("item", INFO, ids=lambda item: item.wire)
@pytest.mark.parametrize("value", [None, [[]], {}, True])
def test_a_field_of_another_type_in_a_registration_is_refused_by_name(item, value):
    value = 1 if item.kind is type(value) else value
    with pytest.raises(WrongField) as refused:
        read_info(orjson.loads(WORKER_TEXT) | {item.wire: value})
    assert (refused.value.name, refused.value.value) == (item.wire, value)


@pytest.mark.parametrize("value", [-1, 10**12 + 1, 1.5, "16"])
@pytest.mark.parametrize("field", ["block_size", "kv_total_blocks", "max_requests"])
def test_a_number_out_of_bounds_in_a_registration_is_refused(field, value):
    with pytest.raises(WrongField, match=f"{field} is {value!r}, not a whole number from "):
        read_info(orjson.loads(WORKER_TEXT) | {field: value})


def test_metrics_are_these_fields_in_this_order_and_are_read_as_they_were_written():
    entry = encode_metrics(METRICS_SEEN, SPEED_LEARNT, READINGS)
    assert list(entry.items()) == list(ENTRY.items())
    assert read(entry) == (METRICS_SEEN, SPEED_LEARNT, READINGS)


def test_a_registration_with_any_values_is_read_as_it_was_written():
    rng = random.Random(1)
    for _ in range(500):
        info = WorkerInfo(
            WorkerKey(f"w{rng.randrange(10**6)}", rng.randrange(100_000)),
            *(_any_value(item, rng, MAX_COUNT) for item in INFO[1:]),
        )
        assert decode_info(encode_info(info, rng.randrange(10**6))) == info


def test_metrics_with_any_values_are_read_as_they_were_written():
    rng = random.Random(2)
    for _ in range(500):
        report = (
            ForwardPassMetrics(*(_any_value(item, rng) for item in METRICS)),
            Speed(*(_any_value(item, rng) for item in SPEED)),
            GpuReadings(*(rng.choice([None, _any_value(item, rng)]) for item in GPU)),
        )
        assert read(encode_metrics(*report)) == report


def _any_value(item, rng, largest=MAX_MEASURED):
    """A value that a field may have: of floats, nine digits are written."""
    if item.kind is bool:
        return rng.choice([False, True])
    if item.kind is str:
        return "".join(rng.choices('aZ 09:/"\\é字', k=rng.randrange(20)))
    if item.kind == tuple[str, ...]:
        return tuple("".join(rng.choices('aZ 09:/"\\é字', k=3)) for _ in range(rng.randrange(3)))
    if item.kind in (Role, Trust):
        return rng.choice([*item.kind])
    if item.kind is int:
        return rng.choice([item.least, rng.randrange(item.least, 10**12)])
    return float(f"{rng.choice([0.0, rng.random(), largest * rng.random() ** 40]):.9g}")


def test_only_readings_that_a_gpu_has_are_written():
    some = GpuReadings(memory_used_bytes=60_129_542_145, power_w=0.0)
    entry = encode_metrics(METRICS_SEEN, SPEED_LEARNT, some)
    readings = entry.items() - encode_metrics(METRICS_SEEN, SPEED_LEARNT).items()
    assert readings == {("gpu_memory_used_bytes", "60129542145"), ("gpu_power_w", "0")}
    assert read(entry)[2] == some


def test_fractions_are_written_with_nine_digits():
    entry = encode_metrics(ForwardPassMetrics(gpu_cache_usage_perc=1 / 3), SPEED_LEARNT)
    assert entry["gpu_cache_usage_perc"] == "0.333333333"


def test_counts_stay_whole_numbers():
    metrics, *_ = read({"kv_total_blocks": "25000", "num_requests_waiting": "2"})
    assert (metrics.kv_total_blocks, metrics.num_requests_waiting) == (25_000, 2)
    assert isinstance(metrics.kv_total_blocks, int)


def test_a_missing_metric_takes_its_default_and_an_unknown_one_is_ignored():
    metrics, speed, gpu = read({"kv_active_blocks": "5", "worker": "a:0", "colour": "red"})
    assert metrics == ForwardPassMetrics(kv_active_blocks=5)
    assert speed == DEFAULT_SPEED
    assert gpu == NO_READINGS


@pytest.mark.parametrize("item", [*METRICS, *SPEED, *GPU], ids=lambda item: item.wire)
@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e308", "many", ""])
def test_text_that_no_measurement_gives_is_refused_by_name(item, text):
    with pytest.raises(ValueError, match=f"^{item.wire} is {text}$"):
        read({item.wire: text})
