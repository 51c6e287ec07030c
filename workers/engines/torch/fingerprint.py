"""Which KV has the same bits: what decides them, as one number."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from app.core.settings.worker import WorkerSettings
from workers.engines.torch.chunks import chunk_of
from workers.engines.torch.llama import Llama
from workers.kv.memory import KVShape


def identity_of(folder: Path) -> str:
    """Changes whenever files of a checkpoint do."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def fingerprint_of(settings: WorkerSettings, model: Llama, shape: KVShape, identity: str) -> int:
    """Covers everything that decides which bits a block of KV has."""
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else str(model.device)
    computed = (
        *(version("kvroute"), torch.__version__, torch.backends.cpu.get_cpu_capability()),
        *(device, torch.get_num_threads(), chunk_of(settings)),
    )
    return xxh3_64_intdigest(repr((identity, model.config, computed)).encode(), shape.fingerprint)
