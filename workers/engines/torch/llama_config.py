"""Shapes of Llama models: by name, and from Hugging Face checkpoints. Does not import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from app.core.errors import ConfigError

MAX_COUNT = (1 << 31) - 1
"""Limit of every count: products of counts then still fit into what torch takes."""
_SUPPORTED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Settings of a checkpoint that decide what is computed, and what each must be, if present."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of RoPE of the `llama3` kind, which stretches long wavelengths by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field and its value."""
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_positive(name, getattr(self, name))
        _check_count("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor: needs more than low_freq_factor, {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model, in Hugging Face's terms; head_size is their head_dim."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field and its value."""
        for name in (f.name for f in fields(self) if f.type == "int"):
            _check_count(name, getattr(self, name))
        for name in ("rope_theta", "rms_norm_eps"):
            _check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: {self.num_heads} heads cannot share {self.num_kv_heads} evenly"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size: RoPE needs an even number, got {self.head_size}")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ConfigError(f"tie_word_embeddings: needs a bool, got {self.tie_word_embeddings}")
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"eos_token_ids: needs tokens below {self.vocab_size}, got {token!r}"
                )

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Reads `config.json`, and the end-of-sequence tokens of `generation_config.json`.

        Raises ConfigError if they cannot be read, or ask for anything that is not computed here.
        """
        config = read_json(folder / "config.json")
        _check_supported(config)
        rope_theta, rope_scaling = _rope(config)
        eos = config.get("eos_token_id")
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = read_json(generation).get("eos_token_id", eos)
        hidden_size = _count(config, "hidden_size")
        num_heads = _count(config, "num_attention_heads")
        return cls(
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_heads),
            head_size=_count(config, "head_dim", hidden_size // num_heads),
            max_position_embeddings=_count(config, "max_position_embeddings", 2048),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=_get(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_get(config, "tie_word_embeddings", False),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a file. Raises ConfigError."""
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: needs an object, got {type(read).__name__}")
    return read


def _check_supported(config: Mapping[str, Any]) -> None:
    for name, value in _SUPPORTED.items():
        got = _get(config, name, value)
        if got != value:
            raise ConfigError(f"{name}: only {value!r} is supported, got {got!r}")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns theta and scaling; older checkpoints have theta as a separate setting."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"rope_parameters: needs an object, got {rope!r}")
    _check_supported(rope)
    theta = rope.get("rope_theta", _get(config, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"rope_type: only default and llama3 are supported, got {kind!r}")
    try:
        return theta, RopeScaling(**{name: rope[name] for name in RopeScaling.__slots__})
    except KeyError as error:
        raise ConfigError(f"rope_parameters: {error.args[0]} is missing") from error


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _get(config, name, default)
    _check_count(name, value)
    return int(value)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ConfigError(f"{name}: needs an integer from 1 to {MAX_COUNT:,}, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}: needs a positive number, got {value!r}")


# Vocabulary, hidden, intermediate, layers, heads, KV heads, head size, positions; theta.
SIZES = {
    "tiny": LlamaConfig(256, 64, 128, 2, 4, 2, 16, 4096, tie_word_embeddings=True),
    "40m": LlamaConfig(
        *(32_000, 512, 1408, 8, 8, 2, 64, 32_768), 500_000.0, tie_word_embeddings=True
    ),
    "125m": LlamaConfig(
        *(32_000, 768, 2816, 12, 12, 4, 64, 32_768), 500_000.0, tie_word_embeddings=True
    ),
    "llama-3.2-1b": LlamaConfig(
        *(128_256, 2048, 8192, 16, 32, 8, 64, 131_072),
        500_000.0,
        RopeScaling(32.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": LlamaConfig(
        *(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072),
        500_000.0,
        RopeScaling(8.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
    ),
}
"""Shapes for random weights, by name. No token ends a sequence."""
