"""Blocks that a worker publishes of its cache: prefix-closed, and never faster further down a
chain.

A block is published only while all its ancestors are held, and in the slowest tier on its path from
the root. This invariant makes a bisecting query exact. The agent maintains it, because only the
agent has the whole picture in memory at no cost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from app.core.chains import GROUP_BLOCKS, shard_of
from app.core.events import CacheEvent, Cleared, Ends, Removed, Stored
from app.core.overlaps import EVERY_BLOCK, Back, ReuseRule
from app.core.types import SequenceHash, Tier
from app.state.index import Audit, Change
from workers.agent.node import Node, ShownBlock

PIECE_BITS = 4
"""Bits of a leader by which blocks of one depth are cut into pieces."""


_Pieces = dict[int, set[SequenceHash]]
"""Pending blocks of a shard, cut so that pieces may be sent one after the other, lowest key first.
Removals and moves to a slower tier have keys below 0, the deepest piece the lowest; stores and
moves to a faster tier follow, from the root outward."""


class Ownership:
    """Turns cache events into the coalesced changes that each shard of the index must be sent.

    The backlog is bounded by twice the engine's blocks, however long Redis is unreachable: a block
    stored and removed while waiting costs nothing.

    rule: as the worker registers it.
    """

    def __init__(self, rule: ReuseRule = EVERY_BLOCK) -> None:
        self._rule = rule
        self._ends: set[SequenceHash] | None = None
        self._lookahead = 0
        self._recomputed = 0
        self._nodes: dict[SequenceHash, Node] = {}
        self._gone: dict[SequenceHash, ShownBlock] = {}
        """Published blocks that no longer have a node."""
        self._pending: list[_Pieces] = [{}]
        self._before: list[dict[SequenceHash, tuple[Tier | None, Back]]] = [{}]
        """Tier and way back that each shard knew of the blocks which its last drain stored or made
        faster."""
        self._audit: list[SequenceHash] = []
        self.num_wanted = dict.fromkeys(Tier, 0)
        """Blocks that Redis shows once all is published, by tier."""

    @property
    def num_pending(self) -> int:
        return sum(len(blocks) for pieces in self._pending for blocks in pieces.values())

    @property
    def any_pending(self) -> bool:
        return any(self._pending)

    def is_pending(self, shard: int) -> bool:
        return bool(self._pending[shard])

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for block in event.blocks:
                        self._remove(block, event.tier)
                case Cleared():
                    self._clear()
                case Ends():
                    self._mark(event)

    def next_to_audit(self, count: int) -> list[list[SequenceHash]]:
        """Returns the next `count` blocks, in rotation, that Redis should show, by shard."""
        if not self._audit:
            self._audit = [b for b, node in self._nodes.items() if node.published is not None]
        blocks = self._audit[-count:]
        del self._audit[-count:]
        by_shard: list[list[SequenceHash]] = [[] for _ in self._pending]
        for block in blocks:
            published = self._published(block)
            if published:
                by_shard[self._shard_of(published.root)].append(block)
        return by_shard

    def as_published(self, shard: int, blocks: Iterable[SequenceHash]) -> list[Change]:
        """Returns how that shard should show those of `blocks` that are published in it."""
        each_published = [(block, self._published(block)) for block in blocks]
        return [
            Change(block, published.tier, published.leader, published.back)
            for block, published in each_published
            if published and self._shard_of(published.root) == shard
        ]

    def shows(self, shard: int, audit: Audit) -> bool:
        """Whether `audit` shows only what was published in that shard, each block in its place."""
        seen = set()
        for bucket, tier, block in audit.entries:
            published = self._published(block) if block is not None else None
            if (
                published is None
                or published.tier != tier
                or self._shard_of(published.root) != shard
                or published.leader >> (64 - audit.bucket_bits) != bucket
                or block in seen
            ):
                return False
            seen.add(block)
        return True

    def drain(self, shard: int, at_least: int = sys.maxsize) -> list[Change]:
        """Returns a shard's next changes, in an order that may be cut into batches anywhere.

        Removals and moves to a slower tier come first, from the leaves inward; stores and moves to
        a faster tier follow, from the root outward. So the invariant holds after every change.

        at_least: stop once there are that many; fewer are all there are.
        """
        stored = self._before[shard] = {}
        pieces = self._pending[shard]
        changes: list[Change] = []
        for key in sorted(pieces):
            if len(changes) >= at_least:
                break
            ordered = []
            for block in pieces.pop(key):
                node = self._nodes.get(block)
                if node is None:
                    _, back, depth, _, leader = self._gone.pop(block)
                    now = None
                else:
                    assert node.leader is not None
                    depth, leader, now, back = node.depth, node.leader, node.wanted, node.back
                    if key >= 0:
                        stored[block] = node.published, node.published_back
                    node.published, node.published_back = now, back
                # Parents before their children, and the blocks of a group together.
                ordered.append((leader, depth, Change(block, now, leader, back)))
            ordered.sort(reverse=key < 0)
            changes += [change for _, _, change in ordered]
        return changes

    def adds(self, shard: int, change: Change) -> bool:
        """Whether a change of the shard's last drain stores a block, or makes it faster."""
        return change.block in self._before[shard]

    def take_back(self, shard: int, changes: Iterable[Change]) -> None:
        """Takes back what Redis refused: all that the last drain `adds` from some point on."""
        for block, *_ in changes:
            before, back = self._before[shard].pop(block)
            node = self._nodes.get(block)
            if node is not None:
                node.published, node.published_back = before, back
                self._note(block, node)
            elif before is None:
                gone = self._gone.pop(block)
                _discard(self._pending[shard], ~_piece(gone.depth, gone.leader), block)
            else:
                self._gone[block] = self._gone[block]._replace(tier=before, back=back)

    def forget(self, shards: int = 1) -> None:
        """Forgets what Redis knows of this worker: the next drain sends everything. shards: how
        many the index has from now on."""
        self._gone.clear()
        self._pending = [{} for _ in range(shards)]
        self._before = [{} for _ in range(shards)]
        for block, node in self._nodes.items():
            node.published, node.published_back = None, 0
            if node.wanted is not None:
                self._note(block, node)

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself."""
        pieces = [blocks for shard in self._pending for blocks in shard.values()]
        pending = set[SequenceHash]().union(*pieces)
        assert len(pending) == self.num_pending, "a block is pending twice"
        assert all(pieces), "a piece without blocks counts as pending"
        for block, node in self._nodes.items():
            parent = self._nodes.get(node.parent) if node.parent is not None else None
            assert node.held or node.children, f"{block:016x} is an empty leaf"
            assert node.parent is None or (parent and block in parent.each_child())
            assert all(self._nodes[child].parent == block for child in node.each_child())
            assert node.wanted == self._tier(node), f"{block:016x} is out of date"
            assert node.wanted is None or node.depth == (parent.depth + 1 if parent else 0)
            assert (block in pending) == node.is_pending
            if node.wanted is not None and self._ends is not None:
                assert node.since_end == self._since_end(block, node), f"{block:016x}"
                assert node.back == self._back(node), f"{block:016x}"
        shown = [node.wanted for node in self._nodes.values()]
        assert self.num_wanted == {tier: shown.count(tier) for tier in Tier}
        assert not self._gone.keys() & self._nodes.keys()
        assert self._gone.keys() == pending - self._nodes.keys()

    def _store(self, event: Stored) -> None:
        parent = event.parent
        for block in event.blocks:
            node = self._node(block)
            if not node.linked:
                node.linked = True
                node.parent = parent
                if parent is not None:
                    self._node(parent).adopt(block)
            if not node.held >> event.tier & 1:
                node.held |= 1 << event.tier
                self._update(block)
            parent = block

    def _node(self, block: SequenceHash) -> Node:
        node = self._nodes.get(block)
        if node is None:
            node = self._nodes[block] = Node()
            gone = self._gone.pop(block, None)
            if gone:
                (node.published, node.published_back, node.depth, node.root, node.leader) = gone
        return node

    def _remove(self, block: SequenceHash, tier: Tier) -> None:
        node = self._nodes.get(block)
        if node is not None:
            node.held &= ~(1 << tier)
            self._update(block)
            self._prune(block, node)

    def _prune(self, block: SequenceHash, node: Node) -> None:
        """Drops `node`, and the holes above it, as long as nothing is held in or below them."""
        while not node.held and node.children is None:
            del self._nodes[block]
            self._bury(block, node)
            if node.parent is None:
                return
            parent = self._nodes[node.parent]
            parent.disown(block)
            block, node = node.parent, parent

    def _clear(self) -> None:
        for block, node in self._nodes.items():
            self._bury(block, node)
        self._nodes.clear()
        self._ends = None
        self.num_wanted = dict.fromkeys(Tier, 0)
        for pieces in self._pending:
            pieces.clear()
        for block, gone in self._gone.items():
            pieces = self._pending[self._shard_of(gone.root)]
            pieces.setdefault(~_piece(gone.depth, gone.leader), set()).add(block)

    def _bury(self, block: SequenceHash, node: Node) -> None:
        if node.published is not None:
            self._gone[block] = node.as_published(node.published)

    def _published(self, block: SequenceHash) -> ShownBlock | None:
        node = self._nodes.get(block)
        if node is None:
            return self._gone.get(block)
        return None if node.published is None else node.as_published(node.published)

    def _note(self, block: SequenceHash, node: Node) -> None:
        assert node.root is not None
        assert node.leader is not None
        pieces = self._pending[self._shard_of(node.root)]
        piece = _piece(node.depth, node.leader)
        wanted, published = node.wanted, node.published
        _discard(pieces, piece, block)
        _discard(pieces, ~piece, block)
        if node.is_pending:
            is_faster = wanted is not None and (published is None or wanted < published)
            pieces.setdefault(piece if is_faster else ~piece, set()).add(block)

    def _shard_of(self, root: SequenceHash) -> int:
        return shard_of(root, len(self._pending))

    def _tier(self, node: Node) -> Tier | None:
        fastest = node.fastest()
        if fastest is None or node.parent is None:
            return fastest
        above = self._nodes[node.parent].wanted
        return None if above is None else max(above, fastest)

    def _update(self, block: SequenceHash) -> None:
        stack = [block]
        while stack:
            block = stack.pop()
            node = self._nodes[block]
            tier = self._tier(node)
            if tier == node.wanted:
                continue
            if node.wanted is not None:
                self.num_wanted[node.wanted] -= 1
            if tier is not None:
                self.num_wanted[tier] += 1
            node.wanted = tier
            if tier is not None:
                above = None if node.parent is None else self._nodes[node.parent]
                node.depth, node.root = (above.depth + 1, above.root) if above else (0, block)
                if above and node.depth % GROUP_BLOCKS:
                    node.leader = above.leader
                else:
                    node.leader = block
                if self._ends is not None:
                    node.since_end = self._since_end(block, node)
                    node.back = self._back(node)
            self._note(block, node)
            stack.extend(node.each_child())

    def _mark(self, event: Ends) -> None:
        use = event.lookahead, event.recomputed
        if self._ends is None or use != (self._lookahead, self._recomputed):
            self._lookahead, self._recomputed = use
            self._ends = self._ends or set()
            for block in [b for b, node in self._nodes.items() if node.parent is None]:
                self._measure(block, is_whole=True)
        for block in event.blocks:
            if (block in self._ends) == event.are_ends:
                continue
            (self._ends.add if event.are_ends else self._ends.discard)(block)
            node = self._nodes.get(block)
            if node is not None and node.wanted is not None:
                self._measure(block)

    def _measure(self, block: SequenceHash, *, is_whole: bool = False) -> None:
        """Brings up to date where the engine goes on after `block` and those of its descendants
        that depend on it, or after all of them."""
        # Past an end nothing depends on what is before it, but how far an engine looks ahead.
        stack: list[tuple[SequenceHash, int | None]] = [(block, None)]
        while stack:
            at, left = stack.pop()
            node = self._nodes[at]
            if node.wanted is None:
                continue
            if left is None:
                node.since_end = self._since_end(at, node)
            node.back = self._back(node)
            self._note(at, node)
            if left is None and at != block and not node.since_end and not is_whole:
                left = self._lookahead
            elif left is not None:
                left -= 1
            if left != 0:
                stack += [(child, left) for child in node.each_child()]

    def _since_end(self, block: SequenceHash, node: Node) -> int:
        assert self._ends is not None
        if block in self._ends:
            return 0
        return 1 + (self._nodes[node.parent].since_end if node.parent is not None else 0)

    def _back(self, node: Node) -> Back:
        """Returns where the engine goes on if a prompt leaves its chain after this block."""
        held = node.depth + 1
        last = self._last_end(node, self._lookahead)
        before = self._last_end(node, 1) if last == held else last
        return self._rule.back(held, last, before)

    def _last_end(self, node: Node, above: int) -> int:
        """Returns how many blocks lead to where the engine goes on that uses the last end which is
        so many blocks above this one, or more."""
        for _ in range(above):
            if node.parent is None:
                return 0
            node = self._nodes[node.parent]
        return max(0, node.depth + 1 - node.since_end - self._recomputed)


def _piece(depth: int, leader: SequenceHash) -> int:
    """Returns the key of the piece of a block that is stored or made faster; of any other it is `~`
    of that. The blocks of a group are in one piece, and none of its ancestors in another one of its
    depth."""
    return depth // GROUP_BLOCKS << PIECE_BITS | leader >> 64 - PIECE_BITS


def _discard(pieces: _Pieces, key: int, block: SequenceHash) -> None:
    blocks = pieces.get(key)
    if blocks is not None:
        blocks.discard(block)
        if not blocks:
            del pieces[key]
