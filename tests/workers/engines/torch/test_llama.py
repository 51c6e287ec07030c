import random
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app.core.errors import ConfigError
from tests.workers.engines.torch.checkpoints import reference
from tests.workers.kv.pools import joined
from workers.engines.torch.llama import SIZES, Llama, LlamaConfig, _rope_tables
from workers.kv.memory import MemoryPool

BLOCK_SIZE = 4
NUM_BLOCKS = 64
TINY = SIZES["tiny"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""It keeps some of the eight frequencies, scales some down fully, and some in part."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def logits_of(model, tokens):
    """(len(tokens), vocab_size)"""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def loaded(folder, device="cpu"):
    config = LlamaConfig.from_checkpoint(folder)
    return Llama.load(config, folder, dtype=torch.float32, device=device)


def pool_of(model):
    """A pool that is full of other sequences' values."""
    pool = MemoryPool(model.kv_shape(BLOCK_SIZE), NUM_BLOCKS, model.device)
    pool.kv.normal_(generator=torch.Generator(model.device).manual_seed(5))
    return pool


def prompt(length, vocab_size, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def slots(*lengths, seed=0):
    """Blocks for sequences of these numbers of tokens, all different and in random order."""
    free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def prefilled(model, kv, tokens, chunks, block_ids):
    """The logits at the end of each chunk; the chunks may end before the tokens do."""
    ends = [sum(chunks[: n + 1]) for n in range(len(chunks))]
    return [
        model.prefill([kv], tokens[end - size : end], end - size, block_ids)
        for end, size in zip(ends, chunks, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6, "head_dim": None},
        {"num_key_value_heads": 1, "rms_norm_eps": 0.01},
        {"rope_parameters": LLAMA3},
    ],
    ids=["GQA", "tied", "MHA", "MQA", "llama3"],
)
def test_logits_match_those_of_transformers_at_every_position(settings, device, tmp_path):
    model = reference(**settings)
    model.save_pretrained(tmp_path)
    ours = loaded(tmp_path, device)
    kv = pool_of(ours).kv
    tokens = [prompt(length, 96, seed=length) for length in (70, 23, 41, 9)]
    blocks = slots(*map(len, tokens))
    expected = [logits_of(model, of_one).to(device) for of_one in tokens]
    prefills = [[1, 31, 9], [5, 1], [3, 4, 8], [2]]
    for of_one, chunks, block_ids, logits in zip(tokens, prefills, blocks, expected, strict=True):
        ends = [sum(chunks[: n + 1]) - 1 for n in range(len(chunks))]
        torch.testing.assert_close(
            torch.stack(prefilled(ours, kv, of_one, chunks, block_ids)),
            logits[ends],
            rtol=0,
            atol=1e-4,
        )
    at = [sum(chunks) for chunks in prefills]
    while unfinished := [n for n in range(len(tokens)) if at[n] < len(tokens[n])]:
        torch.testing.assert_close(
            ours.decode(
                [kv],
                [tokens[n][at[n]] for n in unfinished],
                [at[n] for n in unfinished],
                [blocks[n] for n in unfinished],
            ),
            torch.stack([expected[n][at[n]] for n in unfinished]),
            rtol=0,
            atol=1e-4,
        )
        for n in unfinished:
            at[n] += 1


@pytest.mark.parametrize("size", ["40m", "llama-3.2-1b", "llama-3.1-8b"])
def test_rope_angles_equal_those_of_transformers_bit_for_bit_at_every_position(size):
    """Exact equality, as the position multiplies any error of a frequency."""
    # Here, as it takes a second, and every test process loads this file.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = SIZES[size]
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **asdict(config.rope_scaling)}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            head_dim=config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
        )
    )
    positions = torch.arange(config.max_position_embeddings)[None]
    for ours, expected in zip(_rope_tables(config), theirs(torch.zeros(1), positions), strict=True):
        assert torch.equal(ours, expected[0, :, : config.head_size // 2])


@st.composite
def splits(draw):
    return draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))


@settings(max_examples=30)
@given(splits(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_chunk_is_bit_for_bit_the_same_wherever_its_blocks_are(chunks, num_reused, rng):
    """Even if the chunks before it were computed in other blocks and copied."""
    num_reused = min(num_reused, len(chunks) - 1)
    model = Llama.random(TINY, seed=1, dtype=torch.float32, device="cpu")
    tokens = [rng.randrange(TINY.vocab_size) for _ in range(sum(chunks))]
    here, there = pool_of(model), pool_of(model)
    there.kv.mul_(-1)
    block_ids, [other_ids] = slots(len(tokens))[0], slots(len(tokens), seed=rng.randrange(999))
    logits = prefilled(model, here.kv, tokens, chunks, block_ids)

    start = sum(chunks[:num_reused])
    num_blocks = -(-start // BLOCK_SIZE)
    there.kv[other_ids[:num_blocks]] = here.kv[block_ids[:num_blocks]]
    for size, expected in zip(chunks[num_reused:], logits[num_reused:], strict=True):
        assert torch.equal(
            model.prefill([there.kv], tokens[start : start + size], start, other_ids), expected
        )
        start += size
    for pool, ids in ((here, block_ids), (there, other_ids)):
        pool.kv[ids[-1], :, :, (len(tokens) - 1) % BLOCK_SIZE + 1 :] = 0
    assert torch.equal(there.kv[other_ids], here.kv[block_ids])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prefill_is_bit_for_bit_the_same_in_other_slots(dtype, device):
    model = Llama.random(replace(SIZES["40m"], num_layers=2), seed=1, dtype=dtype, device=device)
    tokens = prompt(700, 16_384)
    here, there = (MemoryPool(model.kv_shape(16), 64, device).kv for _ in range(2))
    block_ids, other_ids = (random.Random(seed).sample(range(64), 44) for seed in (1, 2))
    logits = prefilled(model, here, tokens, [256, 256, 188], block_ids)
    there[other_ids[:32]] = here[block_ids[:32]]
    assert torch.equal(model.prefill([there], tokens[512:], 512, other_ids), logits[-1])
    assert torch.equal(there[other_ids], here[block_ids])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_logits_and_kv_are_bit_for_bit_the_same_however_the_heads_are_split(tp_size, dtype, device):
    model = Llama.random(replace(TINY, num_kv_heads=4), seed=1, dtype=dtype, device=device)
    whole = [pool_of(model)]
    ranks = [
        MemoryPool(rank, NUM_BLOCKS, device) for rank in model.kv_shape(BLOCK_SIZE).split(tp_size)
    ]
    blocks = slots(90, 12)
    logits = []
    for pools in (whole, ranks):
        kv = [pool.kv for pool in pools]
        found = []
        for length, own in zip((89, 11), blocks, strict=True):
            tokens = prompt(length, 256, seed=length)
            # Kernels depend on the number of tokens and heads, above all with few of both.
            for start in (0, 3, 10):
                stop = {0: 3, 3: 10}.get(start, length)
                found.append(model.prefill(kv, tokens[start:stop], start, own))
        found.append(model.decode(kv, [7, 8], [89, 11], blocks))
        logits.append(found)
    assert all(map(torch.equal, *logits))
    written = [*blocks[0][:-1], *blocks[1][:-1]]
    assert torch.equal(whole[0].kv[written], joined(ranks)[written])


def test_only_the_sequences_own_blocks_are_written():
    model = Llama.random(TINY, seed=1, dtype=torch.float32, device="cpu")
    pool = pool_of(model)
    before = pool.kv.clone()
    [block_ids, others] = slots(11, 4 * (NUM_BLOCKS - 3))
    model.prefill([pool.kv], prompt(10, 256), 0, block_ids)
    model.decode([pool.kv], [3], [10], [block_ids])
    assert torch.equal(pool.kv[others], before[others])
    assert torch.equal(pool.kv[block_ids[-1], :, :, 3:], before[block_ids[-1], :, :, 3:])


def test_earlier_content_of_the_pool_does_not_matter():
    """Neither values after a sequence's last token nor NaNs in other blocks affect the logits."""
    model = Llama.random(TINY, seed=1, dtype=torch.float32, device="cpu")
    one, other = pool_of(model), pool_of(model)
    blocks = slots(38, 34, seed=1)
    other.kv[[b for b in range(NUM_BLOCKS) if b not in blocks[0] + blocks[1]]] = torch.nan
    other.kv[[blocks[0][-1], blocks[1][-1]]] *= 100
    logits = []
    for pool in (one, other):
        for length, block_ids in zip((37, 33), blocks, strict=True):
            model.prefill([pool.kv], prompt(length, 256), 0, block_ids)
        logits.append(model.decode([pool.kv], [9, 9], [37, 33], blocks))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_that_overflows_does_not_affect_the_next_owner_of_its_blocks(dtype, device):
    config = replace(TINY, tie_word_embeddings=False)
    model = Llama.random(config, seed=1, dtype=dtype, device=device)
    model._embedding[5] = torch.inf
    fresh, used = (MemoryPool(model.kv_shape(BLOCK_SIZE), 2, device).kv for _ in range(2))
    assert model.prefill([used], [1, 2, 3, 5, 5, 5, 5, 5], 0, [0, 1]).isnan().all()
    logits = []
    for kv in (fresh, used):
        model.prefill([kv], [6, 7, 8, 9, 10], 0, [0, 1])
        logits.append(model.decode([kv], [11], [5], [[0, 1]]))
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])


def test_a_sequence_decodes_the_same_with_much_longer_and_shorter_ones_in_its_batch():
    model = Llama.random(TINY, seed=1, dtype=torch.float32, device="cpu")
    kv = pool_of(model).kv
    lengths = [120, 5, 33, 1, 17]
    blocks = slots(*(length + 1 for length in lengths))
    for length, block_ids in zip(lengths, blocks, strict=True):
        model.prefill([kv], prompt(length, 256, seed=length), 0, block_ids)
    together = model.decode([kv], [1, 2, 3, 4, 5], lengths, blocks)
    for n, length in enumerate(lengths):
        alone = model.decode([kv], [n + 1], [length], [blocks[n]])
        torch.testing.assert_close(together[n], alone[0], rtol=0, atol=1e-5)
        again = model.prefill([kv], [n + 1], length, blocks[n])
        torch.testing.assert_close(together[n], again, rtol=0, atol=1e-5)


def test_with_random_weights_the_logits_depend_on_the_whole_context():
    model = Llama.random(TINY, seed=1, dtype=torch.float32, device="cpu")
    kv = pool_of(model).kv
    [block_ids] = slots(50)
    tokens = prompt(50, 256)
    logits = model.prefill([kv], tokens, 0, block_ids)
    other = model.prefill([kv], [tokens[0] ^ 1, *tokens[1:]], 0, block_ids)
    assert (logits - other).abs().max() > 0.01


def test_the_same_seed_gives_the_same_weights():
    def logits(seed):
        model = Llama.random(TINY, seed=seed, dtype=torch.float32, device="cpu")
        return model.prefill([pool_of(model).kv], [1, 2, 3], 0, [0])

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_a_checkpoint_may_come_in_shards(tmp_path):
    model = reference()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = loaded(tmp_path)
    logits = ours.prefill([pool_of(ours).kv], [5, 6, 7], 0, [0])
    torch.testing.assert_close(logits, logits_of(model, [5, 6, 7])[-1], rtol=0, atol=1e-4)


def test_redundant_tensors_of_a_checkpoint_are_ignored(tmp_path):
    model = reference(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path)
    loaded(tmp_path)


def without(name):
    return lambda tensors: tensors.__delitem__(name)


def with_tensor(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (without("model.norm.weight"), r"missing: model\.norm\.weight"),
        (
            with_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(96)),
            r"model\.layers\.0\.self_attn\.q_proj\.bias is not in the model",
        ),
        (
            with_tensor("model.layers.1.mlp.up_proj.weight", torch.ones(81, 48)),
            r"up_proj\.weight is \(81, 48\), but the model has \(80, 48\)",
        ),
        (
            with_tensor("model.norm.weight", torch.ones(48, dtype=torch.int8)),
            r"model\.norm\.weight is torch\.int8",
        ),
    ],
    ids=["missing", "unexpected", "wrong shape", "quantised"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(spoil, complaint, tmp_path):
    reference().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        loaded(tmp_path)


def test_weights_that_cannot_be_read_are_refused(tmp_path):
    reference().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        loaded(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        loaded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{}", '{"weight_map": {"model.norm.weight": 5}}'):
        index.write_text(text)
        with pytest.raises(ConfigError, match="has no weight_map"):
            loaded(tmp_path)


def test_cudnn_attention_which_is_planned_for_each_length_is_not_used():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Llama(TINY, dtype=torch.bfloat16, device="cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_kv_of_a_model_fits_its_pool():
    model = Llama.random(TINY, seed=1, dtype=torch.bfloat16, device="cpu")
    shape = model.kv_shape(16)
    assert (shape.num_layers, *shape.layer_shape) == (2, 2, 16, 2, 16)
    assert shape.dtype is torch.bfloat16


def test_prefill_and_decode_do_not_synchronise_with_the_device():
    """Tensors on the meta device have no values to read, so that a synchronisation would fail."""
    model = Llama(TINY, dtype=torch.float32, device="meta")
    shape = model.kv_shape(BLOCK_SIZE)
    kv = torch.empty(NUM_BLOCKS, shape.num_layers, *shape.layer_shape, device="meta")
    [block_ids] = slots(20)
    for start in (0, 9):
        assert model.prefill([kv], prompt(9, 256), start, block_ids).shape == (256,)
    assert model.decode([kv], [1, 2], [18, 3], [block_ids, block_ids]).shape == (2, 256)
