"""How fast the torch engine's model computes, with nothing around it; beside transformers' there.

    python -m loadtest.bench_forward --device cuda --json out/bench_forward.json

Prefill: tokens a second of one prompt, by the chunk that it is computed in. Decode: milliseconds of
a step, by sequences and their context; on a GPU also without graphs. transformers, where it is
installed, computes a model of the same shape with sdpa: the prompt at once, and steps of one
sequence.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from rich.console import Console

from loadtest.command import option, table
from loadtest.devices import BLOCK_SIZE, SIZES, device_option
from loadtest.harness import bench, in_turn
from workers.engines.torch.decode_graphs import Decode, decoder
from workers.engines.torch.llama import SIZES as MODELS
from workers.engines.torch.llama import Llama
from workers.kv.memory import MemoryPool

PROMPT_TOKENS = {"cpu": 512, "cuda": 8_192}
PREFILL_CHUNKS = {"cpu": (128, 256), "cuda": (256, 1_024, 2_048)}
DECODES = {
    "cpu": ((1, 256), (4, 256)),
    "cuda": ((1, 1_024), (16, 1_024), (64, 1_024), (64, 4_096)),
}
"""Sequences, and the tokens before each."""


def timed(call: Callable[[], Any], device: str, rounds: int) -> float:
    """Seconds of the median call; the first one, which finds the device cold, does not count."""

    def seconds() -> float:
        _wait(device)
        began_s = time.perf_counter()
        call()
        _wait(device)
        return time.perf_counter() - began_s

    return median(in_turn({"": seconds}, rounds)[""])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(device: str, rounds: int) -> dict[str, Any]:
    size = SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Llama.random(MODELS[size.model], seed=0, dtype=dtype, device=device)
    most = max(PROMPT_TOKENS[device], *(seqs * (context + 1) for seqs, context in DECODES[device]))
    num_blocks = most // BLOCK_SIZE + max(seqs for seqs, _ in DECODES[device])
    kv = [MemoryPool(model.kv_shape(BLOCK_SIZE), num_blocks, device).kv]
    tokens = [n % 1_000 for n in range(PROMPT_TOKENS[device])]

    def prefill(chunk: int) -> None:
        for start in range(0, len(tokens), chunk):
            model.prefill(kv, tokens[start : start + chunk], start, range(num_blocks))

    def decode(decode: Decode, seqs: int, context: int) -> None:
        each = context // BLOCK_SIZE + 1
        block_ids = [range(n * each, (n + 1) * each) for n in range(seqs)]
        decode([1] * seqs, [context] * seqs, block_ids).argmax(-1).tolist()

    ways = {"decode_ms": decoder(model, kv)}
    if device == "cuda":
        ways["decode_without_graphs_ms"] = partial(model.decode, kv)
    return {
        "prefill_tokens_per_s": {
            chunk: len(tokens) / timed(partial(prefill, chunk), device, rounds)
            for chunk in PREFILL_CHUNKS[device]
        },
        **{
            name: {
                f"{seqs}x{context}": timed(partial(decode, way, seqs, context), device, rounds)
                * 1e3
                for seqs, context in DECODES[device]
            }
            for name, way in ways.items()
        },
    }


@torch.inference_mode()
def theirs(device: str, rounds: int) -> dict[str, Any]:
    """The same of transformers' Llama."""
    import transformers  # heavy, and not everywhere

    c = MODELS[SIZES[device].model]
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_size,
        max_position_embeddings=c.max_position_embeddings,
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model.train(False)
    if device == "cuda":
        model.bfloat16()
    prompt = torch.arange(PROMPT_TOKENS[device], device=device)[None] % 1_000
    context = DECODES[device][0][1]
    cache = model(prompt[:, :context], use_cache=True, logits_to_keep=1).past_key_values
    return {
        "prefill_tokens_per_s": prompt.shape[1]
        / timed(lambda: model(prompt, use_cache=True, logits_to_keep=1), device, rounds),
        f"decode_ms_1x{context}": 1e3
        * timed(
            lambda: model(prompt[:, :1], past_key_values=cache, use_cache=True), device, rounds
        ),
    }


def measure(device: str, rounds: int) -> dict[str, Any]:
    found = {"device": device, "model": SIZES[device].model, "ours": ours(device, rounds)}
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    if find_spec("transformers") is not None:
        found["transformers"] = theirs(device, rounds)
    return found


def show(found: dict[str, Any], console: Console) -> None:
    cells = table(
        "", "ours", "transformers", left=("",), title=f"{found['model']}, {found['device']}"
    )
    other = found.get("transformers", {})
    for chunk, rate in found["ours"]["prefill_tokens_per_s"].items():
        cells.add_row(f"prefill in chunks of {chunk:,}, tokens/s", f"{rate:,.0f}", "")
    if other:
        whole = other["prefill_tokens_per_s"]
        cells.add_row("prefill at once, tokens/s", "", f"{whole:,.0f}")
    for name, ms in found["ours"]["decode_ms"].items():
        beside = other.get(f"decode_ms_{name}")
        cells.add_row(f"decode {name}, ms", f"{ms:.1f}", f"{beside:.1f}" if beside else "")
    for name, ms in found["ours"].get("decode_without_graphs_ms", {}).items():
        cells.add_row(f"decode {name} without graphs, ms", f"{ms:.1f}", "")
    console.print(cells)


main = bench(measure, show, device_option, option("--rounds", 5))

if __name__ == "__main__":
    main()
