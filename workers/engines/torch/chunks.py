"""Sizes of the chunks in which prompts are computed: as set, by default, or found by a trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from app.core.errors import ConfigError
from app.core.settings.worker import WorkerSettings
from workers.engines.torch.llama import Llama
from workers.kv.memory import KVShape, MemoryPool

log = logging.getLogger(__name__)

CHUNK = 256
"""Tokens of a chunk on a CPU, which computes longer ones no faster."""
CHUNKS = 256, 512, 1024, 2048
"""Tokens of chunks that are tried on a GPU."""
ENOUGH = 0.9
"""Share of the best rate that suffices: with the smallest such chunk, most is reused."""
TRIAL_ROUNDS = 3


def chunk_of(settings: WorkerSettings) -> int:
    return settings.prefill_chunk or CHUNK


def found_chunk(
    model: Llama, block_size: int, seconds: Callable[[], float] = time.perf_counter
) -> int:
    """Returns the smallest of CHUNKS that prefills at nearly the best rate on the model's device.

    seconds: a clock that has waited for the device.
    """
    most = min(max(CHUNKS), model.config.max_position_embeddings)
    pool = MemoryPool(model.kv_shape(block_size), -(-most // block_size), model.device)
    block_ids = range(pool.num_blocks)
    rates = {}
    for chunk in (size for size in CHUNKS if size <= most):
        best_s = float("inf")
        for _ in range(1 + TRIAL_ROUNDS):  # the first one finds the device cold
            began_s = seconds()
            model.prefill([pool.kv], [0] * chunk, 0, block_ids).cpu()
            best_s = min(best_s, seconds() - began_s)
        rates[chunk] = chunk / best_s
    enough = ENOUGH * max(rates.values(), default=0.0)
    chosen = next((chunk for chunk, rate in rates.items() if rate >= enough), CHUNK)
    tried = ", ".join(f"{chunk}: {rate:,.0f}" for chunk, rate in rates.items())
    log.info("prefill_chunk: %d; tokens a second with each: %s", chosen, tried)
    return chosen


def with_chunk(settings: WorkerSettings, model: Llama) -> int:
    """Returns the tokens of a chunk: as set, else what a trial finds on a GPU."""
    if settings.prefill_chunk is None and model.device.type == "cuda":
        try:
            return found_chunk(model, settings.block_size)
        except (torch.cuda.OutOfMemoryError, ConfigError):  # one is of the trial's pool
            log.warning("prefill_chunk: no memory for a trial; %d", CHUNK)
    return chunk_of(settings)


def identity_of(folder: Path) -> str:
    """Returns a text that changes whenever files of a checkpoint do."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def fingerprint_of(settings: WorkerSettings, model: Llama, shape: KVShape, identity: str) -> int:
    """Returns a hash of everything that decides which bits a block of KV has."""
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else str(model.device)
    computed = (
        *(version("kvroute"), torch.__version__, torch.backends.cpu.get_cpu_capability()),
        *(device, torch.get_num_threads(), chunk_of(settings)),
    )
    return xxh3_64_intdigest(repr((identity, model.config, computed)).encode(), shape.fingerprint)
