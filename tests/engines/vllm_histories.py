"""Overlaps that the index tells in histories of vLLM's own KV cache manager (vllm_manager.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from math import gcd, lcm
from pathlib import Path
from typing import Any

import click
import orjson

from app.core.hashing import compute_local_hashes, compute_sequence_hashes
from app.core.overlaps import Resume, ReuseRule
from workers.agent.ownership import Ownership
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored

Group = dict[str, Any]
VENV = Path(os.environ.get("KVROUTE_TEST_VLLM", Path(__file__).parents[2] / ".venv-vllm"))
SOURCES = os.environ.get("KVROUTE_TEST_VLLM_SOURCES", "")
"""A folder with another version of the package vllm, to be taken instead of the one in VENV."""


def full(block):
    return {"kind": "full", "block": block}


def sliding(block, window):
    return {"kind": "sliding", "block": block, "window": window}


def mamba(block, mode="align"):
    return {"kind": "mamba", "block": block, "mode": mode}


def case(name, *groups, num_blocks, **about):
    """index: tokens per block of the index. hash: those that the engine hashes together. drop,
    lookahead: for a drafter. retention: sparse checkpoints, every so many tokens."""
    unit = lcm(*(group["block"] for group in groups))
    return {
        "name": name,
        "groups": groups,
        "num_blocks": num_blocks,
        "unit": unit,
        "hash": gcd(*(group["block"] for group in groups)),
        "index": 16,
        "budget": 6 * unit,
        "longest": 36 * unit,
    } | about


GEMMA = full(16), sliding(16, 65)
CASES = [
    case("windows", *GEMMA, num_blocks=250),
    case("windows of two lengths", *GEMMA, sliding(16, 200), num_blocks=350),
    case("windows, two groups with full attention", full(16), *GEMMA, num_blocks=350),
    case("windows of shorter blocks", full(32), sliding(16, 65), num_blocks=250),
    case("windows, most blocks left out", full(64), sliding(16, 30), num_blocks=250),
    case("windows, sparse", *GEMMA, num_blocks=250, retention=128),
    case("windows, only at the end of prompts", *GEMMA, num_blocks=250, retention=0),
    case("states", full(32), mamba(32), num_blocks=150),
    case("states, two groups", full(64), mamba(64), mamba(64), num_blocks=150),
    case("states, blocks of 528", full(528), mamba(528), num_blocks=120),
    case("states of each block", full(16), mamba(16, "all"), num_blocks=200),
    case("states of longer blocks", full(16), mamba(64), num_blocks=250),
    case("states within blocks", full(64), mamba(64), num_blocks=150, hash=16),
    case("states, sparse", full(32), mamba(32), num_blocks=150, retention=128),
    case("states and windows", *GEMMA, mamba(16), num_blocks=300),
    case("blocks of 256", full(256), num_blocks=60),
    case("drafter before 0.33", full(16), num_blocks=250, drop=True),
    case("drafter before 0.33, blocks of 256", full(256), num_blocks=60, drop=True),
    case("drafter before 0.33, windows", *GEMMA, num_blocks=250, drop=True),
    case("drafter before 0.33, states", full(32), mamba(32), num_blocks=150, drop=True),
    case(
        "drafter before 0.33, states within blocks",
        full(64),
        mamba(64),
        num_blocks=150,
        hash=16,
        drop=True,
    ),
    *(
        case(f"drafter, blocks of {size}", full(size), num_blocks=100, lookahead=1)
        for size in (16, 32, 64, 128, 256)
    ),
    case("drafter of three tokens", full(64), num_blocks=100, lookahead=3),
    case("drafter, two groups", full(16), full(16), num_blocks=250, lookahead=1),
    case("drafter, windows", *GEMMA, num_blocks=250, lookahead=1),
    case("drafter, states", full(32), mamba(32), num_blocks=150, lookahead=1),
    case(
        "chunked attention",
        full(16),
        {"kind": "chunked", "block": 16, "chunk": 128},
        num_blocks=250,
    ),
    case("drafter before 0.33, states and windows", *GEMMA, mamba(16), num_blocks=300, drop=True),
]

STORED, REMOVED = BlockStored.__struct_fields__, BlockRemoved.__struct_fields__


@dataclass(slots=True)
class Counts:
    probes: int = 0
    over: int = 0
    under: int = 0
    reused_tokens: int = 0
    over_tokens: int = 0
    under_tokens: int = 0
    most_over: int = 0
    held_over: int = 0
    marked: int = 0
    blocks: int = 0
    """Blocks that were published, after each step, and those that say where the engine goes on."""

    def add(self, promised, reused, held):
        self.probes += 1
        self.over += promised > reused
        self.under += promised < reused
        self.reused_tokens += reused
        self.over_tokens += max(0, promised - reused)
        self.under_tokens += max(0, reused - promised)
        self.most_over = max(self.most_over, promised - reused)
        self.held_over += held > reused


class Index:
    def __init__(self, case, block_size):
        self.block_size = block_size
        unit, lookahead = case["unit"] // block_size, case.get("lookahead", 0)
        dropped = case["groups"][0]["block"] // block_size if case.get("drop") else 0
        self.rule = ReuseRule(unit, -(-lookahead // block_size), dropped)
        self.ownership = Ownership(self.rule)
        self.blocks = EngineBlocks(
            block_size, recomputed_blocks=dropped, lookahead_blocks=self.rule.lookahead
        )
        self.shown = {}

    def take(self, events):
        for event in events:
            self.ownership.apply(self.blocks.take(event))
        for block, tier, _, back in self.ownership.drain(0):
            if tier is None:
                self.shown.pop(block, None)
            else:
                self.shown[block] = tier, back

    def look_up(self, tokens):
        """Tokens of a prompt that are held, and that are promised to be reused."""
        size = self.block_size
        chain = compute_sequence_hashes(compute_local_hashes(tokens, size))
        held = next((n for n, block in enumerate(chain) if block not in self.shown), len(chain))
        most = (len(tokens) - 1) // size
        back = self.shown[chain[held - 1]][1] if held else 0
        resume = Resume.of(held, back) if back else None
        reused = resume.reused(most) if resume else self.rule.reused(held, most)
        return held * size, reused * size


def events_of(found):
    for one in found:
        match one["type"]:
            case "BlockStored":
                yield BlockStored(**{name: one[name] for name in one if name in STORED})
            case "BlockRemoved":
                yield BlockRemoved(**{name: one[name] for name in one if name in REMOVED})
            case _:
                yield AllBlocksCleared()


def count(lines, *, honest=True):
    """Returns the counts of each case by its name, without those that this vLLM cannot play.

    honest: if not, all that is held is promised.
    """
    counted = {}
    for line in lines:
        row = orjson.loads(line)
        if about := row.get("case"):
            name, index = about["name"], Index(about, about["index"])
        elif "refused" in row:
            continue
        elif "events" in row:
            index.take(events_of(row["events"]))
            marked = sum(back != 0 for _, back in index.shown.values())
            counts = counted.setdefault(name, Counts())
            counts.marked, counts.blocks = counts.marked + marked, counts.blocks + len(index.shown)
        else:
            held, promised = index.look_up(row["tokens"])
            counted[name].add(promised if honest else held, row["reused"], held)
    return counted


def histories(cases):
    environment = os.environ | ({"PYTHONPATH": SOURCES} if SOURCES else {})
    done = subprocess.run(
        [VENV / "bin" / "python", Path(__file__).with_name("vllm_manager.py")],
        input=json.dumps(cases).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=3000,
        env=environment,
    )
    return done.stdout.splitlines()


def main():
    seeds, steps = int(sys.argv[1]), int(sys.argv[2])
    cases = [one | {"seed": seed, "steps": steps} for one in CASES for seed in range(seeds)]
    counted = count(histories(cases))
    click.echo(
        "| engine | prompts | held too much | promised too much | promised too little | by |"
    )
    click.echo("|---|---|---|---|---|---|")
    for name, c in counted.items():
        share = c.under_tokens / max(1, c.reused_tokens)
        click.echo(
            f"| {name} | {c.probes:,} | {c.held_over:,} | {c.over:,} | {c.under:,} | {share:.1%} |"
        )
        click.echo(asdict(c), err=True)


if __name__ == "__main__":
    main()
