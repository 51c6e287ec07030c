"""Real vLLM of other kinds than one with attention over all of a prompt: see `make test-vllm`."""

import random

import pytest

from tests.engines.vllm_server import ANSWER_S, BLOCK, MODEL, behind_a_door
from tests.eventually import eventually

PROMPTS, CACHE_BLOCKS = 300, 600

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
HYBRIDS = {
    "windows": TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "states": TINY
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "conv_L_cache": 3,
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "num_heads": 4,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
}
ENCODER = TINY | {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


async def held(door, prompt):
    """Blocks that the router states, and how surely, once two looks agree: vLLM publishes from a
    thread of its own."""
    asked, last = {"token_ids": prompt, "reserve": False}, (-1, "")

    async def look():
        nonlocal last
        answer = (await door.post("/v1/route", json=asked)).json()
        before, last = last, (sum(answer["overlap_blocks"].values()), answer["trust"])
        return before == last

    await eventually(look)
    return last


async def worker_of(door):
    [worker] = (await door.get("/v1/workers")).json()["workers"]
    return dict(worker)


@pytest.mark.parametrize("kind", HYBRIDS)
async def test_of_a_hybrid_no_more_is_stated_than_it_has_cached_and_hardly_less(
    one_redis_server, tmp_path, kind
):
    rng = random.Random(7)
    prefixes = [[rng.randrange(5, 400) for _ in range(30 * n)] for n in range(2, 32)]
    url = one_redis_server.url
    async with behind_a_door(url, tmp_path, config=HYBRIDS[kind], blocks=CACHE_BLOCKS) as clients:
        door, direct = clients
        stated, cached, computed = [0], [0], 0
        for _ in range(PROMPTS):
            begun = rng.choice(prefixes)
            prompt = begun[: rng.choice([len(begun), len(begun), rng.randrange(len(begun))])]
            prompt = prompt + [rng.randrange(5, 400) for _ in range(rng.choice([1, 17, 40, 100]))]
            blocks, trust = await held(door, prompt)
            assert trust in ("exact", "bound")
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
            answer = await direct.post("/v1/completions", json=body)
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            stated.append(blocks * BLOCK)
            cached.append(details.get("cached_tokens") or 0)
            computed += len(prompt) - cached[-1]
            assert stated[-1] <= cached[-1], (len(prompt), stated[-1], cached[-1])
        assert computed > 2 * CACHE_BLOCKS * BLOCK  # so that it was filled, again and again
        assert sum(stated) >= 0.99 * sum(cached) > 0
        assert (await worker_of(door))["trust"] == "exact"


async def test_an_encoder_serves_and_its_load_alone_counts(one_redis_server, tmp_path):
    more = ("--runner", "pooling", "--no-enable-chunked-prefill")
    async with behind_a_door(one_redis_server.url, tmp_path, more=more, config=ENCODER) as clients:
        door, _ = clients
        worker = await worker_of(door)
        assert worker["trust"] == "load_only"
        assert "an encoder cannot" in worker["trust_cause"]
        asked = {"model": MODEL, "input": "the quick brown fox " * 40}
        for _ in range(3):
            answer = await door.post("/v1/embeddings", json=asked, timeout=ANSWER_S)
            assert answer.status_code == 200, answer.text
        assert await held(door, list(range(100, 300))) == (0, "load_only")


async def test_without_prefix_caching_nothing_is_said_to_be_cached(one_redis_server, tmp_path):
    more = ("--no-enable-prefix-caching",)
    async with behind_a_door(one_redis_server.url, tmp_path, more=more) as (door, _):
        body = {"model": MODEL, "prompt": list(range(5, 305)), "max_tokens": 2}
        for _ in range(3):
            answer = await door.post("/v1/completions", json=body, timeout=ANSWER_S)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvroute-trust"] == "load_only"
            assert answer.headers["x-kvroute-overlap"].startswith("0/")
            assert not (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
