"""Sampling of the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor

from workers.engines.base import Sampling


class TokenSampler:
    """The options and the random numbers of one request.

    Each token takes one random number and nothing else, so what a request gets depends on its
    logits and its seed alone, not on the requests that are sampled together with it.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = Random(sampling.seed)

    def draw(self) -> float:
        return self._random.random()


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """Returns the next token of each sequence.

    logits: float32, (num_seqs, vocab_size), in the order of `samplers`.
    """
    tokens = logits.argmax(-1)
    rows = [n for n, sampler in enumerate(samplers) if not sampler.sampling.is_greedy]
    if rows:
        tokens[rows] = _drawn(logits[rows], [samplers[n] for n in rows])
    return tokens.tolist()


def _drawn(logits: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """int64, (num_seqs,)."""
    temperatures = [sampler.sampling.temperature for sampler in samplers]
    likely = (logits / _column(temperatures, logits)).softmax(-1)
    cut = [n for n, sampler in enumerate(samplers) if sampler.sampling.is_cut]
    if cut:
        likely[cut] = _cut(likely[cut], [samplers[n].sampling for n in cut])
    sums = likely.cumsum(-1, dtype=torch.float64)
    # Less than the last sum even when rounded, as both are float64; so the first sum above it
    # belongs to a token that has some probability.
    drawn = _column([sampler.draw() for sampler in samplers], sums) * sums[:, -1:]
    chosen = torch.searchsorted(sums, drawn, right=True).squeeze(-1)
    # Only logits that are NaN, as from a model that overflows, would go beyond.
    return chosen.clamp_(max=logits.shape[-1] - 1)


def _cut(likely: Tensor, options: Sequence[Sampling]) -> Tensor:
    """Returns 0 for tokens that top_k and top_p leave out. Tokens as likely as the last one kept
    stay.

    top_p is a share of what top_k leaves, as in vLLM.
    """
    ranked = _descending(likely)
    sums = ranked.cumsum(-1, dtype=torch.float64)
    vocab_size = likely.shape[-1]
    num_kept = [min(o.top_k, vocab_size) if o.top_k > 0 else vocab_size for o in options]
    last = _column(num_kept, sums).long() - 1
    enough = _column([o.top_p for o in options], sums) * sums.gather(-1, last)
    last = torch.minimum(last, (sums < enough).sum(-1, keepdim=True))
    return likely.masked_fill(likely < ranked.gather(-1, last), 0)


def _descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        # Many times faster than torch, which sorts the positions as well.
        return torch.from_numpy(np.sort(values.numpy())).flip(-1)
    return values.sort(descending=True).values


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
