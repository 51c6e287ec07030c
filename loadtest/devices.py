"""How large the torch engine's benchmarks are: seconds on one thread of a CPU, or a card's fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from app.core.settings.worker import WorkerSettings
from loadtest.command import option
from loadtest.traces import VOCABULARY

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Size:
    """model: with random weights. chunk_tokens: named, so that workers agree on it. prompt_tokens,
    shared_tokens: of prompts, and of what two of them have in common. pool_tokens: of the device
    and the host tier; the disk has disk_pools times as many."""

    model: str
    chunk_tokens: int
    prompt_tokens: int
    shared_tokens: int
    pool_tokens: int
    disk_pools: int
    threads: int | None


SIZES = {
    "cpu": Size("40m", 128, 2_048, 1_792, 8_192, 4, 1),
    "cuda": Size("llama-3.1-8b", 1_024, 8_192, 7_168, 32_768, 2, None),
}

device_option = option(
    "--device",
    "cpu",
    "What the torch engine computes on; sizes are such that they fill it.",
    click.Choice(tuple(SIZES)),
)
model_option = option(
    "--model",
    None,
    f"As for `kvroute worker`, with a vocabulary of at least {VOCABULARY:,} tokens. Default: "
    + ", ".join(f"{size.model} on {device}" for device, size in SIZES.items()),
    None,
)


def torch_worker(device: str, model: str | None, pool_tokens: int, **more: Any) -> WorkerSettings:
    """Returns the settings of a torch worker on that device; on a CPU, it has one thread. more: of
    WorkerSettings."""
    size = SIZES[device]
    return WorkerSettings(
        engine="torch",
        model=model or size.model,
        device=device,
        block_size=BLOCK_SIZE,
        threads=size.threads,
        prefill_chunk=size.chunk_tokens,
        kv_pool_tokens=pool_tokens,
        **more,
    )
