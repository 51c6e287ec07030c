"""What hashing a prompt costs, measured in calls of the hash function.

    python -m loadtest.bench_hashing

512 blocks of 16 tokens take 1,024 hashes. The yardstick is a call from Python over the bytes of one
block; 1,100 of them are timed in each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from rich.console import Console
from xxhash import xxh3_64_intdigest

from app.core.hashing import BASE_SEED, Tokens, compute_hashes
from loadtest.command import option
from loadtest.harness import bench, in_turn

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


def measure(rounds: int) -> dict[str, float]:
    """By the form of its tokens: so many calls take as long as hashing a prompt."""
    tokens = np.arange(NUM_BLOCKS * BLOCK_SIZE, dtype="<u4")
    forms: dict[str, Tokens] = {
        "raw u32": tokens.tobytes(),
        "numpy array": tokens,
        "list": tokens.tolist(),
    }
    ways = {name: partial(compute_hashes, form, BLOCK_SIZE) for name, form in forms.items()}
    timed = {name: partial(_seconds, way) for name, way in ways.items()}
    took = in_turn({"": partial(_seconds, _calls), **timed}, rounds)
    return {
        name: CALLS * median(s / calls for s, calls in zip(took[name], took[""], strict=True))
        for name in forms
    }


def show(result: dict[str, float], console: Console) -> None:
    console.print(f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} take as long as so many calls (median):")
    for name, calls in result.items():
        console.print(f"  {name:<12} {calls:,.0f}")


main = bench(measure, show, option("--rounds", 2000))

if __name__ == "__main__":
    main()
