"""Weights of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.core.errors import ConfigError
from workers.engines.torch.llama_config import LlamaConfig, read_json


def fill_weights(weights: Mapping[str, Tensor], folder: Path, config: LlamaConfig) -> None:
    """Reads a checkpoint's tensors into `weights`, by name, on the device where these are.

    The folder has `model.safetensors`, or shards with an index. Raises ConfigError if they cannot
    be read, or are not exactly those of `weights`.
    """
    missing = dict(weights)
    device = str(next(iter(weights.values())).device)
    for path in _weight_files(folder):
        try:
            # Read straight to the device, one tensor at a time.
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118, it is not a mapping
                    if not _is_ignored(name, config):
                        _fill(missing, name, file.get_tensor(name), path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
    if missing:
        raise ConfigError(f"{folder}: tensors are missing: {_some(missing)}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
        raise ConfigError(f"{index}: has no weight_map of file names")
    return [folder / name for name in sorted(set(shards.values()))]


def _is_ignored(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor is a copy, in some checkpoints, of what the model has anyway."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _fill(missing: dict[str, Tensor], name: str, tensor: Tensor, path: Path) -> None:
    weight = missing.pop(name, None)
    if weight is None:
        raise ConfigError(f"{path}: {name} is not in the model, or appears twice")
    if tensor.shape != weight.shape:
        raise ConfigError(
            f"{path}: {name} is {tuple(tensor.shape)}, but the model has {tuple(weight.shape)}"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"{path}: {name} is {tensor.dtype}; quantised weights are not supported")
    weight.copy_(tensor)


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(list(names)[:4]) + more
