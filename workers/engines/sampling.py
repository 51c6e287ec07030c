"""Choosing the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from app.core.errors import InvalidRequest

MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-5
"""What is below counts as 0, as in vLLM: float32 could not hold what it divides."""
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen, in the words and ranges of OpenAI and vLLM.

    temperature: 0 to 2; 0 is greedy, it always takes the most likely token.
    top_p: above 0, up to 1: only the most likely tokens that have this much together.
    top_k: only so many of the most likely ones; 0 or -1 for all.
    seed: the same one gives the same tokens again; None for others each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and its value."""
        if not _is_number(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidRequest(
                "temperature", f"needs a number from 0 to 2, got {self.temperature!r}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p", f"needs a number above 0 and up to 1, got {self.top_p!r}")
        if not _is_int(self.top_k) or self.top_k < -1:
            raise InvalidRequest("top_k", f"needs an integer of at least -1, got {self.top_k!r}")
        if self.seed is not None and (not _is_int(self.seed) or self.seed not in _INT64):
            raise InvalidRequest("seed", f"needs an integer of 64 bits, got {self.seed!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_cut(self) -> bool:
        """Only some of the tokens are to be had."""
        return self.top_p < 1 or self.top_k > 0


class Sampler:
    """Chooses the tokens of one request: its options, and random numbers of its own.

    Each token takes one random number and nothing else, so what a request gets depends on its
    logits and its seed alone, not on the requests that are sampled together with it.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = Random(sampling.seed)

    def draw(self) -> float:
        """At least 0, less than 1."""
        return self._random.random()


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each sequence.

    logits: float32, (num_seqs, vocab_size), in the order of `samplers`.
    """
    tokens = logits.argmax(-1)
    rows = [n for n, sampler in enumerate(samplers) if not sampler.sampling.is_greedy]
    if rows:
        tokens[rows] = _drawn(logits[rows], [samplers[n] for n in rows])
    return tokens.tolist()


def _drawn(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """int64, (num_seqs,)."""
    temperatures = [sampler.sampling.temperature for sampler in samplers]
    likely = (logits / _column(temperatures, logits)).softmax(-1)
    cut = [n for n, sampler in enumerate(samplers) if sampler.sampling.is_cut]
    if cut:
        likely[cut] = _cut(likely[cut], [samplers[n].sampling for n in cut])
    sums = likely.cumsum(-1, dtype=torch.float64)
    # Less than the last sum even when rounded, as both are float64; so what comes first above it
    # is likely at all.
    drawn = _column([sampler.draw() for sampler in samplers], sums) * sums[:, -1:]
    chosen = torch.searchsorted(sums, drawn, right=True).squeeze(-1)
    # Only logits that are no numbers, as of a model that overflows, lead further.
    return chosen.clamp_(max=logits.shape[-1] - 1)


def _cut(likely: Tensor, options: Sequence[Sampling]) -> Tensor:
    """0 for tokens that top_k and top_p leave out. Those as likely as the last one stay too.

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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)
