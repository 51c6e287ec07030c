"""Pools of KV blocks, and maps of blocks to copy."""

import torch

from tests.workers.kv.words import named
from workers.kv.memory import KVShape, MemoryPool
from workers.kv.slots import Slot
from workers.kv.tables import Move

SMALL = KVShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float32, block_size=2)
ODD = KVShape(num_layers=5, num_kv_heads=1, head_size=3, dtype=torch.bfloat16, block_size=3)
WIDE = KVShape(num_layers=5, num_kv_heads=4, head_size=64, dtype=torch.float32, block_size=16)
"""32 KiB a layer: two layers make a group, and the last group has one."""
NUM_BLOCKS = 12


def pool_of(shape, seed, num_blocks=NUM_BLOCKS):
    pool = MemoryPool(shape, num_blocks)
    pool.words.random_(generator=torch.Generator().manual_seed(seed))
    return pool


def moved(source, target, source_ids, target_ids):
    """What the target should hold afterwards."""
    expected = target.clone()
    for s, t in zip(source_ids, target_ids, strict=True):
        expected[t] = source[s]
    return expected


MAPS = {
    "shuffled": ([7, 2, 9, 4], [0, 3, 5, 11]),
    "packed": ([7, 2, 9, 4], [3, 4, 5, 6]),
    "runs": ([1, 2, 3, 8, 9, 0], [5, 6, 7, 1, 2, 0]),
    "all": (list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))),
    "one": ([4], [9]),
}


def filled(pool, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 100, pool.kv.shape, dtype=torch.uint8, generator=generator)
    pool.kv.copy_(bits.to(pool.shape.dtype))
    return pool


def same(one, other):
    """Compares bits, as torch cannot compare every type that it stores."""
    return torch.equal(
        one.contiguous().view(torch.uint8).cpu(), other.contiguous().view(torch.uint8).cpu()
    )


def joined(ranks):
    """What the ranks hold together: (num_blocks, num_layers, *whole layer_shape)."""
    return torch.cat([pool.kv for pool in ranks], -2)


def move_of(source, target, source_ids, target_ids):
    """A move of the blocks 0, 1, … between slots of two tiers."""
    sources = [Slot(block_id) for block_id in source_ids]
    for n, slot in enumerate(sources):
        slot.block = named(n)
    blocks = [slot.block for slot in sources]
    return Move(source, target, sources, [Slot(block_id) for block_id in target_ids], blocks)
