"""What a text may cost while it is tokenized."""

from __future__ import annotations

from dataclasses import dataclass

from app.door.tokens.errors import Abandoned, TooManyTokens


@dataclass(slots=True)
class Allowance:
    """Of one prompt. max_tokens: that it may have; 0: any number. is_abandoned: nobody waits for
    them any more."""

    max_tokens: int = 0
    is_abandoned: bool = False
    num_tokens: int = 0

    def take(self, num_tokens: int) -> None:
        """Raises TooManyTokens, and Abandoned."""
        self.num_tokens += num_tokens
        if self.is_abandoned:
            raise Abandoned(f"after {self.num_tokens} tokens")
        if 0 < self.max_tokens < self.num_tokens:
            raise TooManyTokens(self.num_tokens)
