"""Answers that are kept for a moment, so that any number of viewers cost as much as one."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from app.core.errors import RedisUnavailable

T = TypeVar("T")
KEPT_S = 0.5
MAX_KEPT = 64
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer's JSON. at_ms: Redis clock. stale: why it is not newer; "": it is new."""

    body: bytes
    etag: str
    at_ms: int
    made_s: float
    stale: str = ""


class KeptAnswers:
    """Answers by question, each made once at a time. Past MAX_KEPT, the oldest is forgotten."""

    def __init__(self, now_ms: Callable[[], int | None]) -> None:
        self._now_ms = now_ms
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._making: dict[str, CachedAnswer[KeptAnswer]] = {}

    async def of(
        self, question: str, make: Callable[[], Awaitable[bytes]], kept_s: float = KEPT_S
    ) -> KeptAnswer:
        """Returns the answer to a question, not older than `kept_s`, or the last one while Redis
        is away. Raises what `make` raises, and RedisUnavailable."""
        kept = self._answers.get(question)
        if kept is not None and time.monotonic() - kept.made_s < kept_s:
            return kept
        making = self._making.setdefault(
            question, CachedAnswer(lambda: self._make(question, make), 0.0)
        )
        try:
            return await making.now()
        except RedisUnavailable as error:
            if kept is None:
                raise
            return replace(kept, stale=str(error))

    async def _make(self, question: str, make: Callable[[], Awaitable[bytes]]) -> KeptAnswer:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                body = await make()
        except TimeoutError:
            raise RedisUnavailable(f"no answer within {TIMEOUT_S:g} s") from None
        finally:
            del self._making[question]
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        made = KeptAnswer(body, etag, self._now_ms() or 0, time.monotonic())
        self._answers[question] = made
        self._answers.move_to_end(question)
        while len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        return made


class CachedAnswer(Generic[T]):
    """An answer that is asked for again at most every `for_s`, and once at a time however many
    wait for it."""

    def __init__(self, ask: Callable[[], Awaitable[T]], for_s: float) -> None:
        self._ask = ask
        self._for_s = for_s
        self._asking: asyncio.Task[T] | None = None
        self._made_s = -math.inf

    async def now(self) -> T:
        task = self._asking
        if task is None or (task.done() and time.monotonic() - self._made_s >= self._for_s):
            task = self._asking = asyncio.create_task(self._made())
        # Whoever asked first may hang up; the others still wait.
        return await asyncio.shield(task)

    async def _made(self) -> T:
        answer = await self._ask()
        self._made_s = time.monotonic()
        return answer
