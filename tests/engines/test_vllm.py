"""Two real vLLM servers on the CPU, an agent beside each, and routers: see `make test-vllm`.

At rest, what routers state of a prompt is what vLLM then reports as cached, whatever happened
before: evictions, adapters, salts, kills of an engine and of an agent, a reset and a sleep.
"""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import pytest

from tests.e2e.engines import agent
from tests.edge.conftest import started_replica
from tests.engines.vllm_server import ADAPTER, ANSWER_S, BLOCK, MODEL, vllm_servers
from tests.eventually import eventually

REQUESTS, SAMPLE, AT_ONCE = 500, 200, 4
CACHE_BLOCKS = 200
GIVEN_UP_S = 30.0
"""An engine that is put to sleep keeps its requests: their clients then take another."""
TOLD = {300: "/reset_prefix_cache", 380: "/sleep?level=1", 430: "/wake_up"}
SALTS = (None, None, None, "red", "blue")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


@dataclass(frozen=True, slots=True)
class SentPrompt:
    tokens: tuple[int, ...]
    model: str
    salt: str | None

    @property
    def for_router(self):
        asked = {"token_ids": self.tokens}
        if self.model != MODEL:
            asked["lora_name"] = self.model
        if self.salt:
            asked["cache_namespace"] = self.salt
        return asked

    @property
    def for_engine(self):
        asked = {"model": self.model, "prompt": self.tokens, "max_tokens": 3}
        return asked | {"ignore_eos": True} | ({"cache_salt": self.salt} if self.salt else {})


class VllmPrompts:
    """Prompts that share prefixes, with adapters and salts, seeded."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._prefixes = [
            [self._random.randrange(5, 400) for _ in range(self._random.choice([64, 200, 600]))]
            for _ in range(12)
        ]

    def next(self):
        choice = self._random
        begun = choice.choice(self._prefixes)
        kept = begun[: choice.choice([len(begun), len(begun), choice.randrange(len(begun))])]
        more = [choice.randrange(5, 400) for _ in range(choice.choice([1, 17, 40, 100]))]
        model = ADAPTER if choice.random() < 0.2 else MODEL
        return SentPrompt((*kept, *more), model, choice.choice(SALTS))


class Fleet:
    """Two engines, the agent of each, and two replicas."""

    def __init__(self, engines, routers, http):
        self.engines = engines
        self._routers = routers
        self._http = http
        self._urls = {name: engine.url for name, engine in zip("ab", engines, strict=True)}

    async def send(self, number, asked):
        router = self._routers[number % len(self._routers)]
        exclude = []
        while True:
            body = asked.for_router | {"request_id": f"r{number}", "retry": bool(exclude)}
            answer = await router.post("/v1/route", json=body | {"exclude": exclude})
            if answer.status_code == 503:
                await asyncio.sleep(0.5)
                exclude = []
                continue
            routed = answer.json()
            release = f"/v1/requests/{routed['reservation_id']}"
            try:
                await self.complete(routed["address"], asked, GIVEN_UP_S)
            except httpx.HTTPError:
                await router.delete(f"{release}?worker_failed=true")
                exclude = [routed["worker_id"]]
            else:
                await router.delete(release)
                return

    async def complete(self, url, asked, within_s=ANSWER_S):
        """How many tokens the engine says were cached."""
        path = f"{url}/v1/completions"
        answer = await self._http.post(path, json=asked.for_engine, timeout=within_s)
        answer.raise_for_status()
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    async def overlap(self, name, asked):
        """Blocks, as the second replica states them, once two looks agree."""
        last = await self._look(name, asked)
        while True:
            # vLLM publishes from a thread of its own, which a busy machine may hold up.
            await asyncio.sleep(0.5)
            now = await self._look(name, asked)
            if now is not None and now == last:
                return now
            last = now

    async def _look(self, name, asked):
        """None: on a busy machine the worker may be away for a moment."""
        body = asked.for_router | {"reserve": False, "explain": True}
        answer = (await self._routers[1].post("/v1/route", json=body)).json()
        found = [c for c in answer.get("candidates", ()) if c["worker_id"] == name]
        return sum(found[0]["overlap_blocks"].values()) if found else None

    async def load_another_adapter(self, folder, held):
        """Loads another adapter under the same name at both engines. held: a prompt of the
        former."""
        blocks = len(held.tokens) // BLOCK
        await eventually(
            partial(self._look, "a", held), lambda seen: seen == blocks, within_s=ANSWER_S
        )
        # What was stored since the agent's last look would be taken to be of the next adapter.
        before = await self._looks()
        await eventually(self._looks, lambda seen: seen > before + 1, within_s=ANSWER_S)
        for url in self._urls.values():
            asked = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            (await self._http.post(f"{url}/v1/load_lora_adapter", json=asked)).raise_for_status()
        await eventually(partial(self._look, "a", held), lambda seen: seen == 0, within_s=ANSWER_S)

    async def _looks(self):
        """How often the first engine was asked for its adapters."""
        return self.engines[0].num_logged("GET /v1/models")

    async def differences(self, prompts, sample=SAMPLE):
        found = []
        for number in range(sample):
            asked, name = prompts.next(), "ab"[number % 2]
            stated = await self.overlap(name, asked)
            # The last token is always computed, and with it its block.
            expected = min(stated, (len(asked.tokens) - 1) // BLOCK) * BLOCK
            cached = await self.complete(self._urls[name], asked)
            if cached != expected:
                found.append(f"{number} {name}: {expected} stated, {cached} cached, {asked}")
            # What the next one finds is published after this.
            full = len(asked.tokens) // BLOCK
            await eventually(
                partial(self._look, name, asked),
                lambda seen, full=full: seen is not None and seen >= full,
                within_s=ANSWER_S,
            )
        return found

    async def serving(self, *names):
        async def look():
            listed = (await self._routers[0].get("/v1/workers")).json()
            return sorted(worker["worker_id"] for worker in listed["workers"])

        await eventually(look, lambda seen: seen == list(names), within_s=600.0)


@asynccontextmanager
async def fleet(redis_url, folder, stack):
    engines = stack.enter_context(vllm_servers(folder, "a", "b", blocks=CACHE_BLOCKS))
    async with (
        started_replica(redis_url) as one,
        started_replica(redis_url) as other,
        httpx.AsyncClient(timeout=ANSWER_S) as http,
    ):
        yield Fleet(engines, [one, other], http)


async def test_overlap_is_what_vllm_reports_after_evictions_kills_a_reset_and_a_sleep(
    one_redis_server, tmp_path
):
    url, prompts = one_redis_server.url, VllmPrompts(3)
    with ExitStack() as stack:
        async with fleet(url, tmp_path, stack) as served:
            beside = [
                stack.enter_context(agent(engine.url, url, tmp_path / name, name))
                for name, engine in zip("ab", served.engines, strict=True)
            ]
            await served.serving("a", "b")

            async def disturb(number):
                if number == 100:
                    served.engines[0].kill()
                    served.engines[0].start()
                elif number == 250:
                    beside[1].end(signal.SIGKILL)
                    beside[1] = stack.enter_context(
                        agent(served.engines[1].url, url, tmp_path / "b", "b")
                    )
                elif number in TOLD:
                    async with httpx.AsyncClient(timeout=ANSWER_S) as http:
                        await http.post(f"{served.engines[1].url}{TOLD[number]}")

            slots = asyncio.Semaphore(AT_ONCE)

            async def one(number):
                async with slots:
                    await disturb(number)
                    await served.send(number, prompts.next())

            async with asyncio.TaskGroup() as tasks:
                for number in range(REQUESTS):
                    tasks.create_task(one(number))
            await served.serving("a", "b")
            assert await served.differences(VllmPrompts(3)) == []
            held = SentPrompt(tuple(range(5, 5 + 4 * BLOCK)), ADAPTER, None)
            await served.complete(served.engines[0].url, held)
            await served.load_another_adapter(tmp_path / "other-adapter", held)
            assert await served.differences(VllmPrompts(3), 60) == []
