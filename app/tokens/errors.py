"""Errors of tokenizing, and the limits of what it may cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from typing import Literal

from app.core.errors import KvrouteError

Reason = Literal[
    "media",  # images, audio, video
    "message",  # a message of a form that only the engine can judge
    "tools",
    "tool_choice",
    "template",  # the model has none, or the request brings its own, or this one needs more
    "template_kwargs",
    "documents",
    "reasoning_effort",
    "response_format",
    "truncation",
    "special_tokens",
    "echo",
    "refused",  # by the template, or both continued and prompted
    "size",
    "text",  # not Unicode
]


class TokenizerUnavailable(KvrouteError):
    """A model's tokenizer is not on this machine, or cannot be read."""


class Unrenderable(KvrouteError):
    """A request cannot be rendered here exactly as its engine would. reason: one word. cause: in
    more."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Reason = reason
        self.cause = message


class OutOfTime(Unrenderable):
    """Rendering or tokenizing a request here takes longer than it may."""

    def __init__(self, message: str) -> None:
        super().__init__("size", message)


class TooManyTokens(KvrouteError):
    """A prompt has more tokens than it may. num_tokens: those counted until that was clear."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class Abandoned(KvrouteError):
    """Nobody waits for the tokens of a prompt any more."""


class Overloaded(KvrouteError):
    """Too much text waits to be tokenized."""


@dataclass(slots=True)
class Allowance:
    """Limits of one prompt. max_tokens: 0: any number. is_abandoned: nobody waits for the tokens
    any more. No thread can be stopped from outside. So whatever takes long calls `check` now and
    then."""

    max_tokens: int = 0
    is_abandoned: bool = False
    num_tokens: int = 0
    _seconds: float = inf
    _until_s: float = inf

    def begin(self, seconds: float) -> None:
        """Starts the clock: the prompt may take `seconds` from now on."""
        self._seconds, self._until_s = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raises Abandoned or OutOfTime if that is so."""
        if self.is_abandoned:
            raise Abandoned(f"after {self.num_tokens} tokens")
        if time.monotonic() > self._until_s:
            raise OutOfTime(f"takes over {self._seconds:g} s")

    def take(self, num_tokens: int) -> None:
        """Counts tokens. Raises TooManyTokens, Abandoned and OutOfTime."""
        self.num_tokens += num_tokens
        if 0 < self.max_tokens < self.num_tokens:
            raise TooManyTokens(self.num_tokens)
        self.check()
