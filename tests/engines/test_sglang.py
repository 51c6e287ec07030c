"""SGLang's own radix cache and publisher, and an agent beside them: see `make test-sglang`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.local.redis_server import EmbeddedRedis, free_port
from tests.e2e.engines import agent
from tests.edge.conftest import started_replica
from tests.eventually import eventually

VENV = Path(os.environ.get("KVROUTE_TEST_SGLANG", Path(__file__).parents[2] / ".venv-sglang"))
"""The virtual environment that install_sglang.sh makes."""
PAGE, PAGES = 16, 120

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@contextmanager
def sglang(http_port: int, events_port: int, replay_port: int) -> Iterator[subprocess.Popen[str]]:
    if not VENV.exists():
        pytest.fail(f"there is no {VENV}: make test-sglang installs SGLang there")
    script = Path(__file__).with_name("sglang_engine.py")
    numbers = map(str, (http_port, events_port, replay_port, PAGE, PAGES))
    with subprocess.Popen(
        [VENV / "bin" / "python", script, *numbers], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield process
        finally:
            process.kill()


class Prompts:
    """Prompts that share prefixes, and salts, seeded."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._told: list[tuple[list[int], str | None]] = []

    def next(self) -> tuple[list[int], str | None]:
        choice = self._random
        begun, salt = choice.choice(self._told) if self._told else ([], None)
        kept = begun[: choice.randrange(len(begun) + 1)] if choice.random() < 0.8 else []
        if not kept:
            salt = choice.choice([None, None, "red"])
        more = [choice.randrange(1, 50_000) for _ in range(choice.randrange(1, 120))]
        prompt = [*kept, *more][:600]
        self._told = [*self._told[-30:], (prompt, salt)]
        return prompt, salt


async def test_overlap_is_what_sglang_finds_after_evictions_resets_and_kills(
    one_redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    ports = [free_port() for _ in range(3)]
    url, prompts = f"http://127.0.0.1:{ports[0]}", Prompts(1)
    async with (
        started_replica(one_redis_server.url) as router,
        httpx.AsyncClient(base_url=url, timeout=30) as engine,
    ):

        async def serving() -> list[str]:
            listed: Any = (await router.get("/v1/workers")).json()
            return [worker["worker_id"] for worker in listed["workers"]]

        async def overlap(tokens: list[int], salt: str | None) -> int:
            asked = {"token_ids": tokens, "reserve": False, "explain": True}
            asked |= {"cache_namespace": salt} if salt else {}
            answer = (await router.post("/v1/route", json=asked)).json()
            [found] = answer["candidates"]
            return sum(found["overlap_blocks"].values())

        async def check(number: int) -> None:
            """At rest, what the router says of each prompt is what SGLang then finds."""
            for _ in range(number):
                tokens, salt = prompts.next()
                most = (len(tokens) - 1) // PAGE
                stated = min(await overlap(tokens, salt), most)
                answer = await engine.post("/ask", json={"tokens": tokens, "salt": salt})
                assert answer.json()["cached"] == stated * PAGE

                async def look(tokens: list[int] = tokens, salt: str | None = salt) -> int:
                    return await overlap(tokens, salt)

                pages = len(tokens) // PAGE
                await eventually(look, lambda seen, pages=pages: seen == pages)

        with sglang(*ports):
            for number in (signal.SIGTERM, signal.SIGKILL):
                with agent(url, one_redis_server.url, tmp_path) as beside:
                    await eventually(serving, lambda seen: seen == ["e"], within_s=30.0)
                    await check(60)
                    await engine.post("/reset")
                    await eventually(lambda: overlap([1] * 16, None), lambda seen: seen == 0)
                    await check(60)
                    beside.end(number)
                await eventually(serving, lambda seen: seen == [], within_s=30.0)
