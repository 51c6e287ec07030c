"""What a text may cost while it is rendered and tokenized."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf

from app.tokens.errors import Abandoned, OutOfTime, TooManyTokens


@dataclass(slots=True)
class Allowance:
    """Of one prompt. max_tokens: that it may have; 0: any number. is_abandoned: nobody waits for
    them any more.

    No thread can be stopped from outside. So whatever takes long asks `check` now and then.
    """

    max_tokens: int = 0
    is_abandoned: bool = False
    num_tokens: int = 0
    _seconds: float = inf
    _until_s: float = inf

    def begin(self, seconds: float) -> None:
        """It may take so long from now on."""
        self._seconds, self._until_s = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raises Abandoned, and OutOfTime."""
        if self.is_abandoned:
            raise Abandoned(f"after {self.num_tokens} tokens")
        if time.monotonic() > self._until_s:
            raise OutOfTime(f"takes over {self._seconds:g} s")

    def take(self, num_tokens: int) -> None:
        """Raises TooManyTokens, and as `check`."""
        self.num_tokens += num_tokens
        if 0 < self.max_tokens < self.num_tokens:
            raise TooManyTokens(self.num_tokens)
        self.check()
