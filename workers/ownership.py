"""What a worker publishes of its cache: prefix-closed, and never faster further down a chain.

A block is published only while all its ancestors are held, in the slowest tier on its path from
the root. This is the invariant that makes a bisecting query exact, and the agent keeps it because
it alone has the whole picture in memory at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.events import CacheEvent, Cleared, Removed, Stored
from app.core.index import GROUP_BLOCKS, Change, Claims, shard_of
from app.core.types import SequenceHash, Tier


class _Node:
    """A block that is held, or a hole: the missing ancestor of one that is."""

    __slots__ = ("children", "depth", "held", "leader", "linked", "parent", "published", "root")

    def __init__(self) -> None:
        self.parent: SequenceHash | None = None
        self.linked = False
        """Is the parent known? Not before the block has been stored once."""
        self.children: set[SequenceHash] = set()
        self.held: set[Tier] = set()
        self.published: Tier | None = None
        self.depth = 0
        """Blocks before it in its chain; right whenever the block is published."""
        self.root: SequenceHash | None = None
        self.leader: SequenceHash | None = None
        """First blocks of its chain and of its group; right whenever the block is published."""


class _Told(NamedTuple):
    tier: Tier
    depth: int
    shard: int
    leader: SequenceHash

    def place(self) -> tuple[int, SequenceHash, int]:
        """Sorts parents before their children, and the blocks of a group together."""
        return self.depth // GROUP_BLOCKS, self.leader, self.depth


class Ownership:
    """Turns cache events into the changes that the shards of the index must be told, coalesced.

    What waits is bounded by twice the blocks of the engine, however long Redis is away: a block
    stored and removed while waiting costs nothing.
    """

    def __init__(self) -> None:
        self._nodes: dict[SequenceHash, _Node] = {}
        self._shards = 1
        self._told: dict[SequenceHash, _Told] = {}
        self._pending: set[SequenceHash] = set()
        self._before: dict[SequenceHash, _Told | None] = {}
        """Of the blocks that the last drain stored or made faster: what Redis knew until then."""
        self._audit: list[SequenceHash] = []

    @property
    def num_pending(self) -> int:
        """Blocks whose published state Redis has not been told."""
        return len(self._pending)

    @property
    def num_published(self) -> int:
        """Blocks in Redis once all drained changes are."""
        return len(self._told)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Take in what the engine did, in order."""
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for block in event.blocks:
                        self._remove(block, event.tier)
                case Cleared():
                    self._clear()

    def next_to_audit(self, count: int) -> dict[int, list[Change]]:
        """The next `count` blocks, in turn, as Redis should show them, by shard."""
        if not self._audit:
            self._audit = list(self._told)
        blocks, self._audit = self._audit[-count:], self._audit[:-count]
        entries: dict[int, list[Change]] = {}
        for block in blocks:
            told = self._told.get(block)
            if told:
                entries.setdefault(told.shard, []).append(Change(block, told.tier, told.leader))
        return entries

    def shows(self, shard: int, claims: Claims) -> bool:
        """Whether that shard shows nothing in `claims` but what it was told, where it belongs."""
        seen = set()
        for bucket, tier, block in claims.entries:
            told = self._told.get(block) if block is not None else None
            if (
                told is None
                or (told.shard, told.tier) != (shard, tier)
                or told.leader >> (64 - claims.bucket_bits) != bucket
                or block in seen
            ):
                return False
            seen.add(block)
        return True

    def drain(self) -> dict[int, list[Change]]:
        """All changes since the last drain by shard, in an order that may be cut into batches
        anywhere.

        Removals and moves to a slower tier come first, from the leaves inward; stores and moves
        to a faster tier follow, from the root outward. So the invariant holds after each change.
        """
        self._before.clear()
        slower: list[tuple[_Told, Change]] = []
        faster: list[tuple[_Told, Change]] = []
        for block in self._pending:
            told = self._told.pop(block, None)
            node = self._nodes.get(block)
            if node is None or node.published is None:
                assert told is not None
                slower.append((told, Change(block, None, told.leader)))
                continue
            now = told._replace(tier=node.published) if told else self._place(node)
            self._told[block] = now
            change = Change(block, now.tier, now.leader)
            if told and now.tier > told.tier:
                slower.append((now, change))
            else:
                faster.append((now, change))
                self._before[block] = told
        self._pending.clear()
        slower.sort(key=lambda turn: turn[0].place(), reverse=True)
        faster.sort(key=lambda turn: turn[0].place())
        changes: dict[int, list[Change]] = {}
        for told, change in slower + faster:
            changes.setdefault(told.shard, []).append(change)
        return changes

    def adds(self, change: Change) -> bool:
        """Whether a change of the last drain stores a block, or makes it faster."""
        return change.block in self._before

    def untell(self, changes: Iterable[Change]) -> None:
        """Redis did not take these, all that follows some cut of what the last drain `adds`."""
        for change in changes:
            before = self._before.pop(change.block)
            if before is None:
                del self._told[change.block]
            else:
                self._told[change.block] = before
            node = self._nodes.get(change.block)
            if (node and node.published) != (before and before.tier):
                self._pending.add(change.block)
            else:
                self._pending.discard(change.block)

    def _place(self, node: _Node) -> _Told:
        assert node.published is not None
        assert node.root is not None
        assert node.leader is not None
        return _Told(node.published, node.depth, shard_of(node.root, self._shards), node.leader)

    def forget(self, shards: int = 1) -> None:
        """Redis knows nothing of this worker (any more): the next drain tells it everything.

        shards: of the index, from now on.
        """
        self._shards = shards
        self._told.clear()
        self._pending = {block for block, node in self._nodes.items() if node.published is not None}

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        for block, node in self._nodes.items():
            parent = self._nodes.get(node.parent) if node.parent is not None else None
            assert node.held or node.children, f"{block:016x} is an empty leaf"
            assert node.parent is None or (parent and block in parent.children)
            assert all(self._nodes[child].parent == block for child in node.children)
            assert node.published == self._tier(node), f"{block:016x} is out of date"
            assert node.published is None or node.depth == (parent.depth + 1 if parent else 0)
            told = self._told.get(block)
            if block not in self._pending:
                assert node.published == (told and told.tier), f"{block:016x} was never told"
        assert all(b in self._nodes or b in self._pending for b in self._told)

    def _store(self, event: Stored) -> None:
        parent = event.parent
        for block in event.blocks:
            node = self._node(block)
            if not node.linked:
                node.linked = True
                node.parent = parent
                if parent is not None:
                    self._node(parent).children.add(block)
            if event.tier not in node.held:
                node.held.add(event.tier)
                self._republish(block)
            parent = block

    def _node(self, block: SequenceHash) -> _Node:
        node = self._nodes.get(block)
        if node is None:
            node = self._nodes[block] = _Node()
        return node

    def _remove(self, block: SequenceHash, tier: Tier) -> None:
        node = self._nodes.get(block)
        if node is not None and tier in node.held:
            node.held.remove(tier)
            self._republish(block)
            self._prune(block, node)

    def _prune(self, block: SequenceHash, node: _Node) -> None:
        """Drop `node`, and holes above it, while nothing is held in or below them."""
        while not node.held and not node.children:
            del self._nodes[block]
            if node.parent is None:
                return
            parent = self._nodes[node.parent]
            parent.children.remove(block)
            block, node = node.parent, parent

    def _clear(self) -> None:
        self._nodes.clear()
        self._pending = set(self._told)

    def _tier(self, node: _Node) -> Tier | None:
        if not node.held:
            return None
        fastest = min(node.held)
        if node.parent is None:
            return fastest
        above = self._nodes[node.parent].published
        return None if above is None else max(above, fastest)

    def _republish(self, block: SequenceHash) -> None:
        """Bring `block` and whatever hangs on it up to date."""
        stack = [block]
        while stack:
            block = stack.pop()
            node = self._nodes[block]
            tier = self._tier(node)
            if tier == node.published:
                continue
            node.published = tier
            if tier is not None:
                above = None if node.parent is None else self._nodes[node.parent]
                node.depth, node.root = (above.depth + 1, above.root) if above else (0, block)
                if above and node.depth % GROUP_BLOCKS:
                    node.leader = above.leader
                else:
                    node.leader = block
            told = self._told.get(block)
            if tier == (told and told.tier):
                self._pending.discard(block)
            else:
                self._pending.add(block)
            stack.extend(node.children)
