"""Why the token ids of a prompt are not to be had here."""

from __future__ import annotations

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
    """A request that cannot be rendered here exactly as its engine would. reason: one word. cause:
    in more."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Reason = reason
        self.cause = message


class OutOfTime(Unrenderable):
    """To render or to tokenize it here takes longer than it may."""

    def __init__(self, message: str) -> None:
        super().__init__("size", message)


class TooManyTokens(KvrouteError):
    """A prompt has more tokens than it may. num_tokens: that were counted until that was clear."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class Abandoned(KvrouteError):
    """Nobody waits for the tokens of a prompt any more."""


class Overloaded(KvrouteError):
    """As much text as may wait to be tokenized is already waiting."""
