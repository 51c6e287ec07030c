from dataclasses import dataclass
from itertools import groupby
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.chains import GROUP_BLOCKS
from app.core.events import Cleared, Ends, Removed, Stored
from app.core.overlaps import ReuseRule
from app.core.types import SequenceHash, Tier
from app.state.index import FIRST_PLACE, Audit, Change
from workers.agent import ownership as module
from workers.agent.ownership import Ownership

DEVICE, HOST, DISK = Tier
A, B, C, D, E = (SequenceHash(0xA + i) for i in range(5))


def stored(*blocks, parent=None, tier=DEVICE):
    return Stored(blocks, parent, tier)


def removed(*blocks, tier=DEVICE):
    return Removed(blocks, tier)


def drained(ownership, *events):
    """The changes that Redis must be sent after these events."""
    ownership.apply(events)
    ownership.check()
    changes = ownership.drain(0)
    ownership.check()
    assert ownership.num_pending == 0
    return [(block, tier) for block, tier, *_ in changes]


@pytest.fixture
def ownership():
    return Ownership()


@pytest.fixture
def abcd():
    """A to D are one chain on the device, and have been sent to Redis."""
    ownership = Ownership()
    drained(ownership, stored(A, B, C, D))
    return ownership


def test_the_blocks_of_a_group_are_sent_together(ownership):
    """Two chains of 40 blocks, which differ after the 20th, are stored alternately."""
    left = [SequenceHash(1000 + i) for i in range(40)]
    right = left[:20] + [SequenceHash(2000 + i) for i in range(20, 40)]
    for at in range(0, 40, 4):
        parent = left[at - 1] if at else None
        ownership.apply([Stored(tuple(left[at : at + 4]), parent)])
        ownership.apply([Stored(tuple(right[at : at + 4]), right[at - 1] if at else None)])
    changes = ownership.drain(0)
    leaders = [change.leader for change in changes]
    assert [leader for leader, _ in groupby(leaders)] == [1000, 1016, 1032, 2032]
    assert {c.block for c in changes if c.leader == 1016} == {*left[16:32], *right[20:32]}
    assert [c.tier for c in changes] == [DEVICE] * 60


def test_a_drain_ends_once_it_has_enough_and_the_next_one_sends_removals_first(ownership):
    """40 prompts of 40 blocks: their 120 groups are far more than one drain needs to take."""
    chains = [[SequenceHash((n << 58) + i) for i in range(40)] for n in range(40)]
    ownership.apply([stored(*chain) for chain in chains])
    first = ownership.drain(0, at_least=100)
    assert 100 <= len(first) < 200
    removed_block = first[-1].block
    ownership.apply([removed(removed_block)])
    second = ownership.drain(0, at_least=100)
    assert 100 <= len(second) < 200
    withdrawn = [change.block for change in second if change.tier is None]
    assert withdrawn == [change.block for change in second[: len(withdrawn)]]
    assert withdrawn[-1] == removed_block
    sent = {change.block for change in first + second}
    while changes := ownership.drain(0, at_least=100):
        assert not {change.block for change in changes} & sent
        sent |= {change.block for change in changes}
    assert sent >= {b for chain in chains for b in chain if removed_block not in chain}
    ownership.check()
    assert not ownership.any_pending


def test_a_change_that_redis_refused_is_sent_when_its_block_is_stored_again(ownership):
    drained(ownership, stored(A, tier=HOST))
    ownership.apply([stored(A)])
    refused = ownership.drain(0)
    ownership.apply([removed(A), removed(A, tier=HOST)])
    ownership.take_back(0, refused)
    assert drained(ownership, stored(A)) == [(A, DEVICE)]


def test_chains_go_to_the_shard_of_their_first_block(ownership):
    ownership.forget(shards=2)
    ownership.apply([stored(A, D), stored(B, C)])
    assert ownership.drain(0) == [Change(A, DEVICE, A), Change(D, DEVICE, A)]
    assert ownership.drain(1) == [Change(B, DEVICE, B), Change(C, DEVICE, B)]


def test_changes_pending_for_one_shard_survive_draining_another(ownership):
    ownership.forget(shards=2)
    ownership.apply([stored(A, D), stored(B, C)])
    changes = ownership.drain(0)
    ownership.apply([stored(E, parent=C), removed(D)])
    assert (ownership.is_pending(0), ownership.is_pending(1)) == (True, True)
    assert [c.block for c in ownership.drain(1)] == [B, C, E]
    assert not ownership.is_pending(1)
    assert all(ownership.adds(0, change) for change in changes)
    ownership.take_back(0, changes)
    ownership.check()
    assert ownership.drain(0) == [Change(A, DEVICE, A)]
    ownership.apply([Cleared()])
    ownership.check()
    assert [c.block for c in ownership.drain(0)] == [A]
    assert [c.block for c in ownership.drain(1)] == [E, C, B]
    assert ownership.num_pending == 0


def test_audits_rotate_over_the_blocks_and_skip_removed_ones(abcd):
    assert abcd.next_to_audit(3) == [[B, C, D]]
    assert abcd.as_published(0, [B, C, D]) == [Change(b, DEVICE, A) for b in (B, C, D)]
    drained(abcd, removed(A), stored(A))
    assert abcd.next_to_audit(3) == [[A]]
    drained(abcd, removed(B))
    assert abcd.next_to_audit(9) == [[A]]
    assert abcd.as_published(0, [A, B]) == [Change(A, DEVICE, A)]


def test_an_audit_skips_blocks_removed_since_its_round_began(abcd):
    assert abcd.next_to_audit(3) == [[B, C, D]]
    drained(abcd, removed(A, B, C, D))
    assert abcd.next_to_audit(3) == [[]]


def test_after_a_change_of_shards_blocks_are_audited_in_their_new_shard_only(abcd):
    [blocks] = abcd.next_to_audit(9)
    abcd.forget(shards=3)
    for shard in range(3):
        abcd.drain(shard)
    assert [[c.block for c in abcd.as_published(n, blocks)] for n in range(3)] == [
        [],
        [A, B, C, D],
        [],
    ]


EXAMPLES = {
    "a chain, from the root outward": "ABCD = ABCD",
    "a chain that continues a published parent": "AB = AB | B>CD = CD",
    "nothing new": "ABCD = ABCD | = | AB B>C =",
    "a hole withdraws its descendants until it is filled": "ABCD = ABCD | -B = DCB:- | A>B = BCD",
    "two holes must both be filled": "ABCD = ABCD | -AC = DCBA:- | B>C = | A = ABCD",
    "a descendant removed while the hole is open": "ABCD = ABCD | -B = DCB:- | -D = | A>B = BC",
    "the slowest tier on a path": "A A>B:h B>C C>D = A BCD:h | A>B = BCD",
    "the fastest of the tiers that hold a block": "ABCD = ABCD | A>B:h A>B:d = | -B = DCB:h"
    " | -B:h = DCB:d | -B:d = DCB:-",
    "a removal from a tier that does not hold the block": "ABCD = ABCD | -B:h -E =",
    "an offload moves a tail without withdrawing it": "ABCD = ABCD | B>CD:h -CD = DC:h",
    "removals before stores": "ABCD = ABCD | A>E -D = D:- E",
    "a slower root after, a faster one before": "ABCD = ABCD | A:h -A = DCBA:h | A = ABCD",
    "a chain waits for a parent that is unknown": "B>CD = | A>B = | A = ABCD",
    "a chain whose parent never comes": "B>CD -CD = | B = B",
    "blocks stored again after clearing": "ABCD = ABCD | clear AB = DC:-",
    "clearing an empty cache": "clear = | A clear =",
}
"""Steps, each with events and, behind the sign, changes. B>CD: C and D are stored after B; -CD:
they are removed; h and d: host and disk. DC:-: D, then C, is withdrawn."""
BLOCK_OF = dict(zip("ABCDE", (A, B, C, D, E), strict=True))
TIER_OF = {"": DEVICE, "h": HOST, "d": DISK, "-": None}


def event_of(word):
    chain, _, tier = word.partition(":")
    *parent, names = chain.lstrip("-").split(">")
    if word == "clear":
        return Cleared()
    blocks = [BLOCK_OF[name] for name in names]
    if word.startswith("-"):
        return removed(*blocks, tier=TIER_OF[tier])
    return stored(*blocks, parent=BLOCK_OF[parent[0]] if parent else None, tier=TIER_OF[tier])


def changes_of(words):
    pairs = [word.partition(":") for word in words.split()]
    return [(BLOCK_OF[name], TIER_OF[tier]) for names, _, tier in pairs for name in names]


@pytest.mark.parametrize("steps", EXAMPLES.values(), ids=EXAMPLES)
def test_redis_is_sent_what_changes_in_the_right_order(ownership, steps):
    for events, changes in (step.split("=") for step in steps.split("|")):
        assert drained(ownership, *map(event_of, events.split())) == changes_of(changes)


def test_groups_are_sent_from_the_root_outward_whatever_their_hashes(ownership):
    blocks = [SequenceHash(n) for n in range(2 * GROUP_BLOCKS, 0, -1)]
    assert drained(ownership, stored(*blocks)) == [(block, DEVICE) for block in blocks]


def test_removing_a_root_withdraws_all_its_branches(ownership):
    drained(ownership, stored(A, B), stored(C, parent=A), stored(D))
    changes = drained(ownership, removed(A))
    assert set(changes[:2]) == {(B, None), (C, None)}
    assert changes[2:] == [(A, None)]
    assert drained(ownership, removed(B), removed(C)) == []


def test_a_block_stored_and_removed_while_waiting_costs_nothing(abcd):
    abcd.apply([stored(E, parent=D)])
    assert abcd.num_pending == 1
    abcd.apply([removed(E)])
    assert abcd.num_pending == 0
    assert drained(abcd) == []


def test_a_block_removed_and_stored_while_waiting_costs_nothing(abcd):
    abcd.apply([removed(B)])
    assert abcd.num_pending == 3
    abcd.apply([stored(B, parent=A)])
    assert abcd.num_pending == 0
    assert drained(abcd) == []


def test_clearing_withdraws_everything_from_the_leaves_inward(abcd):
    drained(abcd, stored(E, tier=HOST))
    changes = drained(abcd, Cleared())
    assert [block for block, _ in changes if block != E] == [D, C, B, A]
    assert {tier for _, tier in changes} == {None}
    assert len(changes) == 5


def test_after_forgetting_all_published_blocks_are_sent_again(abcd):
    drained(abcd, stored(C, parent=B, tier=HOST), removed(C))
    abcd.forget()
    assert abcd.num_pending == 4
    assert drained(abcd) == [(A, DEVICE), (B, DEVICE), (C, HOST), (D, HOST)]


def test_after_forgetting_removed_blocks_are_not_withdrawn(abcd):
    abcd.apply([removed(B)])
    abcd.forget()
    assert drained(abcd) == [(A, DEVICE)]


def test_pending_changes_are_sent_once_after_forgetting(abcd):
    abcd.apply([stored(E, parent=D)])
    abcd.forget()
    assert [block for block, _ in drained(abcd)] == [A, B, C, D, E]


def test_check_detects_inconsistent_bookkeeping(abcd):
    abcd._nodes[B].wanted = HOST
    with pytest.raises(AssertionError, match="000000000000000b is out of date"):
        abcd.check()


def plain_published(held, parents):
    """Each block whose ancestors are all held, in the slowest of the fastest tiers on its path."""
    published = {}
    for block, parent in parents.items():  # parents come before their children
        if held[block] and (parent is None or parent in published):
            fastest = min(held[block])
            published[block] = fastest if parent is None else max(fastest, published[parent])
    return published


def chain_of(block, parents):
    """`block` after those that lead to it."""
    chain = [block]
    while (parent := parents[chain[-1]]) is not None:
        chain.append(parent)
    return chain[::-1]


def leader_of(block, parents):
    """The first block of the group of GROUP that `block` is in."""
    chain = chain_of(block, parents)
    return chain[(len(chain) - 1) // GROUP * GROUP]


def send(redis, changes, parents):
    """Apply changes one by one: the invariant must hold wherever they are cut into batches."""
    for block, tier, leader, _ in changes:
        assert leader == leader_of(block, parents)
        if tier is None:
            del redis[block]
        else:
            redis[block] = tier
        for child, its_tier in redis.items():
            parent = parents[child]
            assert parent is None or (parent in redis and redis[parent] <= its_tier)


@dataclass(frozen=True)
class Drain:
    """num_taken: how many of the changes that store a block or make it faster; None: all.

    at_least: as in `Ownership.drain`; with num_taken None, drains follow until nothing is left.
    """

    num_taken: int | None
    at_least: int


@dataclass(frozen=True)
class Forget:
    pass


NUM_BLOCKS = 10
GROUP = 2
"""The number of blocks in a group; small, so that these short chains have several groups."""
BLOCKS = [SequenceHash(i << 59 | i) for i in range(NUM_BLOCKS)]


@st.composite
def trees(draw):
    """A random forest, in which parents come before their children."""
    return {
        block: draw(st.sampled_from([None, *BLOCKS[max(0, i - 3) : i]]))
        for i, block in enumerate(BLOCKS)
    }


@st.composite
def stores(draw, parents):
    """A block and up to three of its ancestors as one event, in prompt order."""
    blocks = [draw(st.sampled_from(BLOCKS))]
    for _ in range(draw(st.integers(0, 3))):
        parent = parents[blocks[0]]
        if parent is not None:
            blocks.insert(0, parent)
    return Stored(tuple(blocks), parents[blocks[0]], draw(st.sampled_from(Tier)))


@st.composite
def histories(draw):
    parents = draw(trees())
    store = stores(parents)
    remove = st.builds(
        Removed, st.lists(st.sampled_from(BLOCKS), max_size=3).map(tuple), st.sampled_from(Tier)
    )
    rare = st.sampled_from([Cleared(), Forget()])
    drain = st.builds(Drain, st.none() | st.integers(0, 4), st.integers(1, NUM_BLOCKS + 1))
    events = st.one_of(store, store, store, remove, remove, drain, rare)
    return parents, draw(st.lists(events, max_size=60))


@mock.patch.object(module, "GROUP_BLOCKS", GROUP)
@settings(max_examples=200)
@given(histories())
def test_redis_is_always_sent_exactly_what_a_plain_model_publishes(history):
    parents, events = history
    ownership = Ownership()
    held = {block: set() for block in BLOCKS}
    redis = {}
    for event in events:
        match event:
            case Drain(None, at_least):
                while changes := ownership.drain(0, at_least):
                    send(redis, changes, parents)
                assert redis == plain_published(held, parents)
            case Drain(num_taken, at_least):
                changes = ownership.drain(0, at_least)
                adding = [change for change in changes if ownership.adds(0, change)]
                assert changes[len(changes) - len(adding) :] == adding
                send(redis, changes[: len(changes) - len(adding) + num_taken], parents)
                ownership.take_back(0, adding[num_taken:])
                if len(changes) < at_least:
                    real = plain_published(held, parents)
                    assert all(b in real and tier >= real[b] for b, tier in redis.items())
            case Forget():
                ownership.forget()
                redis.clear()
            case Stored():
                ownership.apply([event])
                for block in event.blocks:
                    held[block].add(event.tier)
            case Removed():
                ownership.apply([event])
                for block in event.blocks:
                    held[block].discard(event.tier)
            case Cleared():
                ownership.apply([event])
                held = {block: set() for block in BLOCKS}
        ownership.check()
        published = plain_published(held, parents)
        assert {b: t.tier for b in BLOCKS if (t := ownership._published(b))} == redis
        differing = [b for b in BLOCKS if published.get(b) != redis.get(b)]
        assert ownership.num_pending == len(differing)
    send(redis, ownership.drain(0), parents)
    assert redis == plain_published(held, parents)


@settings(max_examples=80)
@given(
    st.data(),
    st.integers(0, 3),
    st.sampled_from([ReuseRule(), ReuseRule(2), ReuseRule(2, 1), ReuseRule(1, 0, 2)]),
)
def test_whatever_is_stored_and_removed_it_is_right_after_what_engines_go_on(data, lookahead, rule):
    # Few branches, as ends matter to each other along a chain.
    above = data.draw(st.tuples(*[st.sampled_from([1, 1, 1, 2])] * NUM_BLOCKS))
    parents = {
        b: BLOCKS[i - n] if i >= n else None
        for i, b, n in zip(range(NUM_BLOCKS), BLOCKS, above, strict=True)
    }
    ownership, ends = Ownership(rule), set[SequenceHash]()
    ownership.apply([Stored((block,), parent) for block, parent in parents.items()])
    blocks = st.lists(st.sampled_from(BLOCKS), max_size=4).map(tuple)
    marks = st.builds(Ends, blocks, st.booleans(), st.just(lookahead))
    removals = st.builds(Removed, blocks, st.sampled_from(Tier))
    events = st.one_of(marks, marks, stores(parents), removals)
    for event in data.draw(st.lists(events, min_size=4, max_size=16)):
        ownership.apply([event])
        ownership.check()
        if isinstance(event, Ends):
            ends = ends.union(event.blocks) if event.are_ends else ends - {*event.blocks}
            changes = ownership.drain(0)
            for block, tier, _, back in changes:
                if tier is not None:
                    chain = chain_of(block, parents)
                    at = [
                        n for n in range(len(chain) - lookahead + 1) if {*chain[n - 1 : n]} <= ends
                    ]
                    before = [n for n in at if n < len(chain)]
                    assert back == rule.back(len(chain), max(at, default=0), max(before, default=0))


CLAIM = (0, DEVICE)
"""Bucket 0 of 256, where all of A to E belong."""


@pytest.mark.parametrize(
    ("entries", "right"),
    [
        ([], True),
        ([(*CLAIM, A), (*CLAIM, D)], True),
        ([(*CLAIM, A), (*CLAIM, E)], False),  # not held
        ([(*CLAIM, None)], False),  # no block at all
        ([(0, HOST, A)], False),
        ([(0, None, A)], False),
        ([(1, DEVICE, A)], False),  # in a bucket where lookups do not search for it
        ([(*CLAIM, A), (*CLAIM, A)], False),
    ],
)
def test_a_shard_is_right_if_it_shows_nothing_but_what_it_was_sent(abcd, entries, right):
    audit = Audit(0, 8, FIRST_PLACE, entries)
    assert abcd.shows(0, audit) == right
    assert abcd.shows(1, audit) == (entries == [])


def test_a_block_belongs_in_the_bucket_of_the_first_block_of_its_group(ownership):
    first, second = SequenceHash(0xAA << 56), SequenceHash(0xBB << 56)
    drained(ownership, stored(first, second))
    for bucket, right in ((0xAA, True), (0xBB, False)):
        assert ownership.shows(0, Audit(0, 8, FIRST_PLACE, [(bucket, DEVICE, second)])) == right
