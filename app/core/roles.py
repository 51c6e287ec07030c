"""Part of a request's work that a worker does."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Work that a worker does: prompts, answers, or both."""

    BOTH = "both"
    PREFILL = "prefill"
    """Computes prompts for others, and never decodes."""
    DECODE = "decode"
    """Decodes, and never computes prompts for others."""

    @classmethod
    def parse(cls, text: str) -> Role:
        """Returns the role of that name. Raises ValueError."""
        return cls(text)
