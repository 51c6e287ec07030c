"""Texts to token ids and back, off the event loop, and within bounds."""

from __future__ import annotations

from app.core.errors import InvalidRequest
from app.door.tokens import Overloaded, TokenizerThreads
from workers.engines.base import QueueFullError, Tokenizer

MAX_CHARACTERS = 1 << 20
"""Of a text: it takes two hundred times its size in memory."""
_THREADS = TokenizerThreads()


async def encoded(tokenizer: Tokenizer, text: str, field: str) -> list[int]:
    """Raises InvalidRequest, QueueFullError."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(field, f"has over {MAX_CHARACTERS} characters: send token ids")
    try:
        return await _THREADS.run(len(text), tokenizer.encode, text)
    except Overloaded as error:
        raise QueueFullError(str(error)) from None


async def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Raises QueueFullError."""
    try:
        return await _THREADS.run(len(ids), tokenizer.decode, ids)
    except Overloaded as error:
        raise QueueFullError(str(error)) from None
