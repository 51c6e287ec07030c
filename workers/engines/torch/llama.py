"""Llama models over paged KV: what the torch engine computes, on CPU and CUDA alike.

A prefill is one chunk of one sequence in a forward pass of its own, so that what it computes
depends, bit for bit, on the tokens, their positions and the KV before them, and on nothing that
happens to run alongside. Decoding computes one token for each of many sequences together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_intdigest

from app.core.errors import ConfigError
from workers.engines.torch.attention import Attend, chunk_attention, groups_of, tokens_attention
from workers.engines.torch.llama_config import SIZES, LlamaConfig, read_json
from workers.kv.memory import KVShape

__all__ = ["SIZES", "Llama", "LlamaConfig"]


class _Layer(NamedTuple):
    """Weights of one layer; matrices that multiply the same input are merged into one."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """A model whose weights are on `device` in `dtype`.

    Callers ensure that tokens are below vocab_size and positions below max_position_embeddings: on
    CUDA nothing else would notice before it is too late.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Weights are whatever the memory held; `random` and `load` fill them.

        Turns off cuDNN's attention for the whole process.
        """
        # On Hopper, torch would prefer it, but it takes tenths of a second to plan for each new
        # length of the context, which most steps have.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = c = config
        self.dtype = dtype
        self.device = torch.device(device)

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._embedding = empty(c.vocab_size, c.hidden_size)
        self._layers = [
            _Layer(
                attention_norm=empty(c.hidden_size),
                qkv=empty((c.num_heads + 2 * c.num_kv_heads) * c.head_size, c.hidden_size),
                output=empty(c.hidden_size, c.num_heads * c.head_size),
                mlp_norm=empty(c.hidden_size),
                gate_up=empty(2 * c.intermediate_size, c.hidden_size),
                down=empty(c.hidden_size, c.intermediate_size),
            )
            for _ in range(c.num_layers)
        ]
        self._norm = empty(c.hidden_size)
        self._head = (
            self._embedding if c.tie_word_embeddings else empty(c.vocab_size, c.hidden_size)
        )
        self._cos, self._sin = (t.to(device, dtype) for t in _rope_tables(c))

    @classmethod
    def random(
        cls,
        config: LlamaConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Returns a model with random weights, scaled so that every layer, and so the whole
        context, affects the logits.

        The same seed gives the same weights on the same kind of device.
        """
        model = cls(config, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for _, weight in model._weights():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
        return model

    @classmethod
    def load(
        cls,
        config: LlamaConfig,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Returns a model with the weights of a Hugging Face checkpoint.

        Raises ConfigError if it cannot be read, or its tensors are not those of `config`.
        """
        model = cls(config, dtype=dtype, device=device)
        _fill_weights(dict(model._weights()), folder, config)
        return model

    def checksum(self) -> int:
        """Returns a u64 that two models share only if their weights are the same."""
        checksum = 0
        for name, weight in self._weights():
            checksum = xxh3_64_intdigest(name.encode(), checksum)
            content = weight.contiguous().view(torch.uint8).cpu().numpy().data
            checksum = xxh3_64_intdigest(content, checksum)
        return checksum

    def kv_shape(self, block_size: int) -> KVShape:
        """Returns the shape of blocks that the pools of all ranks keep together."""
        c = self.config
        return KVShape(c.num_layers, c.num_kv_heads, c.head_size, self.dtype, block_size)

    @torch.inference_mode()
    def prefill(
        self,
        kv: Sequence[Tensor],
        tokens: Sequence[int],
        start: int,
        block_ids: Sequence[int],
        before_layer: Callable[[int], None] = lambda _: None,
    ) -> Tensor:
        """Compute one chunk of one sequence; returns float32 logits of its last token.

        kv: by rank, (num_blocks, num_layers, 2, block_size, num_heads, head_size) each, strided,
        where ranks have equal shares of the KV heads, in order; holds the KV of positions before
        `start`, and receives that of the chunk. Keys are stored after RoPE.
        start: position of tokens[0].
        block_ids: block_ids[i] has positions i * block_size on; surplus ones are not used.
        before_layer: called with each layer's number before its KV is read.
        Returns (vocab_size,).
        """
        block_size = kv[0].shape[3]
        end = start + len(tokens)
        own_blocks = self._index(block_ids[: -(-end // block_size)])
        positions = torch.arange(start, end, device=self.device)
        attend = chunk_attention(own_blocks, start, end, self.dtype)
        blocks = own_blocks[positions // block_size]
        hidden = self._forward(
            kv, self._index(tokens), positions, blocks, positions % block_size, attend, before_layer
        )
        return self._logits(hidden[-1])

    @torch.inference_mode()
    def decode(
        self,
        kv: Sequence[Tensor],
        tokens: Sequence[int],
        positions: Sequence[int],
        block_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Compute one token of each of several sequences; returns float32 logits.

        kv and each of block_ids: as in `prefill`. What the last block of a sequence holds after its
        token is masked, so it must be finite, as zeros are and everything computed here.
        Returns (num_seqs, vocab_size).
        """
        block_size = kv[0].shape[3]
        order = sorted(range(len(tokens)), key=positions.__getitem__)
        in_order = [positions[i] for i in order]
        groups = groups_of(in_order, [block_ids[i] for i in order], block_size)
        tables = [self._index(group) for group in groups]
        ends = self._index(in_order)
        attend = tokens_attention(tables, ends, block_size, self.dtype)
        last = torch.split((ends // block_size)[:, None], [len(table) for table in tables])
        blocks = torch.cat([table.gather(1, at) for table, at in zip(tables, last, strict=True)])
        hidden = self._forward(
            kv,
            self._index([tokens[i] for i in order]),
            ends,
            blocks[:, 0],
            ends % block_size,
            attend,
        )
        rank = sorted(range(len(order)), key=order.__getitem__)
        return self._logits(hidden)[self._index(rank)]

    def _forward(
        self,
        kv: Sequence[Tensor],
        tokens: Tensor,
        positions: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        attend: Attend,
        before_layer: Callable[[int], None] = lambda _: None,
    ) -> Tensor:
        """Runs all layers over the tokens; their KV is written at those offsets of those blocks.

        tokens, positions, blocks, offsets: int64, (num_tokens,). Returns (num_tokens, hidden_size),
        before the last norm.
        """
        c = self.config
        num_heads, kv_heads, head_size = c.num_heads, c.num_kv_heads, c.head_size
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        x = F.embedding(tokens, self._embedding)
        for n, layer in enumerate(self._layers):
            before_layer(n)
            qkv = F.linear(self._normed(x, layer.attention_norm), layer.qkv)
            qk, v = torch.split(
                qkv.view(len(x), -1, head_size), [num_heads + kv_heads, kv_heads], 1
            )
            q, k = torch.split(_rotate(qk, cos, sin), [num_heads, kv_heads], 1)
            keys, values = zip(*(rank[:, n].unbind(1) for rank in kv), strict=True)
            for ranks, new in (keys, k), (values, v):
                # Whoever gets the block next multiplies even what it masks: a NaN would survive.
                parts = new.nan_to_num(0.0, 0.0, 0.0).chunk(len(kv), 1)
                for rank, part in zip(ranks, parts, strict=True):
                    at = blocks.to(rank.device), offsets.to(rank.device)
                    rank[at] = part.to(rank.device)
            x = x + F.linear(attend(q, keys, values), layer.output)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._normed(hidden, self._norm), self._head).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _index(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor of a checkpoint by name, as the part of our weights that it fills."""
        c = self.config
        yield "model.embed_tokens.weight", self._embedding
        for number, layer in enumerate(self._layers):
            queries, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
            q, k, v = torch.split(layer.qkv, [queries, kv, kv])
            gate, up = layer.gate_up.chunk(2)
            for name, weight in {
                "input_layernorm": layer.attention_norm,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": layer.output,
                "post_attention_layernorm": layer.mlp_norm,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down,
            }.items():
                yield f"model.layers.{number}.{name}.weight", weight
        yield "model.norm.weight", self._norm
        if not c.tie_word_embeddings:
            yield "lm_head.weight", self._head


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates as Hugging Face lays RoPE out: each element is paired with the one half a head on."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, float32, (max_position_embeddings, head_size / 2)."""
    size = config.head_size
    frequencies = 1 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling := config.rope_scaling:
        # Of each frequency, within the length that the model was first trained for.
        rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    angles = torch.arange(config.max_position_embeddings)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _fill_weights(weights: Mapping[str, Tensor], folder: Path, config: LlamaConfig) -> None:
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
