"""How long a prompt takes whose KV another worker process hands on, against computing it.

    python -m loadtest.bench_transfer --json out/bench_transfer.json

Two torch workers on this machine, without a router. In each round the target answers three prompts:

- it computes one alone;
- split: the source computes the prompt, and the target goes on from its KV;
- fetch: the source holds the KV of the prompt's first part, and hands that on.

Times are those until the target's first token, without what the source does before. The target
computes the last chunk in any case. Both workers must give the same answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import click
import numpy as np
from rich import box
from rich.console import Console

from app.core.events import CacheEvent
from app.core.settings.worker import WorkerSettings
from loadtest.command import option
from loadtest.devices import SIZES, device_option, model_option, torch_worker
from loadtest.harness import bench, grid
from loadtest.processes import child, received
from loadtest.traces import pseudo_random_tokens
from workers.engines.base import CompletionRequest, Engine, Sampling
from workers.kv.transfer.tcp import BlockSource
from workers.main import host

OUTPUT_TOKENS = 8
GREEDY = Sampling(temperature=0.0)
KINDS = "alone", "split", "fetch"
POOL_PROMPTS = 4
"""Prompts for which a pool has room: from the second round on, memory has been written to before.
The first write to memory takes the machine longer than to bring the KV."""
KEEP_S = 60.0

Figures = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class TransferAnswer:
    """first_s: until its first token. kept: where the prompt's KV is kept now, if it was to be."""

    first_s: float
    tokens: list[int]
    cached_tokens: int
    kept: BlockSource | None


class _NoIndex:
    """Hears of blocks, and tells nobody."""

    def notify(self, events: Iterable[CacheEvent]) -> None:
        del events

    async def published(self) -> bool:
        return True


@asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[Engine]:
    hosted = await asyncio.to_thread(host, settings)
    with closing(hosted):
        engine = hosted.start(_NoIndex())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.run())
            yield engine
            task.cancel()


async def answer(
    engine: Engine, prompt: bytes, source: BlockSource | None = None, keep_s: float = 0.0
) -> TransferAnswer:
    request = CompletionRequest(
        uuid.uuid4().hex, prompt, OUTPUT_TOKENS, GREEDY, source=source, keep_s=keep_s
    )
    generation = engine.complete(request)
    began_s, first_s, cached = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    async for output in generation:
        first_s = first_s or time.perf_counter() - began_s
        tokens += output.token_ids
        cached = output.finished.cached_tokens if output.finished else 0
    return TransferAnswer(first_s, tokens, cached, generation.kept)


async def _serve(target: Connection, settings: WorkerSettings) -> None:
    """Answer each prompt that comes, or hand on what is held of it."""
    async with running(settings) as engine:
        target.send(None)
        while (asked := await asyncio.to_thread(target.recv)) is not None:
            prompt, kind = asked
            if kind == "fetch":
                target.send(await engine.hand_on(prompt, KEEP_S))
            else:
                target.send(await answer(engine, prompt, keep_s=KEEP_S if kind == "split" else 0))


def _run_source(target: Connection, settings: WorkerSettings) -> None:
    asyncio.run(_serve(target, settings))


class SourceWorker:
    """A worker in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, prompt: bytes, kind: str = "") -> TransferAnswer:
        self._pipe.send((prompt, kind))
        answered: TransferAnswer = received(self._pipe)
        return answered

    def hand_on(self, prompt: bytes) -> BlockSource | None:
        self._pipe.send((prompt, "fetch"))
        kept: BlockSource | None = received(self._pipe)
        return kept


async def measure(device: str, model: str | None, tokens: int | None, rounds: int) -> Figures:
    """tokens: of each prompt; None: as many as the device has them usually."""
    tokens = tokens or SIZES[device].prompt_tokens
    return await measure_with(settings_of(device, model, tokens), tokens, rounds)


async def measure_with(settings: WorkerSettings, tokens: int, rounds: int) -> Figures:
    """Returns for each kind the times of all rounds but the first, which finds torch itself
    cold."""
    chunk = settings.prefill_chunk
    assert chunk is not None
    taken: dict[str, list[TransferAnswer]] = {kind: [] for kind in KINDS}
    async with running(settings) as engine:
        with child(_run_source, settings) as pipe:
            await asyncio.to_thread(received, pipe)  # once it has started
            source = SourceWorker(pipe)
            for n in range(len(KINDS) * (rounds + 1)):
                kind = KINDS[n % len(KINDS)]
                given = await _round(engine, source, kind, prompt_of(n, tokens), chunk)
                if n >= len(KINDS):
                    taken[kind].append(given)
    return {
        kind: {
            "seconds": median(each.first_s for each in answers),
            "fetched_tokens": answers[0].cached_tokens,
            "tokens": tokens,
        }
        for kind, answers in taken.items()
    }


async def _round(
    engine: Engine, source: SourceWorker, kind: str, prompt: bytes, chunk: int
) -> TransferAnswer:
    """Raises ClickException unless all that was kept was fetched, and both answer alike."""
    kept = None
    if kind == "split":
        kept = (await asyncio.to_thread(source.answer, prompt, kind)).kept
    elif kind == "fetch":
        await asyncio.to_thread(source.answer, prompt[: len(prompt) // 4 * 3])
        kept = await asyncio.to_thread(source.hand_on, prompt)
    given = await answer(engine, prompt, kept)
    expected = min(kept.num_tokens, _reusable(len(prompt) // 4, chunk)) if kept else 0
    if given.cached_tokens != expected or (kind != "alone" and not kept):
        raise click.ClickException(f"{kind}: {given.cached_tokens} of {expected} tokens came")
    alone = await asyncio.to_thread(source.answer, prompt)
    if alone.tokens != given.tokens:
        raise click.ClickException(f"{kind}: the two workers answer differently")
    return given


def _reusable(tokens: int, chunk: int) -> int:
    """Whole chunks, and never the last token."""
    return (tokens - 1) // chunk * chunk


def prompt_of(number: int, tokens: int) -> bytes:
    positions = np.arange(tokens, dtype=np.uint64) + np.uint64(number * tokens)
    return pseudo_random_tokens(positions, seed=0).astype("<u4").tobytes()


def settings_of(device: str, model: str | None, tokens: int) -> WorkerSettings:
    pool_tokens = POOL_PROMPTS * (tokens + SIZES[device].chunk_tokens)
    return torch_worker(device, model, pool_tokens, host="127.0.0.1", kv_transfer="kvroute")


def show(figures: Figures, console: Console) -> None:
    alone = figures["alone"]
    rows = (
        (
            [kind],
            {
                **numbers,
                "computed": alone["tokens"] - numbers["fetched_tokens"],
                "share": numbers["seconds"] / alone["seconds"],
            },
        )
        for kind, numbers in figures.items()
    )
    columns = {
        "fetched": "{fetched_tokens:,}",
        "computed": "{computed:,}",
        "median": "{seconds:.3f} s",
        "of alone": "{share:.3f}",
    }
    title = f"Time to first token of {alone['tokens']:,} tokens, with KV of another worker"
    caption = "Both workers gave the same answers."
    console.print(grid([""], columns, rows, title=title, caption=caption, box=box.SIMPLE_HEAD))


main = bench(
    measure,
    show,
    device_option,
    model_option,
    option("--tokens", None, "Of each prompt."),
    option("--rounds", 5),
)

if __name__ == "__main__":
    main()
