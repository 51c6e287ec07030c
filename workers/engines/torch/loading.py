"""Loading of a torch engine by a worker's settings."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from app.core.errors import ConfigError
from app.core.settings.worker import WorkerSettings
from workers.engines.base import Engine, HostedEngine
from workers.engines.torch.engine import TorchEngine
from workers.engines.torch.llama import SIZES, Llama, LlamaConfig
from workers.engines.torch.tiers import fingerprint_of, identity_of, open_tiers
from workers.engines.torch.tokenizer import FileTokenizer
from workers.kv.cache import EventSink
from workers.kv.transfer.kv_lease import KvPort, open_kv_port

log = logging.getLogger(__name__)

SPARE = 8
"""Slots of a tier for each one that is kept free, for requests and stores from the tier above."""
CHUNKS = {"cpu": 256, "cuda": 1024}
"""Tokens of a chunk by kind of device: a CPU computes longer ones no faster; an H100 reaches 97 %
of its best rate with 1,024, and 49 % with 256."""
WEIGHTS_SEED = 0
"""Seed of random weights, by which all workers of a named size compute the same model."""


def load(settings: WorkerSettings) -> HostedEngine:
    """Returns an engine that is ready to start. Raises ConfigError for a bad setting."""
    if bool(settings.disk_pool_tokens) != bool(settings.disk_folder):
        raise ConfigError(
            f"disk_folder and disk_pool_tokens must be set together, got {settings.disk_folder!r} "
            f"and {settings.disk_pool_tokens}"
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = _device(settings.device)
    chunk = settings.prefill_chunk or CHUNKS[device.type]
    if chunk % settings.block_size:
        raise ConfigError(
            f"prefill_chunk: needs a multiple of block_size {settings.block_size}, got {chunk}"
        )
    settings = replace(settings, prefill_chunk=chunk)
    dtype = _dtype(settings.dtype, device)
    started = time.perf_counter()
    try:
        model, tokenizer, identity = _model(settings.model, dtype, device)
    except RuntimeError as error:
        raise ConfigError(
            f"model: {settings.model!r} cannot be loaded on {device}: {_first_line(error)}"
        ) from error
    log.info(
        "model %s, %s on %s: loaded in %.1f s",
        settings.model,
        str(dtype).removeprefix("torch."),
        device,
        time.perf_counter() - started,
    )
    return _with_tiers(settings, chunk, model, tokenizer, identity)


def _model(
    name: str, dtype: torch.dtype, device: torch.device
) -> tuple[Llama, FileTokenizer | None, str]:
    """Returns a model by folder or size, and what identifies it. Raises RuntimeError: no room."""
    if name in SIZES:
        model = Llama.random(SIZES[name], seed=WEIGHTS_SEED, dtype=dtype, device=device)
        return model, None, name
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"model: {name!r} is neither a folder nor one of the sizes {', '.join(SIZES)}"
        )
    model = Llama.load(LlamaConfig.from_checkpoint(folder), folder, dtype=dtype, device=device)
    has_text = (folder / "tokenizer.json").exists()
    return model, FileTokenizer.from_folder(folder) if has_text else None, identity_of(folder)


def _with_tiers(
    settings: WorkerSettings,
    chunk: int,
    model: Llama,
    tokenizer: FileTokenizer | None,
    identity: str,
) -> HostedEngine:
    with ExitStack() as stack:
        tiers = open_tiers(settings, model, identity, stack)
        link = _link(settings, model, stack) if settings.kv_transfer else None
        kept = stack.pop_all()

    def start(publisher: EventSink) -> Engine:
        return TorchEngine(
            model,
            tiers.pools,
            tiers.manager,
            tiers.carry_out,
            publisher,
            chunk_tokens=chunk,
            spare={tier: -(-number // SPARE) for tier, number in tiers.num_blocks.items()},
            max_num_seqs=settings.max_num_seqs,
            link=link,
        )

    gpu = None if model.device.type == "cpu" else model.device.index or 0
    return HostedEngine(
        settings.model,
        tiers.num_blocks,
        start,
        kept.close,
        tokenizer,
        gpu,
        settings.model if tokenizer is not None else "",
        kv_kind=link.kind if link is not None else {},
    )


def _link(settings: WorkerSettings, model: Llama, stack: ExitStack) -> KvPort:
    """Opens the port where other workers that compute the same bits may fetch KV."""
    weights = f"{model.checksum():016x}"
    shape = model.kv_shape(settings.block_size)
    computed = fingerprint_of(settings, model, shape, weights)
    kind = {"weights": weights, "blocks": str(shape), "computed": f"{computed:016x}"}
    return open_kv_port(settings, kind, stack)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # AssertionError: torch without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {name!r} cannot be used: {_first_line(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: needs auto, cpu, cuda or cuda:N, got {name!r}")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _first_line(error: Exception) -> str:
    """Returns the first line of torch's message, which a C++ stack often follows."""
    return str(error).partition("\n")[0]
