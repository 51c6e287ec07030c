import pytest
import torch

from app.core.errors import ConfigError
from app.core.settings.worker import WorkerSettings
from workers.engines.torch import chunks
from workers.engines.torch.chunks import CHUNKS, chunk_of, found_chunk, with_chunk
from workers.engines.torch.llama import SIZES, Llama, LlamaConfig

SMALLEST = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=8,
    max_position_embeddings=max(CHUNKS),
)
MODEL = Llama.random(SMALLEST, seed=0, dtype=torch.float32, device="cpu")


def clock(rates, rounds=4):
    """Of prefills that compute so many tokens a second, with each chunk in turn."""
    now_s = 0.0
    for chunk, rate in zip(CHUNKS, rates, strict=True):
        for _ in range(rounds):
            yield now_s
            now_s += chunk / rate
            yield now_s


@pytest.mark.parametrize(
    ("rates", "chunk"),
    [
        ((10_640, 16_000, 21_118, 21_763), 1024),
        ((5_000, 5_000, 5_000, 5_000), 256),
        ((1_000, 2_000, 4_000, 8_000), 2048),
    ],
)
def test_the_smallest_chunk_that_is_nearly_the_fastest_is_found(rates, chunk):
    ticks = clock(rates)
    assert found_chunk(MODEL, 16, lambda: next(ticks)) == chunk


def test_a_cpu_computes_256_tokens_at_a_time_unless_told_otherwise():
    settings = WorkerSettings(engine="torch")
    assert settings.prefill_chunk is None
    assert with_chunk(settings, MODEL) == chunk_of(settings) == 256
    assert with_chunk(WorkerSettings(engine="torch", prefill_chunk=512), MODEL) == 512


@pytest.mark.parametrize("error", [ConfigError("no room"), torch.cuda.OutOfMemoryError("none")])
def test_a_gpu_with_no_memory_for_a_trial_computes_256_tokens_at_a_time(error, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(chunks, "found_chunk", fails)
    monkeypatch.setattr(MODEL, "device", torch.device("cuda"))
    assert with_chunk(WorkerSettings(engine="torch"), MODEL) == 256


@pytest.mark.gpu
def test_a_chunk_is_found_on_a_gpu():
    model = Llama.random(SIZES["tiny"], seed=0, dtype=torch.bfloat16, device="cuda")
    assert with_chunk(WorkerSettings(engine="torch"), model) in CHUNKS
