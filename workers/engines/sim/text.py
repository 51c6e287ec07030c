"""Text of the simulated engine, whose invented tokens stand for words of a fixed text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

FOLDER = Path(__file__).parent / "tokenizer"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that end a text, and begin and end a turn of a chat."""
_TEXT = (
    "the quick brown fox jumps over a lazy dog while every router sends each request to the worker "
    "that holds most of its prefix and will start it soonest"
)
WORDS = _TEXT.split()


class SimTokenizer:
    """A tokenizer with bytes in and words out: an output is other tokens in a prompt."""

    def __init__(self) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        # The library lets other threads run meanwhile only if given a batch.
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a prompt."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def stream(self, context: Sequence[int] = ()) -> _Words:
        """Returns the text of an output; what came before does not change it."""
        return _Words()


class _Words:
    def __init__(self) -> None:
        self._space = ""

    def push(self, token: int) -> str:
        text = self._space + WORDS[token % len(WORDS)]
        self._space = " "
        return text

    def end(self) -> str:
        return ""
