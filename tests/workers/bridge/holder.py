"""An engine's events, and a model of the index that is fed with what they mean."""

from app.core.hashing import compute_local_hashes, compute_sequence_hashes, seed_for
from app.core.overlaps import EVERY_BLOCK
from tests.workers.kv.cache_model import CacheModel
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import BlockStored

SIZE = 4
TOKENS = list(range(100, 100 + 8 * SIZE))


def chain_of(tokens, lora=None, salt=None, items=None):
    local = compute_local_hashes(tokens, SIZE, seed=seed_for(lora, salt), mm_hashes=items)
    return compute_sequence_hashes(local)


CHAIN = chain_of(TOKENS)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Holder:
    """Feeds an engine's events through EngineBlocks into a plain model of the index."""

    def __init__(self):
        self.clock = Clock()
        self.blocks = EngineBlocks(SIZE, self.clock)
        self.cache = CacheModel()

    def take(self, *events):
        for event in events:
            for change in self.blocks.take(event):
                self.cache.take(change)

    def after(self, *events):
        """What the engine reuses of CHAIN once it has sent these."""
        self.take(*events)
        return self.overlap()

    def overlap(self, chain=CHAIN):
        """What the engine reuses of it."""
        return self.cache.scan(chain).first(self.cache.reused(chain, len(chain), EVERY_BLOCK))


def stored(hashes, start=0, parent=None, size=SIZE, **more):
    """Blocks of `size` tokens of TOKENS, from block `start` on."""
    tokens = TOKENS[start * size : (start + len(hashes)) * size]
    return BlockStored(hashes, parent, tokens, size, **more)


def announced(hashes, medium="CPU", **more):
    return BlockStored(hashes, None, [], 0, medium=medium, **more)
