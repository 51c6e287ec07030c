"""What an agent finds out about the engine beside it."""

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import unused_port

from app.core.errors import EngineUnavailable, EngineUnfit
from app.core.settings.agent import EngineAgentSettings
from app.core.trust import TOP, Trust
from tests.fakes.engine import fake_engine
from tests.fakes.facts import SGLANG, SGLANG_INFO, VLLM, sglang, vllm_metrics
from tests.fakes.faults import HANG_S, Faults
from tests.workers.bridge.http.conftest import serving
from workers.bridge.http import engine as engine_client
from workers.bridge.http.discovery import NOTHING_GIVEN, discover
from workers.bridge.http.engine import EngineHttp
from workers.bridge.http.facts import EngineFacts, EventSource
from workers.bridge.http.sglang import KV_SETTINGS

HOST = "127.0.0.1"
EVENTS = "tcp://*:5557"


async def facts_of(answers, given=NOTHING_GIVEN):
    async with serving(answers) as (session, url):
        return await discover(session, url, given)


def vllm_sources(*configs):
    own = orjson.loads(VLLM["/kv_event_sources"])["0"]
    listed = {str(rank): own | config for rank, config in enumerate(configs)}
    return VLLM | {"/kv_event_sources": listed}


def without_label(name):
    return b"," + name + b'="', b',not_said="'


async def test_vllm_says_all_of_it():
    assert await facts_of(VLLM) == EngineFacts(
        kind="vllm",
        version="0.32.0",
        models=("tiny",),
        adapters=(),
        max_model_len=4096,
        block_size=32,
        capacity_tokens=1_048_576,
        reuse_tokens=32,
        recomputed_tokens=0,
        sources=(EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),),
        announces_copies=True,
        started_s=1795479223.91,
        kv_dtype="auto",
        tokenizer="example/tiny-model",
        pool_blocks=32_768,
    )


async def test_sglang_says_all_but_when_it_started():
    assert await facts_of(SGLANG) == EngineFacts(
        kind="sglang",
        version="0.5.23",
        models=("llama",),
        adapters=("poems",),
        max_model_len=8192,
        block_size=32,
        capacity_tokens=65_536,
        reuse_tokens=32,
        recomputed_tokens=0,
        sources=(
            EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv"),
            EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", "kv"),
        ),
        announces_copies=False,
        started_s=None,
        kv_settings=tuple((name, "") for name in KV_SETTINGS),
    )


async def test_each_rank_of_vllm_has_the_ports_that_it_reports():
    facts = await facts_of(
        vllm_sources(
            {"endpoint": "tcp://*:7001", "replay_endpoint": None},
            {"endpoint": "tcp://10.0.0.7:40123", "topic": "kv"},
        )
    )
    assert facts.sources == (
        EventSource(0, "tcp://127.0.0.1:7001", None),
        EventSource(1, "tcp://10.0.0.7:40123", "tcp://127.0.0.1:5558", "kv"),
    )


async def test_adapters_are_told_from_other_names_of_the_model():
    cards = [
        {"id": "llama", "parent": None, "max_model_len": 4096},
        {"id": "poems", "parent": "llama"},
        {"id": "also-llama", "parent": None, "max_model_len": 4096},
    ]
    facts = await facts_of(VLLM | {"/v1/models": {"data": cards}})
    assert (facts.models, facts.adapters) == (("llama", "also-llama"), ("poems",))


async def test_adapters_are_known_by_what_they_were_loaded_from():
    cards = [
        {"id": "llama", "root": "/models/llama"},
        {"id": "poems", "parent": "llama", "root": "/adapters/poems"},
        {"id": "prose", "parent": "llama"},
    ]
    facts = await facts_of(VLLM | {"/v1/models": {"data": cards}})
    assert facts.adapters == ("poems", "prose")
    assert facts.folders == (("poems", "/adapters/poems"),)


async def test_hits_of_a_hybrid_model_land_on_its_alignment():
    facts = await facts_of(
        vllm_metrics(
            (b'cache_hit_alignment_tokens="None"', b'cache_hit_alignment_tokens="1056"'),
            (b'effective_attention_block_size="32"', b'effective_attention_block_size="528"'),
        )
    )
    assert (facts.block_size, facts.reuse_tokens) == (528, 1056)


@pytest.mark.parametrize(
    ("version", "has_connector", "recomputed"),
    [
        ("0.32.0", False, 32),
        ("0.33.0", False, 0),
        ("0.33.0rc1", False, 0),
        ("1.0.0", False, 0),
        ("0.33.0", True, 32),
        ("dev", False, 32),
    ],
)
async def test_speculation_costs_vllm_the_last_block_of_a_hit_unless_hashes_look_ahead(
    version, has_connector, recomputed
):
    metrics = VLLM["/metrics"] + b'\nvllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    if has_connector:
        metrics += b'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 0.0\n'
    facts = await facts_of(VLLM | {"/metrics": metrics, "/version": {"version": version}})
    assert (facts.block_size, facts.recomputed_tokens) == (32, recomputed)
    assert facts.lookahead_tokens == (0 if recomputed else 1)


async def test_the_blocks_that_older_vllm_reports_belong_to_all_ranks():
    two = b'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0\n'
    answers = vllm_metrics(
        without_label(b"kv_cache_size_tokens"), without_label(b"effective_attention_block_size")
    )
    facts = await facts_of(answers | {"/metrics": answers["/metrics"] + two})
    assert (facts.block_size, facts.capacity_tokens) == (32, 32_768 * 32 // 2)


@pytest.mark.parametrize(("algorithm", "is_wrong"), [("sha256_cbor", False), ("xxhash", True)])
async def test_hashes_that_a_client_can_forge_are_a_finding(algorithm, is_wrong):
    told = b'prefix_caching_hash_algo="%s"'
    changed = (told % b"sha256", told % algorithm.encode())
    findings = (await facts_of(vllm_metrics(changed))).findings
    assert ["--prefix-caching-hash-algo" in one for one in findings] == [True] * is_wrong


async def test_flags_take_the_place_of_what_vllm_does_not_say():
    old = {"/version": {"version": "0.9.0"}}
    facts = await facts_of(
        old,
        EngineAgentSettings(
            engine_kind="vllm",
            events_endpoint=EVENTS,
            replay_endpoint="tcp://other:5657",
            engine_block_size=16,
            capacity_tokens=4096,
            data_parallel_size=2,
            model="llama",
        ),
    )
    assert facts.models == ("llama",)
    assert (facts.block_size, facts.reuse_tokens, facts.capacity_tokens) == (16, 16, 4096)
    assert (facts.max_model_len, facts.started_s) == (None, None)
    assert facts.sources == (
        EventSource(0, "tcp://127.0.0.1:5557", "tcp://other:5657"),
        EventSource(1, "tcp://127.0.0.1:5558", "tcp://other:5658"),
    )


async def test_flags_take_precedence_over_what_sglang_says():
    given = EngineAgentSettings(
        events_endpoint="tcp://other:9001", engine_block_size=64, data_parallel_size=1
    )
    facts = await facts_of(SGLANG, given)
    assert facts.block_size == 64
    assert facts.sources == (EventSource(0, "tcp://other:9001", None),)


async def test_sglang_before_it_described_its_publisher_is_known_by_its_settings():
    info = {
        name: value
        for name, value in SGLANG_INFO.items()
        if name not in ("kv_events", "internal_states")
    }
    info["kv_events_config"] = (
        '{"publisher":"zmq","endpoint":"tcp://*:6001","replay_endpoint":"tcp://*:6101"}'
    )
    answers = {"/get_server_info": info, "/v1/models": SGLANG["/v1/models"]}
    facts = await facts_of(answers, EngineAgentSettings(data_parallel_size=1))
    assert facts.block_size == 16
    assert facts.sources == (EventSource(0, "tcp://127.0.0.1:6001", "tcp://127.0.0.1:6101"),)


VLLM_EVENTS = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
)
SGLANG_EVENTS = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\''
)


@pytest.mark.parametrize(
    ("answers", "flag"),
    [
        (vllm_sources({"enable_kv_cache_events": False}), VLLM_EVENTS),
        (VLLM | {"/kv_event_sources": {}}, VLLM_EVENTS),
        (VLLM | {"/kv_event_sources": 404}, "--events-endpoint tcp://127.0.0.1:5557"),
        (sglang(kv_events=None), SGLANG_EVENTS),
        (vllm_sources({"endpoint": "tcp://127.0.0.1:5557"}), VLLM_EVENTS),
        (vllm_sources({"endpoint": "udp://*:5557"}), "tcp://HOST:PORT"),
        (vllm_metrics((b'_block_size="32"', b'_block_size="1"')), "--block-size 16"),
        (vllm_metrics((b'block_size="32"', b'block_size="-32"')), "--engine-block-size 16"),
        (VLLM | {"/metrics": b""}, "without --disable-log-stats"),
        (sglang(kv_events_config='{"endpoint":"tcp://10.0.0.1:5557"}'), SGLANG_EVENTS),
        (sglang(kv_events=SGLANG_INFO["kv_events"] | {"block_size": 1}), "--page-size 16"),
    ],
)
async def test_an_engine_that_publishes_nothing_is_known_and_says_what_would_make_it_exact(
    answers, flag
):
    facts = await facts_of(answers)
    assert facts.rung.trust is Trust.APPROXIMATE
    assert flag in facts.rung.trust_cause
    assert "\n" not in facts.rung.trust_cause
    assert {source.endpoint for source in facts.sources} == {""}
    told = await facts_of(VLLM if facts.kind == "vllm" else SGLANG)
    assert told.rung == TOP
    for name in ("models", "max_model_len"):
        assert getattr(facts, name) == getattr(told, name)


@pytest.mark.parametrize("answers", [VLLM, SGLANG])
async def test_an_agent_that_is_to_listen_to_nothing_does_not_listen(answers):
    facts = await facts_of(answers, EngineAgentSettings(events_endpoint="none"))
    assert facts.rung.trust is Trust.APPROXIMATE
    assert "take away --events-endpoint none" in facts.rung.trust_cause
    assert {source.endpoint for source in facts.sources} == {""}


NO_PREFIXES = (b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')


@pytest.mark.parametrize(
    ("answers", "flag"),
    [
        (vllm_metrics(NO_PREFIXES), "--enable-prefix-caching"),
        (vllm_metrics(NO_PREFIXES) | {"/kv_event_sources": {}}, "an encoder cannot"),
        (sglang(disable_radix_cache=True), "without --disable-radix-cache"),
        (sglang(disaggregation_mode="decode"), "--disaggregation-decode-enable-radix-cache"),
    ],
)
async def test_of_an_engine_that_caches_no_prefixes_load_alone_counts(answers, flag):
    facts = await facts_of(answers)
    assert facts.rung.trust is Trust.LOAD_ONLY
    assert flag in facts.rung.trust_cause
    assert {source.endpoint for source in facts.sources} == {""}


async def test_an_engine_that_does_not_say_how_much_it_holds_is_exact():
    silent = (without_label(b"kv_cache_size_tokens"), without_label(b"num_gpu_blocks"))
    for answers in (vllm_metrics(*silent), sglang(max_total_num_tokens=None)):
        facts = await facts_of(answers)
        assert (facts.rung, facts.capacity_tokens) == (TOP, 0)


@pytest.mark.parametrize("page_size", [1, None])
async def test_without_events_neither_block_size_nor_capacity_has_to_be_told(page_size):
    untold = VLLM | {"/metrics": b"", "/kv_event_sources": {}}
    info = sglang(kv_events=None, page_size=page_size, max_total_num_tokens=None)
    for answers in (untold, info):
        facts = await facts_of(answers)
        assert (facts.block_size, facts.capacity_tokens) == (16, 0)


MODELS = {"data": [{"id": "qwen", "object": "model", "owned_by": "llamacpp"}]}


@pytest.mark.parametrize("more", [{}, {"/version": {"version": "1.0"}}, {"/metrics": b"a 1\n"}])
async def test_any_other_server_of_that_api_is_an_engine(more):
    facts = await facts_of({"/v1/models": MODELS} | dict(more))
    assert (facts.kind, facts.version, facts.models) == ("openai", "llamacpp", ("qwen",))
    assert "--kv-events-config" in facts.rung.trust_cause
    assert facts.sources == (EventSource(0, "", None),)
    given = EngineAgentSettings(engine_kind="openai", capacity_tokens=4096, model="other")
    facts = await facts_of({}, given)
    assert (facts.models, facts.capacity_tokens) == (("other",), 4096)


@pytest.mark.parametrize(
    ("answers", "flag"),
    [
        (VLLM | {"/v1/models": {"data": []}}, "--model NAME"),
        (VLLM | {"/v1/models": 401}, "--engine-api-key"),
        ({}, "--model NAME"),
    ],
)
async def test_one_line_names_the_flag_that_is_missing(answers, flag):
    with pytest.raises(EngineUnfit) as raised:
        await facts_of(answers)
    assert flag in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "answers",
    [{"/version": 503}, VLLM | {"/metrics": 500}, SGLANG | {"/ready": 503}],
    ids=["starting", "failing", "warming up"],
)
async def test_an_engine_that_is_not_ready_may_be_asked_later(answers):
    with pytest.raises(EngineUnavailable):
        await facts_of(answers)


async def test_an_engine_that_refuses_connections_may_be_asked_later():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineUnavailable):
            await discover(session, f"http://{HOST}:{unused_port()}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[", "ftp://127.0.0.1"])
async def test_a_url_that_is_none_is_named(url):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineUnfit, match="--engine-url"):
            await discover(session, url)


async def test_a_body_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_ANSWER_BYTES", 100_000)
    async with serving({"/metrics": bytes(100_001)}) as (session, url):
        with pytest.raises(EngineUnavailable, match="100,000 bytes"):
            await EngineHttp(session, url).get("/metrics")


async def test_an_engine_that_does_not_answer_is_given_up():
    async with fake_engine() as engine, aiohttp.ClientSession() as session:
        engine.faults = Faults(metrics_s=HANG_S)
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await EngineHttp(session, engine.url, 0.05).get("/metrics")
