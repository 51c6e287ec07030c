"""Engines that fall ill on demand, each behind a real agent, and replicas in front of them, all in
this process."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

import httpx
import pytest

from app.core.failures import SOON_S
from tests.door.conftest import replica, until_serving
from tests.fakes.engine import FakeEngine
from tests.fakes.faults import WELL
from tests.fakes.leased import leased

SLOW = {"prefill_s": 0.1}
IN_A_ROW = 2
"""Failures that suspend a worker which answers."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
TOKENIZE = "/tokenize"
STREAMED = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def asked(path, text="hi", **more):
    """A request for a path."""
    turns = [{"role": "user", "content": text}]
    members = {
        CHAT: {"messages": turns, "max_tokens": 4},
        COMPLETIONS: {"prompt": [1, 2, 3], "max_tokens": 4},
        MESSAGES: {"messages": turns, "max_tokens": 4},
        RESPONSES: {"input": text, "max_output_tokens": 4},
        EMBEDDINGS: {"input": text},
        TOKENIZE: {"prompt": text},
    }[path]
    return {"model": "m", **members, **more}


def few_quick(names, *quick):
    """All but `quick` are for make test-slow."""
    slow = pytest.mark.slow
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@dataclass(slots=True)
class SickFleet:
    """engines: of which the first ones fall ill."""

    engines: list[FakeEngine]
    doors: list[httpx.AsyncClient]
    path: str = COMPLETIONS
    _num_ill: int = 0
    _ill_since_s: float = 0.0

    def fall_ill(self, faults, number=1):
        self._num_ill, self._ill_since_s = number, time.monotonic()
        for engine in self.engines[:number]:
            engine.faults = faults

    def assert_few_tries(self, at_once):
        """That those that fell ill got no more than the rules allow, whatever the machine is busy
        with: as many of the requests that came at once as others, until the second failure in a row
        was known, those that came meanwhile, and then one after each pause. at_once: so many."""
        num_engines, ill_s = len(self.engines), time.monotonic() - self._ill_since_s
        until_known = (IN_A_ROW + 1) * math.ceil(at_once * self._num_ill / num_engines)
        trials = self._num_ill * num_pauses(ill_s)
        came = sum(self.came()[: self._num_ill])
        assert came <= until_known + trials, f"{came} after {ill_s:.1f} s"

    def recover(self):
        for engine in self.engines:
            engine.faults = WELL

    def came(self):
        """Requests that each engine had."""
        return [engine.requests[self.path] for engine in self.engines]

    async def ask(self, number=0, **more):
        body = asked(self.path, f"{number}", **more)
        return await self.doors[number % len(self.doors)].post(self.path, json=body)

    async def ask_many(self, count, at_once=24, **more):
        """By so many clients, each of which asks again once it is answered."""
        numbers, answers = iter(range(count)), list[httpx.Response]()

        async def client():
            for number in numbers:
                answers.append(await self.ask(number, **more))

        await asyncio.gather(*(client() for _ in range(at_once)))
        return answers

    async def shares(self, count=60, **more):
        """What each engine got of so many requests; 1.0: as much as if all got the same."""
        before = self.came()
        await self.ask_many(count, **more)
        got = [now - then for now, then in zip(self.came(), before, strict=True)]
        return [one * len(got) / sum(got) for one in got]


def num_pauses(within_s):
    """How many of a worker that fails each trial at once end in so many seconds."""
    lengths_s = itertools.accumulate(min(2.0**number, SOON_S) for number in itertools.count())
    return sum(1 for _ in itertools.takewhile(lambda end_s: end_s <= within_s, lengths_s))


def statuses(answers):
    return Counter(answer.status_code for answer in answers)


@asynccontextmanager
async def sick_fleet(
    redis, url, engines=3, replicas=1, path=COMPLETIONS, about=MappingProxyType({}), **settings
):
    """All well. about: more of each WorkerInfo. settings: of the replicas."""
    async with AsyncExitStack() as stack:
        some = [
            await stack.enter_async_context(leased(redis, f"e{number}", options=SLOW, **about))
            for number in range(engines)
        ]
        doors = [await stack.enter_async_context(replica(url, **settings)) for _ in range(replicas)]
        for door in doors:
            await until_serving(door, engines)
        yield SickFleet(some, doors, path)
