"""How fast KV blocks move between tiers, against one plain copy of as many contiguous bytes.

    python -m loadtest.bench_tiers --json out/bench_tiers.json

Each move that workers make is measured. Blocks come from scattered slots and go into slots in a row
or into scattered ones. If they come from disk, the slots on disk are in a row or scattered. Each
round makes all these copies, and one of as many bytes in one piece: from tensor to tensor, into a
file, or out of one. Without a CUDA device, the device tier is host memory as well. The disk is as
fast as the kernel's page cache makes it. Blocks on disk have checksums; the plain copy has none.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from app.core.types import Tier
from app.http.server import collect_seldom
from loadtest.command import distinct, option
from loadtest.harness import bench, grid
from workers.kv.copies import Copies
from workers.kv.disk import SlotFile
from workers.kv.identity import IDENTITY_BYTES, BlockIdentity
from workers.kv.memory import KVShape, MemoryPool, host_pool
from workers.kv.slots import Slot
from workers.kv.tables import Move

BLOCK_KIB = (16, 64, 256, 1024, 4096)
PAIRS = (
    (Tier.DEVICE, Tier.HOST),
    (Tier.DEVICE, Tier.DISK),
    (Tier.HOST, Tier.DEVICE),
    (Tier.HOST, Tier.DISK),
    (Tier.DISK, Tier.DEVICE),
)


def shape_of(block_bytes: int) -> KVShape:
    """A block of 16 tokens and 4 layers, with as many heads as make the size."""
    one_head = KVShape(
        num_layers=4, num_kv_heads=1, head_size=16, dtype=torch.float32, block_size=16
    )
    return KVShape(
        num_layers=4,
        num_kv_heads=block_bytes // one_head.block_bytes,
        head_size=16,
        dtype=torch.float32,
        block_size=16,
    )


class Bench:
    """Tiers with room for twice the blocks copied at once, so that these can be scattered."""

    def __init__(self, block_bytes: int, num_blocks: int, folder: Path, stack: ExitStack) -> None:
        shape = shape_of(block_bytes)
        self.num_blocks = num_blocks
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pools = {
            Tier.DEVICE: MemoryPool(shape, 2 * num_blocks, self.device),
            Tier.HOST: host_pool(shape, 2 * num_blocks),
        }
        for pool in self.pools.values():
            pool.words.random_()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.disk = stack.enter_context(
            closing(SlotFile(folder, block_bytes=block_bytes, num_slots=2 * num_blocks))
        )
        self.transfers = Copies(self.pools, self.disk)
        self.plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, self.plain)
        rng = np.random.default_rng(0)
        self.source_ids, self.scattered = (
            rng.permutation(2 * num_blocks)[:num_blocks].tolist() for _ in range(2)
        )
        self.packed = list(range(num_blocks))
        self.blocks = [BlockIdentity(n.to_bytes(IDENTITY_BYTES)) for n in range(num_blocks)]

    def measure(self, source: Tier, target: Tier, rounds: int) -> dict[str, Any]:
        """GB/s of the plain copy, and the other copies' rates relative to it in the same round."""
        on_disk = Tier.DISK in (source, target)
        in_a_row = self.source_ids, self.packed
        if source is Tier.DISK:
            in_a_row = self.packed, self.scattered
            for slots in (self.packed, self.source_ids):
                self._copy(target, source, self.packed, slots)()
        copies: dict[str, Callable[[], None]] = {
            "plain": self._plain(source, target),
            "packed": self._copy(source, target, *in_a_row),
            "scattered": self._copy(source, target, self.source_ids, self.scattered),
        }
        seconds: dict[str, list[float]] = {name: [] for name in copies}
        rng = random.Random(0)
        for n in range(rounds + 1):
            # In random order: warm caches, and threads that wait for more work, favour no copy.
            for name in rng.sample(list(copies), len(copies)):
                start = time.perf_counter()
                copies[name]()
                if n:  # the first round finds pages not there yet
                    seconds[name].append(time.perf_counter() - start)
        if not on_disk:  # there, checksums do this
            for target_ids in (self.packed, self.scattered):
                self._check(source, target, target_ids)
        num_bytes = self.num_blocks * self.disk.block_bytes
        ratios = {
            name: median(
                plain / took for plain, took in zip(seconds["plain"], seconds[name], strict=True)
            )
            for name in copies
            if name != "plain"
        }
        return {"plain_gb_per_s": num_bytes / median(seconds["plain"]) / 1e9, **ratios}

    def _copy(
        self, source: Tier, target: Tier, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> Callable[[], None]:
        sources = [Slot(block_id) for block_id in source_ids]
        for slot, block in zip(sources, self.blocks, strict=True):
            slot.block = block
        targets = [Slot(block_id) for block_id in target_ids]
        move = Move(source, target, sources, targets, self.blocks)

        def copy() -> None:
            done = self.transfers.carry_out(move)
            if done < len(source_ids):
                raise click.ClickException(f"{done} of {len(source_ids)} blocks were copied")

        return copy

    def _check(self, source: Tier, target: Tier, target_ids: Sequence[int]) -> None:
        """Raises ClickException unless a copy from `source_ids` brings what is there."""
        wanted, words = self.pools[source].words, self.pools[target].words
        words.random_()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self._copy(source, target, self.source_ids, target_ids)()
        if not torch.equal(wanted[self.source_ids].cpu(), words[target_ids].cpu()):
            raise click.ClickException(f"copies from {source.name} to {target.name} are wrong")

    def _plain(self, source: Tier, target: Tier) -> Callable[[], None]:
        memory = {tier: pool.words[: self.num_blocks] for tier, pool in self.pools.items()}
        staged = {tier: self._in_host_memory(words) for tier, words in memory.items()}

        def copy() -> None:
            memory[target].copy_(memory[source])
            if self.device == "cuda":
                torch.cuda.synchronize()

        def write() -> None:
            if memory[source].is_cuda:
                staged[source].copy_(memory[source])
            data = staged[source].numpy().data.cast("B")
            done = 0
            while done < len(data):
                done += os.pwrite(self.plain, data[done:], done)

        def read() -> None:
            data = staged[target].numpy().data.cast("B")
            done = 0
            while done < len(data):
                done += os.preadv(self.plain, [data[done:]], done)
            if memory[target].is_cuda:
                memory[target].copy_(staged[target])
                torch.cuda.synchronize()

        if source is Tier.DISK:
            data = staged[target].numpy().data.cast("B")
            os.pwrite(self.plain, data, 0)
            return read
        return write if target is Tier.DISK else copy

    @staticmethod
    def _in_host_memory(words: Tensor) -> Tensor:
        """Returns their place between a device and the disk; on a CPU, the same memory."""
        if words.is_cpu:
            return words
        return torch.zeros(words.shape, dtype=words.dtype, pin_memory=True)


def measure(block_kib: Sequence[int], mib: int, rounds: int, folder: Path) -> dict[str, Any]:
    """The figures by pair of tiers, then by block size."""
    collect_seldom()  # as workers do
    pairs: dict[str, dict[str, Any]] = {f"{a.name}-{b.name}".lower(): {} for a, b in PAIRS}
    for size in block_kib:
        with ExitStack() as stack:
            here = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
            bench = Bench(size << 10, max(2, (mib << 10) // size), here, stack)
            for source, target in PAIRS:
                name = f"{source.name}-{target.name}".lower()
                pairs[name][str(size)] = bench.measure(source, target, rounds)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "mib": mib,
        "rounds": rounds,
        "pairs": pairs,
    }


def show(result: dict[str, Any], console: Console) -> None:
    title = f"Blocks between tiers, {result['mib']} MiB at once, on {result['device']}"
    columns = {
        "plain,\nGB/s": "{plain_gb_per_s:.1f}",
        "in a row": "{packed:.2f}",
        "scattered": "{scattered:.2f}",
    }
    rows = (
        ([pair, size], n) for pair, sizes in result["pairs"].items() for size, n in sizes.items()
    )
    console.print(grid(["tiers", "block,\nKiB"], columns, rows, title=title))


def _of_whole_heads(
    context: click.Context, option: click.Parameter, kib: tuple[int, ...]
) -> tuple[int, ...]:
    one_head_kib = shape_of(8 << 10).block_bytes >> 10
    if bad := [size for size in kib if size % one_head_kib]:
        raise click.BadParameter(f"{bad[0]} is no multiple of {one_head_kib}")
    return distinct(context, option, kib)


main = bench(
    measure,
    show,
    option(
        "--kib block_kib",
        BLOCK_KIB,
        "Block sizes in KiB, multiples of 8: one head of all layers.",
        several=True,
        callback=_of_whole_heads,
    ),
    option("--mib", 128, "MiB copied at once."),
    option("--rounds", 15),
    option(
        "--folder",
        ".",
        "Folder for the disk tier.",
        click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    ),
)

if __name__ == "__main__":
    main()
