"""The block manager. Prompts are words; see words.py."""

import pytest

from app.core.errors import NotEnoughBlocks
from app.core.events import Removed, Stored
from tests.workers.kv.words import (
    DEVICE,
    DISK,
    HOST,
    Clock,
    block,
    cached,
    chain,
    computed,
    count_calls,
    evict,
    finish_all,
    free,
    hashes,
    idle,
    manager_of,
    named,
)
from workers.kv.moves import AdmissionPolicy


def test_blocks_of_a_running_request_are_shared():
    manager = manager_of(8)
    first = computed(manager, "ABCD", tail=1)
    second = manager.prepare(chain("ABXY"), 4)
    assert second.num_matched == 2
    assert second.block_ids[:2] == first.block_ids[:2]
    assert set(second.block_ids[2:]).isdisjoint(first.block_ids)
    assert free(manager) == 8 - 5 - 2
    manager.release(first)
    assert manager.match(chain("ABCD")) == [DEVICE] * 4
    manager.release(second)
    manager.check()
    assert idle(manager) == 4
    assert free(manager) == 4


def test_a_request_gets_all_the_slots_it_needs_or_none():
    manager = manager_of(8)
    computed(manager, "ABCD")
    with pytest.raises(NotEnoughBlocks, match="not enough blocks: 5 needed, 4 free") as refused:
        manager.prepare(chain("ABX"), 7)
    assert (refused.value.needed, refused.value.free) == (5, 4)
    manager.check()
    assert free(manager) == 4
    manager.prepare(chain("ABX"), 6)
    assert free(manager) == 0


def test_a_refused_request_is_told_how_many_evictable_blocks_it_would_keep():
    manager = manager_of(8, host=8)
    cached(manager, "ABC")
    manager.prepare(chain("A"), 1)
    assert manager.evict(DEVICE, 1).store is not None
    # A cannot be evicted, B can be, and ABC is leaving while it is being stored.
    with pytest.raises(NotEnoughBlocks) as refused:
        manager.prepare(chain("ABC"), 9)
    assert (refused.value.needed, refused.value.free, refused.value.kept) == (6, 5, 2)


def test_a_block_that_two_requests_computed_is_kept_once():
    manager = manager_of(8)
    first, second = (manager.prepare(chain("AB"), 3) for _ in range(2))
    manager.register(first, chain("AB"))
    manager.register(second, chain("AB"))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert free(manager) == 8 - 2 - 1 - 1
    manager.check()
    assert manager.events.take() == [Stored(hashes("AB"), None)]


def test_slots_that_were_never_filled_are_reused_first():
    manager = manager_of(4)
    table = manager.prepare(chain("AB"), 4)
    manager.register(table, chain("AB"))
    unfinished = table.block_ids[2:]
    manager.release(table)
    assert set(manager.prepare([], 2).block_ids) == set(unfinished)
    assert manager.match(chain("AB")) == [DEVICE] * 2


def test_the_tier_below_evicts_in_the_same_order():
    manager = manager_of(device=8, host=8)
    cached(manager, "ABC")
    cached(manager, "XY")
    manager.events.take()
    from_device = manager.evict(DEVICE, 5)
    assert [s.block for s in from_device.leaving] == [
        block(w) for w in ("ABC", "AB", "A", "XY", "X")
    ]
    finish_all(manager)
    assert manager.events.take() == [
        Stored(hashes("XY"), None, HOST),
        Stored(hashes("ABC"), None, HOST),
    ]
    from_host = manager.evict(HOST, 5)
    assert [s.block for s in from_host.leaving] == [s.block for s in from_device.leaving]


def test_use_in_a_faster_tier_keeps_a_block_recent_in_a_slower_one():
    clock = Clock()
    manager = manager_of(device=8, host=8, clock=clock)
    cached(manager, "A")
    evict(manager, DEVICE, 1)
    # A is loaded, and stays in host memory too.
    table = manager.prepare(chain("A"), 1)
    finish_all(manager)
    clock.now_s += 10
    cached(manager, "X")
    evict(manager, DEVICE, 1)  # X, as A is in use
    clock.now_s += 10
    manager.release(table)
    clock.now_s += 5
    evict(manager, DEVICE, 1)
    clock.now_s += 1
    evict(manager, HOST, 1)
    assert manager.match(chain("A")) == [HOST]
    assert manager.match(chain("X")) == []
    evict(manager, HOST, 1)
    assert manager.idle.value_s == pytest.approx(16 + (6 - 16) / 200)


def test_eviction_for_a_request_spares_the_blocks_it_found():
    manager = manager_of(8)
    cached(manager, "ABC")
    cached(manager, "WXYZ")
    with pytest.raises(NotEnoughBlocks):
        manager.prepare(chain("ABCDE"), 5)
    evict(manager, DEVICE, 1)
    assert manager.match(chain("WXYZ")) == [DEVICE] * 3
    assert manager.prepare(chain("ABCDE"), 5).num_matched == 3


def test_if_not_all_can_be_stored_the_heads_of_the_most_recent_chains_are():
    manager = manager_of(device=8, host=3)
    cached(manager, "ABC")
    cached(manager, "XY")
    evict(manager, DEVICE, 5)
    assert manager.match(chain("XY")) == [HOST] * 2
    assert manager.match(chain("ABC")) == [HOST]
    assert manager.counts.stores_dropped == 2


def test_idle_before_evict_counts_only_blocks_that_left_their_last_tier():
    clock = Clock()
    manager = manager_of(device=8, host=8, clock=clock)
    cached(manager, "AB")
    cached(manager, "X")
    clock.now_s += 30
    cached(manager, "AB")
    clock.now_s += 30
    evict(manager, DEVICE, 2)  # X and B
    assert manager.idle.value_s == 0
    clock.now_s += 15
    evict(manager, HOST, 1)
    # X, last used 75 s ago, though stored there only 15 s ago.
    assert manager.idle.value_s == 75
    manager.admission = AdmissionPolicy(min_uses=9)
    evict(manager, DEVICE, 1)
    # A, which is stored nowhere else: its 45 s count for one two-hundredth.
    assert manager.idle.value_s == pytest.approx(75 + (45 - 75) / 200)


def test_a_block_is_found_until_it_is_reclaimed_and_may_be_called_back():
    manager = manager_of(4)
    cached(manager, "ABC")
    manager.events.take()
    eviction = manager.evict(DEVICE, 3)
    assert manager.match(chain("ABC")) == [DEVICE] * 3
    assert manager.events.take() == []
    manager.withdraw(eviction)
    assert manager.events.take() == [Removed(hashes("ABC")[::-1])]
    table = manager.prepare(chain("AB"), 2)
    assert manager.events.take() == [
        Stored(hashes("A"), None),
        Stored(hashes("AB")[1:], hashes("A")[0]),
    ]
    assert manager.reclaim(eviction) == 1
    manager.check()
    assert manager.match(chain("ABC")) == [DEVICE] * 2
    assert table.num_matched == 2
    assert manager.counts.evicted == 1


def test_a_block_called_back_and_chosen_again_is_not_reclaimed_by_the_first_eviction():
    manager = manager_of(4)
    cached(manager, "A")
    first = manager.evict(DEVICE, 1)
    manager.withdraw(first)
    cached(manager, "A")
    manager.events.take()
    manager.evict(DEVICE, 1)
    cached(manager, "A")
    assert manager.events.take() == [], "the eviction was never withdrawn"
    second = manager.evict(DEVICE, 1)
    assert manager.reclaim(first) == 0
    assert manager.match(chain("A")) == [DEVICE]
    manager.withdraw(second)
    assert manager.reclaim(second) == 1
    assert manager.match(chain("A")) == []


def test_blocks_that_another_request_fills_first_replace_a_requests_own_slots():
    manager = manager_of(12, reuse_multiple=2)
    late = manager.prepare(chain("ABCDX"), 6)
    computed(manager, "ABCD", tail=1)
    assert free(manager) == 1
    assert manager.share(late, chain("ABC")) == 2
    assert manager.share(late, chain("ABCDX")) == 2
    assert manager.share(late, chain("ABCDX")) == 0
    manager.check()
    assert late.chain == chain("ABCD")
    assert free(manager) == 5


def test_reuse_is_cut_to_a_multiple_of_the_blocks_computed_at_once():
    manager = manager_of(12, host=4, reuse_multiple=2)
    cached(manager, "ABCD")
    assert manager.prepare(chain("ABCX"), 4).num_matched == 2
    evict(manager, DEVICE, 2)
    table = manager.prepare(chain("ABCD"), 5)
    assert table.tiers == [DEVICE, DEVICE, HOST, HOST]
    finish_all(manager, num_done=1)
    assert table.num_whole == 3
    manager.fall_back(table)
    manager.check()
    assert table.tiers == [DEVICE, DEVICE]
    assert len(table.slots) == 5


def test_adopted_blocks_are_found_and_announced():
    manager = manager_of(4, disk=4)
    manager.adopt(DISK, [(2, 5, block("A"), None), (0, 7, block("AB"), block("A"))])
    manager.check()
    assert manager.match(chain("AB")) == [DISK] * 2
    assert manager.events.take() == [Stored(hashes("AB"), None, DISK)]
    assert free(manager, DISK) == 2
    table = manager.prepare(chain("AB"), 2)
    assert [slot.block_id for slot in table.loads[0].sources] == [2, 0]
    assert table.loads[0].generations == [5, 7]


def test_a_block_adopted_from_two_slots_is_found_once():
    manager = manager_of(4, disk=4)
    a, ab = chain("AB")
    manager.adopt(DISK, [(0, 3, ab, a), (1, 2, a, None), (3, 8, ab, a)])
    manager.check()
    assert manager.match(chain("AB")) == [DISK] * 2
    assert free(manager, DISK) == 2
    cached(manager, "XY")
    again = manager.evict(DEVICE, 2).store
    assert again is not None
    # Slot 3 gets a new generation: its old content is not taken for the new block.
    assert {slot.block_id: slot.generation for slot in again.targets} == {2: 0, 3: 9}


def test_adopted_tails_are_evicted_before_the_blocks_they_continue():
    manager = manager_of(4, disk=8)
    blocks = [*chain("ABC"), *chain("XY"), *chain("ABDE")[2:]]
    parents = [None, *blocks[:2], None, blocks[3], blocks[1], blocks[5]]
    manager.adopt(DISK, [(n, 0, b, parents[n]) for n, b in enumerate(blocks)])
    order = [slot.block for slot in manager.evict(DISK, 7).leaving]
    assert order == [block(w) for w in ("ABC", "XY", "ABDE", "X", "ABD", "AB", "A")]


def test_nothing_leaks_after_a_thousand_cancelled_requests():
    manager = manager_of(64, host=64)
    cached(manager, "ABCDEFGH")
    evict(manager, DEVICE, 8)
    for n in range(1_000):
        table = manager.prepare(chain("ABCDEFGH"[: n % 9]), 10)
        moves = manager.moves.take_planned()
        if n % 3 == 0:
            manager.release(table)
            for move in moves:
                manager.finish(move, len(move.blocks) - n % 2)
        else:
            for move in moves:
                manager.finish(move, len(move.blocks) - n % 2)
            manager.release(table)
        cached(manager, "ABCDEFGH")
        evict(manager, DEVICE, 8)
    manager.check()
    assert free(manager) == 64
    assert free(manager, HOST) + idle(manager, HOST) == 64


def workload(num_blocks):
    """Every operation on `num_blocks` blocks, in each of three tiers."""
    blocks = [named(n + 1) for n in range(num_blocks)]
    manager = manager_of(num_blocks, num_blocks, num_blocks, max_storing=num_blocks)

    def work():
        table = manager.prepare(blocks, num_blocks)
        manager.register(table, blocks)
        manager.release(table)
        for tier in (DEVICE, HOST):
            eviction = manager.evict(tier, num_blocks)
            for move in manager.moves.take_planned():
                manager.finish(move, num_blocks)
            manager.withdraw(eviction)
            manager.reclaim(eviction)
        manager.prefetch(blocks[: num_blocks // 2])
        finish_all(manager)
        table = manager.prepare(blocks, num_blocks)
        for move in manager.moves.take_planned():
            manager.finish(move, len(move.blocks) // 2)
        manager.fall_back(table)
        manager.release(table)

    return work


def test_the_cost_grows_linearly_with_the_number_of_blocks():
    few, many = (count_calls(workload(n)) for n in (1_000, 10_000))
    assert 9 < many / few < 11
