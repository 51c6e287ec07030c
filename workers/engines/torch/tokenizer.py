"""Tokenizers of checkpoints, as `tokenizer.json` defines them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers

from app.core.errors import ConfigError

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Character in which decoded text ends while bytes of a character are still to come."""
CONTEXT_TOKENS = 8
"""Tokens of a prompt that suffice to tell how the first token after it is spelled."""
PENDING_TOKENS = 64
"""Tokens that wait for more at most: bytes that never make up a character, and special tokens,
which have no text, would be decoded again and again."""


class FileTokenizer:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A file may ask for both, for training; a prompt must stay as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Raises ConfigError unless there is a readable `tokenizer.json`."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            return cls(tokenizers.Tokenizer.from_str(text))
        # The library raises plain Exception for what it cannot read.
        except Exception as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the ids, with the special tokens that the tokenizer adds by itself."""
        # The library lets other threads run meanwhile only if given a batch.
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def stream(self, context: Sequence[int] = ()) -> TokenText:
        """Returns the text of tokens that arrive one by one after those of `context`."""
        return TokenText(self, context[-CONTEXT_TOKENS:])


class TokenText:
    """Text of tokens as they arrive: whole characters only, spaced as if decoded in one piece.

    A token alone does not determine its text: it may hold part of a character, and whether a space
    precedes it may depend on what comes before. So it is decoded together with the tokens of the
    last piece of text, and the text of those alone is removed. `tokenizers.decoders.DecodeStream`
    does the same, but never gives out what it keeps back at the end, and fails where bytes that do
    not make up a character follow bytes that do.
    """

    def __init__(self, tokenizer: FileTokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        while tokenizer.decode(context).startswith(HALF_CHARACTER):
            context = context[1:]
        self._given = list(context)
        """Last tokens whose text is already out."""
        self._prefix = tokenizer.decode(context).rstrip(HALF_CHARACTER)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Returns the text that is now certain; empty if it needs more tokens."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(HALF_CHARACTER) and len(self._pending) < PENDING_TOKENS:
            return ""
        return self._give(text)

    def end(self) -> str:
        return self._give(self._text())

    def _text(self) -> str:
        text = self._tokenizer.decode(self._given + self._pending)
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # New bytes have invalidated earlier ones, whose text is already out.
        return self._tokenizer.decode(self._pending)

    def _give(self, text: str) -> str:
        if text:
            self._given, self._pending = self._pending, []
            self._prefix = self._tokenizer.decode(self._given)
        elif len(self._pending) >= PENDING_TOKENS:
            self._pending = []
        return text
