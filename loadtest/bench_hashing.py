"""What hashing a prompt costs, measured in calls of the hash function.

    python -m loadtest.bench_hashing

512 blocks of 16 tokens take 1,024 hashes. The yardstick is a call from Python over the bytes of one
block; 1,100 of them are timed in each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import click
import numpy as np
from xxhash import xxh3_64_intdigest

from app.core.hashing import BASE_SEED, Tokens, compute_hashes
from app.options import POSITIVE
from loadtest.command import Command

NUM_BLOCKS = 512
BLOCK_SIZE = 16
CALLS = 1100


def _calls() -> None:
    block = bytes(4 * BLOCK_SIZE)
    for _ in range(CALLS):
        xxh3_64_intdigest(block, seed=BASE_SEED)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@click.command(cls=Command)
@click.option("--rounds", default=2000, show_default=True, type=POSITIVE)
def main(rounds: int) -> None:
    """Time hashing a prompt against plain calls to the hash function."""
    tokens = np.arange(NUM_BLOCKS * BLOCK_SIZE, dtype="<u4")
    forms: dict[str, Tokens] = {
        "raw u32": tokens.tobytes(),
        "numpy array": tokens,
        "list": tokens.tolist(),
    }
    ratios: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        yardstick = _seconds(_calls)
        for name, form in forms.items():
            ratios[name].append(_seconds(lambda f=form: compute_hashes(f, BLOCK_SIZE)) / yardstick)  # type: ignore[misc]
    click.echo(f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} take as long as so many calls (median):")
    for name, values in ratios.items():
        click.echo(f"  {name:<12} {CALLS * median(values):,.0f}")


if __name__ == "__main__":
    main()
