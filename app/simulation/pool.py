"""Bookkeeping of a paged KV pool that keeps the blocks of finished requests for reuse.

A block is identified by its sequence hash; slot numbers would make no difference here. Every slot
of the device pool is in one state:

    free ──acquire─► private ──register─► referenced ◄─acquire / release─► cached ──evict─► free
                                             ▲                               │
                                             └─acquire── host tier ◄──evict──┘

private: held by one request, not full yet. referenced: full, reusable, used by requests.
cached: full, reusable, not in use. A block that the host tier holds is in no device slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from app.core.cache_stats import IdleBeforeEvict
from app.core.events import CacheEvent, Removed, Stored
from app.core.types import SequenceHash, Tier

# Block -> parent and when it was last used, the longest unused first. Not a dict: taking the first
# key of a dict again and again walks over the ones already taken.
LruBlocks = OrderedDict[SequenceHash, tuple[SequenceHash | None, float]]


class BlockPool:
    """`num_blocks` device slots and, behind them, up to `num_host_blocks` evicted blocks.

    Closed under prefix: a device block's ancestors are on the device, a host block's in either
    tier, because requests hold whole prefixes and release them tail first. now: seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        now: Callable[[], float],
    ) -> None:
        if num_blocks < 1:
            raise ValueError("the KV pool is smaller than one block")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._references: dict[SequenceHash, int] = {}
        self._cached: LruBlocks = OrderedDict()
        self._host: LruBlocks = OrderedDict()
        self._num_private = 0
        self._events: list[CacheEvent] = []
        self._now = now
        self._idle = IdleBeforeEvict(now)

    @property
    def idle_before_evict_s(self) -> float:
        """Counts blocks that left the last tier that held them; see IdleBeforeEvict."""
        return self._idle.value_s

    @property
    def num_used(self) -> int:
        """Slots that requests use; a block that several of them share counts once."""
        return len(self._references) + self._num_private

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used - len(self._cached)

    def match(self, chain: Sequence[SequenceHash]) -> int:
        """How many leading blocks of `chain` either tier holds."""
        references, cached, host = self._references, self._cached, self._host
        for i, block in enumerate(chain):
            if block not in references and block not in cached and block not in host:
                return i
        return len(chain)

    def match_device(self, chain: Sequence[SequenceHash]) -> int:
        """How many leading blocks of `chain` the device holds."""
        for i, block in enumerate(chain):
            if block not in self._references and block not in self._cached:
                return i
        return len(chain)

    def has_room(self, prefix: Sequence[SequenceHash], num_blocks: int) -> bool:
        """Whether `acquire` could take them."""
        in_use = sum(block in self._references for block in prefix)
        return num_blocks - in_use <= self.num_blocks - self.num_used

    def acquire(self, prefix: Sequence[SequenceHash], num_blocks: int) -> int | None:
        """Take `num_blocks` for a request: the matched `prefix`, the rest private.

        Evicts as needed. Returns how many blocks came from the host tier; None, having changed
        nothing, if requests use too much of the pool.
        """
        references = self._references
        if not self.has_room(prefix, num_blocks):
            return None
        idle = [block for block in prefix if block not in references]
        for block in prefix:
            references[block] = references.get(block, 0) + 1
        onboarded = [block for block in idle if block not in self._cached]
        for block in idle:
            (self._cached if block in self._cached else self._host).pop(block)
        self._num_private += num_blocks - len(prefix)
        self._evict(-self.num_free)
        if onboarded:
            # The device holds the head of the chain, the host the rest of it.
            first = len(prefix) - len(onboarded)
            parent = prefix[first - 1] if first else None
            self._events.append(Stored(tuple(onboarded), parent))
            self._events.append(Removed(tuple(onboarded), Tier.HOST))
        return len(onboarded)

    def register(self, blocks: Sequence[SequenceHash], parent: SequenceHash | None) -> None:
        """Make private blocks that are now full reusable; the same request references `parent`.

        If another request has registered the same block, this one shares it from now on and its own
        copy becomes free.
        """
        references = self._references
        fresh = []
        for block in blocks:
            if block in references:
                references[block] += 1
                continue
            references[block] = 1
            if block in self._cached:
                del self._cached[block]
            else:
                fresh.append(block)
        self._num_private -= len(blocks)
        if fresh:
            known = len(blocks) - len(fresh)
            self._events.append(Stored(tuple(fresh), blocks[known - 1] if known else parent))
            self._drop_from_host(fresh)

    def release(self, chain: Sequence[SequenceHash], num_private: int) -> None:
        """Give back a request's referenced `chain` and its private blocks."""
        references, cached, now_s = self._references, self._cached, self._now()
        # Tail first, so that tails are older than their parents and are evicted before them.
        for i in range(len(chain) - 1, -1, -1):
            block = chain[i]
            if references[block] > 1:
                references[block] -= 1
            else:
                del references[block]
                cached[block] = (chain[i - 1] if i else None), now_s
        self._num_private -= num_private

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call, in order. They are kept until taken."""
        events, self._events = self._events, []
        return events

    def check(self, chains: Iterable[Sequence[SequenceHash]], num_private: int) -> None:
        """Raises AssertionError unless the pool is consistent with its requests.

        chains: the referenced blocks of each request; num_private: over all of them.
        """
        counted = Counter(block for chain in chains for block in chain)
        assert counted == self._references, "references differ from what requests hold"
        assert num_private == self._num_private, f"{num_private} != {self._num_private} private"
        assert self.num_free >= 0, f"{-self.num_free} blocks more than the pool has"
        assert len(self._host) <= self.num_host_blocks, f"{len(self._host)} blocks on the host"
        device = self._references.keys() | self._cached.keys()
        assert len(device) == len(self._references) + len(self._cached), "referenced and cached"
        assert device.isdisjoint(self._host), "a block is on the device and on the host"
        assert all(p is None or p in device for p, _ in self._cached.values()), (
            "orphan on the device"
        )
        anywhere = device | self._host.keys()
        assert all(p is None or p in anywhere for p, _ in self._host.values()), "orphan on the host"

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        evicted = OrderedDict(self._cached.popitem(last=False) for _ in range(count))
        if self.num_host_blocks:
            self._offload(evicted)
        self._events.append(Removed(tuple(evicted)))
        gone = evicted
        if self.num_host_blocks:
            surplus = max(0, len(self._host) - self.num_host_blocks)
            gone = OrderedDict(self._host.popitem(last=False) for _ in range(surplus))
            if gone:
                self._events.append(Removed(tuple(gone), Tier.HOST))
        for _, since_s in gone.values():
            self._idle.add(since_s)

    def _offload(self, evicted: LruBlocks) -> None:
        """Move `evicted` blocks to the host; one event for each part of a chain, root first."""
        self._host.update(evicted)
        chain: list[SequenceHash] = []
        for block, (parent, _) in reversed(evicted.items()):
            if chain and parent != chain[-1]:
                self._events.append(Stored(tuple(chain), self._host[chain[0]][0], Tier.HOST))
                chain = []
            chain.append(block)
        self._events.append(Stored(tuple(chain), self._host[chain[0]][0], Tier.HOST))

    def _drop_from_host(self, blocks: Sequence[SequenceHash]) -> None:
        dropped = [block for block in blocks if block in self._host]
        for block in dropped:
            del self._host[block]
        if dropped:
            self._events.append(Removed(tuple(dropped), Tier.HOST))
