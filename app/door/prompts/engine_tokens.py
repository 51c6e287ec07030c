"""The ids of prompts as engines make them. Any engine of a model may be asked, and one that is late
is asked last for a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.errors import InvalidRequest
from app.core.worker_report import WorkerInfo
from app.door.answer_request import given_ids
from app.door.engine.connection import UpstreamError
from app.door.engine.upstream import Upstream
from app.door.errors import NotTokenized

ANSWER_S = 2.0
"""Seconds that a request waits for ids, of whichever engine, so that its decision is exact."""
NEXT_S = 0.25
"""Seconds after which another engine is asked as well."""
MOST_ASKED = 3
"""Engines, for one prompt."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Seconds for which an engine is asked last that was late, or failed; twice as long each time."""
MAX_LATE = 4096
MAX_TOKENIZED_BYTES = 32 * 1024 * 1024
REFUSALS = (400, 413, 422)
"""Statuses that every engine would answer."""


@dataclass(slots=True)
class _Pause:
    """is_tried: one request asks it all the same, to see whether it is well again."""

    until_s: float
    pause_s: float
    is_tried: bool = False


class Late:
    """Engines that are asked last, by their addresses. now_s: a clock in seconds."""

    def __init__(self, now_s: Callable[[], float], rng: random.Random | None = None) -> None:
        self._now_s = now_s
        self._rng = rng or random.Random()
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def in_turn(self, addresses: Collection[str]) -> list[str]:
        """Returns the addresses to ask, in any order, the late ones last; none if all are late. One
        whose pause is over is tried by one request alone: to others it is late until that has
        ended."""
        now_s = self._now_s()
        late = {a for a in addresses if a in self._pauses and now_s < self._pauses[a].until_s}
        fresh = [address for address in addresses if address not in late]
        asked = self._rng.sample(fresh, min(MOST_ASKED, len(fresh)))
        if not asked:
            return []
        for address in asked:
            if pause := self._pauses.get(address):
                pause.until_s, pause.is_tried = now_s + ANSWER_S, True
        return asked + self._rng.sample(sorted(late), min(MOST_ASKED - len(asked), len(late)))

    def note_well(self, address: str) -> None:
        self._pauses.pop(address, None)

    def note_late(self, address: str) -> None:
        """Notes that an engine was late, or failed."""
        now_s, pause = self._now_s(), self._pauses.get(address)
        pause_s = FIRST_PAUSE_S
        if pause is not None:
            if now_s < pause.until_s and not pause.is_tried:
                return  # another request has noted it
            pause_s = min(2 * pause.pause_s, LONGEST_PAUSE_S)
        self._pauses[address] = _Pause(now_s + pause_s, pause_s)
        self._pauses.move_to_end(address)
        if len(self._pauses) > MAX_LATE:
            self._pauses.popitem(last=False)


class EngineTokens:
    """Asks engines for ids."""

    def __init__(self, upstream: Upstream, worker_key: str) -> None:
        self._upstream = upstream
        self._headers = [(b"content-type", b"application/json")]
        if worker_key:
            self._headers.append((b"authorization", b"Bearer " + worker_key.encode()))
        self._late = Late(time.monotonic)

    async def of(self, workers: Sequence[WorkerInfo], body: bytes) -> NDArray[np.uint32]:
        """Returns the ids that one of the workers makes of a body of POST /tokenize. Raises
        NotTokenized."""
        waiting = deque(self._late.in_turn({worker.address for worker in workers}))
        asked: dict[str, asyncio.Task[NDArray[np.uint32] | None]] = {}
        loop = asyncio.get_running_loop()
        until_s = loop.time() + ANSWER_S
        reason = "engine"
        try:
            while (waiting or asked) and (left_s := until_s - loop.time()) > 0:
                if waiting:
                    address = waiting.popleft()
                    asked[address] = asyncio.create_task(self._ask(address, body))
                await asyncio.wait(
                    asked.values(),
                    timeout=min(NEXT_S, left_s) if waiting else left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                slower = []
                for address, task in list(asked.items()):
                    if not task.done():
                        slower.append(address)
                        continue
                    try:
                        ids = task.result()
                    except _Failed as failure:
                        reason = failure.reason
                        self._late.note_late(address)
                        del asked[address]
                        continue
                    self._late.note_well(address)
                    for address in slower:
                        self._late.note_late(address)
                    if ids is None:
                        raise NotTokenized("refused")
                    return ids
            for address in asked:
                self._late.note_late(address)
            raise NotTokenized(reason)
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    async def _ask(self, address: str, body: bytes) -> NDArray[np.uint32] | None:
        """Returns ids; None if the engine refuses the prompt, as others would. Raises _Failed."""
        try:
            answer = await self._upstream.send(
                *(address, "/tokenize", self._headers, body), connect_s=ANSWER_S, answer_s=ANSWER_S
            )
            text, is_all = await answer.read_up_to(MAX_TOKENIZED_BYTES)
        except UpstreamError:
            raise _Failed("engine") from None
        answer.abort()  # what more there is
        if answer.status in REFUSALS:
            return None
        with suppress(ValueError, LookupError, TypeError, InvalidRequest):
            if is_all and answer.status == 200:
                ids = given_ids(np.array(orjson.loads(text)["tokens"]))
                if ids is not None:
                    return ids
        raise _Failed("refused")


class _Failed(Exception):
    """An engine that another may replace. reason: see NotTokenized."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
