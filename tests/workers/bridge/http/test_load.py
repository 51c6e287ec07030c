"""What is read of an engine's load."""

import pytest

from app.core.errors import EngineUnavailable
from tests.fakes.facts import SGLANG, VLLM, vllm_metrics
from tests.workers.bridge.http.conftest import engine_of
from workers.bridge.http.facts import EngineLoad
from workers.bridge.http.load import LoadReader, SamplePattern

LOADS = {
    "dp_rank": 1,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "token_usage": 0.25,
    "cache_hit_rate": 0.5,
    "total_prefill_uncached_tokens": 6000,
    "total_prefill_busy_us": 1_500_000,
    "decode_moments": [100.0, 300.0, 900_000.0, 1000.0, 2_900_000.0, 300.0],
}
SGLANG_METRICS = b"""
sglang:num_running_reqs{model_name="llama",tp_rank="0",dp_rank="1"} 4.0
sglang:num_running_reqs{model_name="llama",tp_rank="1",dp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="llama",tp_rank="0",dp_rank="1"} 1.0
sglang:token_usage{model_name="llama",tp_rank="0",dp_rank="1"} 0.5
sglang:cache_hit_rate{model_name="llama",tp_rank="0",dp_rank="1"} 0.125
"""


async def reading(kind, answers):
    async with engine_of(answers) as engine:
        return await LoadReader(engine, kind).read()


async def load_of(kind, answers, rank=0):
    return (await reading(kind, answers)).loads[rank]


def idle_sums(total, count):
    name = "vllm:kv_block_idle_before_evict_seconds"
    return f'\n{name}_sum{{engine="0"}} {total}\n{name}_count{{engine="0"}} {count}\n'.encode()


async def test_vllm_says_how_busy_it_is_and_what_its_speed_is_learned_from():
    found = await reading("vllm", VLLM)
    assert found.started_s == 1795479223.91
    assert found.loads == {
        0: EngineLoad(
            hit_rate=96 / 296,
            prompt_tokens=296,
            cached_tokens=96,
            first_tokens=3,
            generated_tokens=44,
            finished_requests=3,
            prefills=3,
            prefill_s=0.12566781800160243,
            prefill_prompt_tokens=296,
            prefill_computed_tokens=200,
            inter_tokens=41,
            inter_token_s=0.14084797999930743,
            steps=44,
            transferred_tokens=0,
        )
    }


async def test_each_rank_has_its_own_load():
    second = b'vllm:num_requests_running{engine="1",model_name="tiny"} 7.0\n'
    found = await reading("vllm", VLLM | {"/metrics": VLLM["/metrics"] + second})
    assert {rank: load.running for rank, load in found.loads.items()} == {0: 0, 1: 7}


async def test_the_names_of_older_vllm_mean_the_same():
    old = vllm_metrics(
        (b"vllm:kv_cache_usage_perc{", b"vllm:gpu_cache_usage_perc{"),
        (b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds"),
        (b"vllm:prompt_tokens_cached_total", b"vllm:not_yet_counted"),
    )
    assert await load_of("vllm", old) == await load_of("vllm", VLLM)


async def test_without_a_count_of_computed_tokens_they_are_those_that_were_not_cached():
    old = vllm_metrics((b"vllm:request_prefill_kv_computed_tokens", b"vllm:not_yet_counted"))
    assert (await load_of("vllm", old)).prefill_computed_tokens == 296 - 96


@pytest.mark.parametrize("state", [b"weights_offloaded", b"discard_all"])
async def test_an_engine_that_sleeps_says_so(state):
    line = b'sleep_state="%b"} %b\n'
    sleeping = vllm_metrics(
        (line % (b"awake", b"1.0"), line % (b"awake", b"0.0")),
        (line % (state, b"0.0"), line % (state, b"1.0")),
    )
    assert (await load_of("vllm", sleeping)).sleeps
    assert not (await load_of("vllm", VLLM)).sleeps


async def test_idle_times_are_of_what_came_since_the_last_reading_and_hits_of_the_last_ones():
    answers = dict(VLLM)
    async with engine_of(answers) as engine:
        reader = LoadReader(engine, "vllm")
        answers["/metrics"] = VLLM["/metrics"] + idle_sums(100.0, 10)
        first = (await reader.read()).loads[0]
        answers["/metrics"] = vllm_metrics(
            (b'prompt_tokens_total{engine="0",model_name="tiny"} 296', b"prompt_tokens_total 496"),
            (
                b'prompt_tokens_cached_total{engine="0",model_name="tiny"} 96',
                b"prompt_tokens_cached_total 246",
            ),
        )["/metrics"] + idle_sums(160.0, 12)
        second = (await reader.read()).loads[0]
        third = (await reader.read()).loads[0]
    assert (first.hit_rate, first.kv_idle_before_evict_s) == (96 / 296, 10.0)
    assert (second.hit_rate, second.kv_idle_before_evict_s) == (246 / 496, 30.0)
    assert third == second


async def test_after_a_restart_of_the_engine_means_begin_anew():
    answers = dict(VLLM)
    async with engine_of(answers) as engine:
        reader = LoadReader(engine, "vllm")
        answers["/metrics"] = VLLM["/metrics"] + idle_sums(100.0, 10)
        await reader.read()
        answers["/metrics"] = VLLM["/metrics"] + idle_sums(8.0, 4)
        assert (await reader.read()).loads[0].kv_idle_before_evict_s == 2.0


async def test_an_engine_without_statistics_says_nothing():
    assert (await reading("vllm", {"/metrics": b"process_open_fds 3\n"})).loads == {}
    assert (await reading("vllm", {})).loads == {}


async def test_sglang_counts_the_time_of_its_steps_itself():
    found = await reading("sglang", SGLANG | {"/v1/loads": {"loads": [LOADS]}})
    assert found.loads == {
        1: EngineLoad(
            running=3,
            waiting=2,
            kv_usage=0.25,
            hit_rate=0.5,
            prefill_busy_s=1.5,
            busy_tokens=6000,
            inter_tokens=300,
            inter_token_s=2.9,
            steps=100,
        )
    }


async def test_sglang_before_its_counters_says_how_busy_it_is():
    old = {name: LOADS[name] for name in ("dp_rank", "num_running_reqs", "num_waiting_reqs")}
    answers = SGLANG | {"/v1/loads": {"loads": [old | {"token_usage": 0.5}]}}
    assert await load_of("sglang", answers, 1) == EngineLoad(3, 2, 0.5)


async def test_sglang_without_loads_is_read_from_its_metrics():
    answers = SGLANG | {"/metrics": SGLANG_METRICS}
    assert await load_of("sglang", answers, 1) == EngineLoad(4, 1, 0.5, hit_rate=0.125)


async def test_an_answer_that_makes_no_sense_is_no_load():
    with pytest.raises(EngineUnavailable):
        await reading("sglang", SGLANG | {"/v1/loads": {"loads": [{"dp_rank": 0}]}})


def test_only_whole_names_are_found_and_only_numbers():
    text = b"""
# HELP vllm:a the name of a
vllm:ab{engine="0"} 1.0
vllm:a_total 2.0
vllm:a{engine="1",text="a \\"b\\", }"} 3.0
xvllm:a 4.0
vllm:a NaN
vllm:a +Inf
vllm:a{engine="2"} five
vllm:a 6 1700000000
"""
    found = [(sample.labels, sample.value) for sample in SamplePattern(["vllm:a"]).samples(text)]
    assert found == [({"engine": "1", "text": 'a \\"b\\", }'}, 3.0), ({}, 6.0)]


async def test_what_came_from_another_engine_was_not_computed():
    """vLLM counts all that was not cached as computed, and so would seem quick."""
    more = b"""
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 1000
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 40
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 960
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
vllm:nixl_xfer_time_seconds_count{engine="0"} 2
"""
    load = await load_of("vllm", {"/metrics": more})
    assert load.prefill_computed_tokens == 40
    assert (load.kv_transfers, load.transfer_s, load.transferred_tokens) == (2, 0.5, 960)
    nothing_came = more.replace(b" 960", b" 0")
    load = await load_of("vllm", {"/metrics": nothing_came})
    assert load.prefill_computed_tokens == 1000


async def test_answers_of_one_token_are_not_counted_where_kv_travels():
    """Such a worker computes prompts for others, with answers that say nothing of its own."""
    more = b"""
vllm:generation_tokens_total{engine="0"} 1007
vllm:request_success_total{engine="0",finished_reason="length"} 7
vllm:request_success_total{engine="0",finished_reason="stop"} 10
vllm:request_generation_tokens_bucket{engine="0",le="1.0"} 7
vllm:request_generation_tokens_bucket{engine="0",le="200.0"} 17
"""
    load = await load_of("vllm", {"/metrics": more})
    assert (load.finished_requests, load.generated_tokens) == (17, 1007)
    nixl = b'vllm:nixl_xfer_time_seconds_count{engine="0"} 0\n'
    load = await load_of("vllm", {"/metrics": more + nixl})
    assert (load.finished_requests, load.generated_tokens) == (10, 1000)
