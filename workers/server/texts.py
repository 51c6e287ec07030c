"""Texts to token ids and back, off the event loop, and within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from app.core.errors import InvalidRequest
from app.tokens import Overloaded, TokenizerThreads
from workers.engines.base import QueueFullError, Tokenizer

MAX_BYTES = 1 << 20
"""Of a text: it takes two hundred times its size in memory, and two seconds that nobody can cut
short."""
_THREADS = TokenizerThreads()
T = TypeVar("T")


async def encoded(tokenizer: Tokenizer, text: str) -> NDArray[np.uint32]:
    """The ids of a prompt. Raises InvalidRequest, QueueFullError."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise InvalidRequest("prompt", f"has over {MAX_BYTES} bytes: send token ids")
    return await _apart(len(text), lambda: np.array(tokenizer.encode(text), "<u4"))


async def _apart(size: int, call: Callable[[], T]) -> T:
    """What `call()` returns or raises, from a thread. size: of what it reads, in characters. Raises
    QueueFullError."""
    try:
        return await _THREADS.run(size, call)
    except Overloaded as error:
        raise QueueFullError(str(error)) from None


async def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Raises QueueFullError."""
    return await _apart(len(ids), lambda: tokenizer.decode(ids))
