"""What of a request a worker does."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a worker does of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes prompts for others, and never decodes."""
    DECODE = "decode"
    """It decodes, and never computes prompts for others."""

    @classmethod
    def parse(cls, text: str) -> Role:
        """Raises ValueError."""
        return cls(text)
