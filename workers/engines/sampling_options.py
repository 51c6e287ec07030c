"""How a request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.errors import InvalidRequest, shown

MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-5
"""Anything below counts as 0, as in vLLM: float32 could not hold logits divided by it."""
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen, with the names and ranges of OpenAI and vLLM.

    temperature: 0 to 2; 0 is greedy and always takes the most likely token.
    top_p: above 0, up to 1: only the most likely tokens that together have this probability.
    top_k: only this many of the most likely tokens; 0 or -1 for all.
    seed: the same seed gives the same tokens again; None gives different ones each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field and its value."""
        # Types are compared exactly, because a bool is an int to isinstance.
        if (
            type(self.temperature) not in (int, float)
            or not 0 <= self.temperature <= MAX_TEMPERATURE
        ):
            raise InvalidRequest(
                "temperature", f"needs a number from 0 to 2, got {shown(self.temperature)}"
            )
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise InvalidRequest(
                "top_p", f"needs a number above 0 and up to 1, got {shown(self.top_p)}"
            )
        if type(self.top_k) is not int or self.top_k < -1:
            raise InvalidRequest(
                "top_k", f"needs an integer of at least -1, got {shown(self.top_k)}"
            )
        if self.seed is not None and (type(self.seed) is not int or self.seed not in _INT64):
            raise InvalidRequest("seed", f"needs an integer of 64 bits, got {shown(self.seed)}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_cut(self) -> bool:
        """Are some of the tokens ruled out?"""
        return self.top_p < 1 or self.top_k > 0
