"""Tiers of a torch engine: the memory and the files of each rank that hold its KV blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from app.core.errors import ConfigError
from app.core.settings.worker import WorkerSettings
from app.core.types import Tier, WorkerKey
from workers.engines.torch.llama import Llama
from workers.kv.copies import Copies
from workers.kv.disk import SlotFile
from workers.kv.identity import BlockIdentity
from workers.kv.manager import BlockManager
from workers.kv.memory import KVShape, MemoryPool, host_pool
from workers.kv.moves import AdmissionPolicy, WritePolicy
from workers.kv.tables import Move

DEFAULT_POOL_BYTES = 1 << 30
"""Bytes of the device's KV pool, of all ranks together, if none is given."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of all ranks; a block has the same slot in each, which holds its own heads.

    num_blocks: slots of each tier. pools: on the device, by rank. carry_out: copies a move's
    blocks.
    """

    num_blocks: Mapping[Tier, int]
    manager: BlockManager
    pools: Sequence[MemoryPool]
    carry_out: Callable[[Move], int]


def identity_of(folder: Path) -> str:
    """Returns a text that changes whenever files of a checkpoint do."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def fingerprint_of(settings: WorkerSettings, model: Llama, shape: KVShape, identity: str) -> int:
    """Returns a hash of everything that decides which bits a block of KV has."""
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else str(model.device)
    computed = (
        *(version("kvroute"), torch.__version__, torch.backends.cpu.get_cpu_capability()),
        *(device, torch.get_num_threads(), settings.prefill_chunk),
    )
    return xxh3_64_intdigest(repr((identity, model.config, computed)).encode(), shape.fingerprint)


def open_tiers(settings: WorkerSettings, model: Llama, identity: str, stack: ExitStack) -> Tiers:
    """Opens tiers for as long as `stack` is open. identity: of the model. Raises ConfigError."""
    shape = model.kv_shape(settings.block_size)
    ranks = shape.split(settings.tp_size)
    num_blocks = _num_blocks(settings, shape)
    # Memory and files first: they fail at once if there is no room for this many blocks.
    pools = _pools(settings, ranks, num_blocks, model.device)
    disks = []
    if Tier.DISK in num_blocks:
        for rank in ranks:
            fingerprint = fingerprint_of(settings, model, rank, identity)
            file = _slot_file(settings, rank, num_blocks[Tier.DISK], fingerprint)
            disks.append(stack.enter_context(closing(file)))
    manager = BlockManager(
        num_blocks,
        write=WritePolicy(settings.write_policy),
        admission=AdmissionPolicy(min_uses=settings.store_min_uses),
        reuse_multiple=(settings.prefill_chunk or settings.block_size) // settings.block_size,
        now=time.monotonic,
    )
    if disks:
        manager.adopt(Tier.DISK, _stored(disks))
    transfers = [Copies(tiers, disks[rank] if disks else None) for rank, tiers in enumerate(pools)]
    return Tiers(
        num_blocks, manager, [tiers[Tier.DEVICE] for tiers in pools], carried_out(transfers)
    )


def carried_out(ranks: Sequence[Copies]) -> Callable[[Move], int]:
    """Returns what copies a move's blocks in all ranks, and counts the leading ones that all
    copied.

    Layers are there once the last rank has them.
    """
    *others, last = ranks

    def carry_out(move: Move) -> int:
        done = len(move.blocks)
        for rank in others:
            done = min(done, rank.carry_out(replace(move), done))
        return last.carry_out(move, done)

    return carry_out


def _num_blocks(settings: WorkerSettings, shape: KVShape) -> dict[Tier, int]:
    device = (settings.kv_pool_tokens or 0) // settings.block_size
    num_blocks = {
        Tier.DEVICE: device or max(1, DEFAULT_POOL_BYTES // shape.block_bytes),
        Tier.HOST: settings.host_pool_tokens // settings.block_size,
        Tier.DISK: settings.disk_pool_tokens // settings.block_size,
    }
    return {tier: number for tier, number in num_blocks.items() if number}


def _pools(
    settings: WorkerSettings,
    ranks: Sequence[KVShape],
    num_blocks: Mapping[Tier, int],
    device: torch.device,
) -> list[dict[Tier, MemoryPool]]:
    pools = []
    try:
        for rank in ranks:
            on = rank_device(device, rank)
            tiers = {Tier.DEVICE: MemoryPool(rank, num_blocks[Tier.DEVICE], on)}
            if Tier.HOST in num_blocks:
                tiers[Tier.HOST] = host_pool(rank, num_blocks[Tier.HOST])
            pools.append(tiers)
    except ConfigError as error:
        raise ConfigError(
            f"kv_pool_tokens {settings.kv_pool_tokens}, "
            f"host_pool_tokens {settings.host_pool_tokens}: {error}"
        ) from error
    return pools


def rank_device(device: torch.device, rank: KVShape) -> torch.device:
    """Returns the rank's own GPU, if any will do and there are as many; else the one device."""
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() >= rank.tp_size:
        return torch.device("cuda", rank.tp_rank)
    return device


def _slot_file(
    settings: WorkerSettings, rank: KVShape, num_slots: int, fingerprint: int
) -> SlotFile:
    folder = Path(settings.disk_folder) / str(WorkerKey(settings.resolved_id(), settings.dp_rank))
    try:
        return SlotFile(
            folder / f"rank-{rank.tp_rank}" if rank.tp_rank else folder,
            block_bytes=rank.block_bytes,
            num_slots=num_slots,
            fingerprint=fingerprint,
        )
    except (OSError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"disk_folder: {settings.disk_folder!r} cannot hold disk_pool_tokens "
            f"{settings.disk_pool_tokens}: {error}"
        ) from error


def _stored(
    disks: Sequence[SlotFile],
) -> Iterator[tuple[int, int, BlockIdentity, BlockIdentity | None]]:
    """Yields what the ranks' disks hold alike: a killed worker may leave one ahead of others."""
    first, *others = (dict(disk.records()) for disk in disks)
    for slot, record in first.items():
        if all(other.get(slot) == record for other in others):
            yield slot, record.generation, record.block, record.parent
