"""Prompts of one-letter blocks, and a block manager without copies. Each block is named by the
letters up to it."""

import sys

from app.core.types import Tier
from workers.kv.identity import IDENTITY_BYTES, BlockIdentity, hash_of
from workers.kv.manager import BlockManager

DEVICE, HOST, DISK = Tier


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def named(number, twin=0):
    """A block whose sequence hash is `number`. twin: tells those apart that have the same."""
    return BlockIdentity(bytes([twin]) + number.to_bytes(IDENTITY_BYTES - 1))


def chain(word):
    """The blocks of `word`: for `ABC`, those of A, AB and ABC."""
    return [named(int.from_bytes(word[: n + 1].encode())) for n in range(len(word))]


def block(word):
    return chain(word)[-1]


def hashes(word):
    """Of the blocks of `word`, as events have them."""
    return tuple(map(hash_of, chain(word)))


def manager_of(device=8, host=0, disk=0, clock=None, **options):
    sizes = {tier: size for tier, size in zip(Tier, (device, host, disk), strict=True) if size}
    return BlockManager(sizes, now=clock or Clock(), **options)


def computed(manager, word, tail=0):
    """A request that has filled the blocks of `word` and holds `tail` more slots."""
    table = manager.prepare(chain(word), len(word) + tail)
    finish_all(manager)
    manager.register(table, chain(word)[table.num_matched :])
    manager.check()
    return table


def cached(manager, word):
    """Compute the blocks of `word` and release them."""
    manager.release(computed(manager, word))
    manager.check()


def finish_all(manager, num_done=None):
    """Finish all planned moves; in each, `num_done` blocks were copied, or all if None."""
    finished = []
    while moves := manager.moves.take_planned():
        for move in moves:
            manager.finish(move, len(move.blocks) if num_done is None else num_done)
            manager.check()
        finished += moves
    return finished


def evict(manager, tier, count):
    """A whole eviction: choose, store, withdraw and reclaim."""
    eviction = manager.evict(tier, count)
    finish_all(manager)
    manager.withdraw(eviction)
    manager.reclaim(eviction)
    manager.check()
    return eviction


def free(manager, tier=DEVICE):
    return manager.tiers[tier].num_free


def idle(manager, tier=DEVICE):
    return manager.tiers[tier].num_idle


def count_calls(work):
    """Number of calls of Python and C functions."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
