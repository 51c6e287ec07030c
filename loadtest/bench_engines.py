"""Cache-aware routing on running engines, beside round robin: conversations through the front door.

    python -m loadtest.bench_engines --engine-url http://127.0.0.1:8000 --engine-url http://127.0.0.1:8001

The engines are vLLM or SGLang, publish events and serve one model. An agent is started beside each,
and a router before them, once for each policy and seed. Each time the conversations are new, so
that nothing is cached of them; turn for turn, a conversation's prompt begins with its last one.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import click
import httpx
import orjson
import stamina

from app.http.server import run
from app.local.child import start_child
from app.local.redis_server import EmbeddedRedis, free_port
from loadtest.command import option
from loadtest.experiment import Rows, experiment
from loadtest.servers import routers

POLICIES = "round_robin", "latency"
NAMESPACE = "bench-engines"
OUTPUT_TOKENS = 16
ANSWER_TIMEOUT_S = 120.0
TEXT = "the quick brown fox jumps over a lazy dog and says hello to each of you"
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Conversations:
    """words_of_system, words_of_turn: of the prompt that all share, and of each question."""

    number: int
    turns: int
    at_once: int
    words_of_system: int
    words_of_turn: int


CONVERSATIONS = {
    "cpu": Conversations(50, 4, 4, 60, 60),
    "cuda": Conversations(128, 4, 32, 2_048, 768),
}
"""Sizes by what the engines compute on: the last prompts have hundreds of tokens, or some 6,000, of
which 32 at once come to 25 GB of KV of an 8B model."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of one request. ttft_s: until the first word of the answer, seconds."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def agent_of(*flags: str, redis_url: str, namespace: str) -> Iterator[int]:
    """`kvroute agent` as a process, once it is healthy; its process id. flags: of its engines."""
    port = free_port()
    with TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        process: subprocess.Popen[bytes] = start_child(
            (
                *(sys.executable, "-m", "app.cli", "agent"),
                *flags,
                f"--redis-url={redis_url}",
                f"--namespace={namespace}",
                f"--memory-folder={folder}",
                f"--port={port}",
            ),
            output=log,
        )
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/health")
            yield process.pid
        except httpx.HTTPError as error:
            printed = Path(folder, "log").read_text(errors="replace")
            raise click.ClickException(f"{flags[0]}: {error}\n{printed}") from None
        finally:
            process.terminate()
            process.wait()


def agent_beside(
    engine_url: str, redis_url: str, namespace: str, name: str
) -> AbstractContextManager[int]:
    flags = f"--engine-url={engine_url}", f"--worker-id={name}"
    return agent_of(*flags, redis_url=redis_url, namespace=namespace)


@stamina.retry(on=httpx.HTTPError, timeout=60.0, attempts=None, wait_max=1.0)
def _wait_until_ready(url: str) -> None:
    httpx.get(url, timeout=2.0).raise_for_status()


@stamina.retry(on=(httpx.HTTPError, IndexError), timeout=30.0, attempts=None, wait_max=1.0)
def _first_model(base_url: str) -> str:
    """A router lists models only once it has heard of its workers."""
    answer = httpx.get(f"{base_url}/v1/models", timeout=10.0).raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def converse(base_url: str, model: str, asked: Conversations, seed: int) -> list[Turn]:
    rng = random.Random(seed)
    slots = asyncio.Semaphore(asked.at_once)
    turns: list[Turn] = []
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(base_url, timeout=timeout) as session:
        system = {"role": "system", "content": _text(rng, asked.words_of_system)}

        async def one(own: random.Random) -> None:
            messages = [system]
            for _ in range(asked.turns):
                messages.append({"role": "user", "content": _text(own, asked.words_of_turn)})
                async with slots:
                    reply, turn = await ask(session, model, messages)
                turns.append(turn)
                messages.append({"role": "assistant", "content": reply})

        async with asyncio.TaskGroup() as tasks:
            for _ in range(asked.number):
                tasks.create_task(one(random.Random(rng.random())))
    return turns


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def ask(
    session: aiohttp.ClientSession, model: str, messages: Sequence[dict[str, str]]
) -> tuple[str, Turn]:
    """The answer's text, and what was measured. Raises aiohttp.ClientError."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first_s: float | None = None
    reply = ""
    usage: dict[str, Any] = {}
    async with session.post("/v1/chat/completions", json=body, raise_for_status=True) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = orjson.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if first_s is None and choice["delta"].get("content") is not None:
                    first_s = time.perf_counter() - begin
                reply += choice["delta"].get("content") or ""
    details = usage.get("prompt_tokens_details") or {}
    if first_s is None:
        first_s = time.perf_counter() - begin
    return reply, Turn(first_s, usage["prompt_tokens"], details.get("cached_tokens") or 0)


def play(
    engine_urls: Sequence[str], policy: str, asked: Conversations, seed: int
) -> Mapping[str, Any]:
    """One round with agents, a router and a Redis of its own; its conversations are new."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(EmbeddedRedis()).url
        for number, url in enumerate(engine_urls):
            stack.enter_context(agent_beside(url, redis_url, NAMESPACE, f"e{number}"))
        [url] = stack.enter_context(routers(1, redis_url, namespace=NAMESPACE, policy=policy))
        turns = run(converse(url, _first_model(url), asked, random.randrange(1_000_000) + seed))
    cached = sum(turn.cached_tokens for turn in turns)
    return {
        "cached_share": cached / sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": cached,
        "mean_ttft_ms": fmean(turn.ttft_s for turn in turns) * 1000,
    }


def rows(engine_urls: Sequence[str], device: str, **sizes: int | None) -> Rows:
    """sizes: in place of those of the device; fields of Conversations."""
    asked = replace(CONVERSATIONS[device], **{name: n for name, n in sizes.items() if n})
    return {"": {policy: partial(play, engine_urls, policy, asked) for policy in POLICIES}}


main = experiment(
    rows,
    (
        ("tokens from cache", "cached_tokens", "{:,.0f}"),
        ("share of prompts", "cached_share", "{:.1%}"),
        ("mean TTFT, ms", "mean_ttft_ms", "{:.0f}"),
    ),
    option("--engine-url engine_urls", None, "Two or more.", str, multiple=True, required=True),
    option(
        "--device",
        "cpu",
        "What the engines compute on; the options below are such that they fill it.",
        click.Choice(tuple(CONVERSATIONS)),
    ),
    option("--conversations number", None),
    option("--turns", None, "Of each conversation."),
    option("--at-once", None, "Requests in flight at most."),
    option("--system-words words_of_system", None),
    option("--turn-words words_of_turn", None),
    labels="policy",
    seeds=3,
    middle=median,
    one_by_one=True,
)

if __name__ == "__main__":
    main()
