"""The block manager. Prompts are words: each letter is a block, named by the letters up to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from app.core.errors import NotEnoughBlocks
from app.core.events import Cleared, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.kv.manager import Admission, BlockManager, BlockTable, Eviction, WritePolicy
from workers.kv.slots import Move

DEVICE, HOST, DISK = Tier


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def chain(word: str) -> list[SequenceHash]:
    """The blocks of `word`: for `ABC`, those of A, AB and ABC."""
    return [SequenceHash(int.from_bytes(word[: n + 1].encode())) for n in range(len(word))]


def block(word: str) -> SequenceHash:
    return chain(word)[-1]


def manager_of(
    device: int = 8, host: int = 0, disk: int = 0, clock: Clock | None = None, **options: Any
) -> BlockManager:
    sizes = {tier: size for tier, size in zip(Tier, (device, host, disk), strict=True) if size}
    return BlockManager(sizes, now=clock or Clock(), **options)


def computed(manager: BlockManager, word: str, tail: int = 0) -> BlockTable:
    """A request that has filled the blocks of `word` and holds `tail` more slots."""
    table = manager.prepare(chain(word), len(word) + tail)
    finish_all(manager)
    manager.register(table, chain(word)[table.num_matched :])
    manager.check()
    return table


def cached(manager: BlockManager, word: str, priority: int = 0) -> None:
    """Compute the blocks of `word` and release them."""
    manager.release(computed(manager, word), priority)
    manager.check()


def finish_all(manager: BlockManager, num_done: int | None = None) -> list[Move]:
    """Finish all planned moves; in each, `num_done` blocks were copied, or all if None."""
    finished = []
    while moves := manager.take_moves():
        for move in moves:
            manager.finish(move, len(move.blocks) if num_done is None else num_done)
            manager.check()
        finished += moves
    return finished


def evict(manager: BlockManager, tier: Tier, count: int) -> Eviction:
    """A whole eviction: choose, store, withdraw and reclaim."""
    eviction = manager.evict(tier, count)
    finish_all(manager)
    manager.withdraw(eviction)
    manager.reclaim(eviction)
    manager.check()
    return eviction


def free(manager: BlockManager, tier: Tier = DEVICE) -> int:
    return manager.tiers[tier].num_free


def idle(manager: BlockManager, tier: Tier = DEVICE) -> int:
    return manager.tiers[tier].num_idle


def test_blocks_of_a_running_request_are_shared() -> None:
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


def test_a_request_gets_all_the_slots_it_needs_or_none() -> None:
    manager = manager_of(8)
    computed(manager, "ABCD")
    with pytest.raises(NotEnoughBlocks, match="not enough blocks: 5 needed, 4 free") as refused:
        manager.prepare(chain("ABX"), 7)
    assert (refused.value.needed, refused.value.free) == (5, 4)
    manager.check()
    assert free(manager) == 4
    manager.prepare(chain("ABX"), 6)
    assert free(manager) == 0


def test_a_refused_request_is_told_how_many_evictable_blocks_it_would_keep() -> None:
    manager = manager_of(8, host=8)
    cached(manager, "ABC")
    manager.pin(chain("A"), ttl_s=10.0)
    assert manager.evict(DEVICE, 1).store is not None
    # A cannot be evicted, B can be, and ABC is leaving while it is being stored.
    with pytest.raises(NotEnoughBlocks) as refused:
        manager.prepare(chain("ABC"), 9)
    assert (refused.value.needed, refused.value.free, refused.value.kept) == (6, 5, 2)


def test_a_prefix_of_more_blocks_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks do not fit into 2"):
        manager_of().prepare(chain("ABC"), 2)


def test_a_block_that_two_requests_computed_is_kept_once() -> None:
    manager = manager_of(8)
    first, second = (manager.prepare(chain("AB"), 3) for _ in range(2))
    manager.register(first, chain("AB"))
    manager.register(second, chain("AB"))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert free(manager) == 8 - 2 - 1 - 1
    manager.check()
    assert manager.take_events() == [Stored(tuple(chain("AB")), None)]


def test_slots_that_were_never_filled_are_reused_first() -> None:
    manager = manager_of(4)
    table = manager.prepare(chain("AB"), 4)
    manager.register(table, chain("AB"))
    unfinished = table.block_ids[2:]
    manager.release(table)
    assert set(manager.prepare([], 2).block_ids) == set(unfinished)
    assert manager.match(chain("AB")) == [DEVICE] * 2


def test_eviction_goes_by_priority_then_recency_then_tails_before_heads() -> None:
    manager = manager_of(10)
    cached(manager, "ABC")
    cached(manager, "XY", priority=1)
    cached(manager, "PQ")
    cached(manager, "AB")  # used again
    eviction = manager.evict(DEVICE, 9)
    order = [slot.block for slot in eviction.leaving]
    assert order == [block(w) for w in ("ABC", "PQ", "P", "AB", "A", "XY", "X")]


def test_a_block_keeps_the_highest_priority_that_it_was_released_with() -> None:
    manager = manager_of(4)
    cached(manager, "A", priority=2)
    cached(manager, "X", priority=1)
    cached(manager, "A", priority=0)
    assert [slot.block for slot in manager.evict(DEVICE, 1).leaving] == [block("X")]


def test_the_tier_below_evicts_in_the_same_order() -> None:
    manager = manager_of(device=8, host=8)
    cached(manager, "ABC")
    cached(manager, "XY")
    manager.take_events()
    from_device = manager.evict(DEVICE, 5)
    assert [s.block for s in from_device.leaving] == [
        block(w) for w in ("ABC", "AB", "A", "XY", "X")
    ]
    finish_all(manager)
    assert manager.take_events() == [
        Stored(tuple(chain("XY")), None, HOST),
        Stored(tuple(chain("ABC")), None, HOST),
    ]
    from_host = manager.evict(HOST, 5)
    assert [s.block for s in from_host.leaving] == [s.block for s in from_device.leaving]


def test_use_in_a_faster_tier_keeps_a_block_recent_in_a_slower_one() -> None:
    clock = Clock()
    manager = manager_of(device=8, host=8, clock=clock)
    cached(manager, "A")
    evict(manager, DEVICE, 1)
    # A is loaded, and stays in host memory too.
    table = manager.prepare(chain("A"), 1)
    finish_all(manager)
    manager.release(table, priority=1)
    clock.now_s += 10
    cached(manager, "X")
    evict(manager, DEVICE, 1)  # X, which has the lower priority
    clock.now_s += 10
    cached(manager, "A")
    clock.now_s += 5
    evict(manager, DEVICE, 1)
    clock.now_s += 1
    evict(manager, HOST, 1)
    assert manager.match(chain("A")) == [HOST]
    assert manager.match(chain("X")) == []
    evict(manager, HOST, 1)
    assert manager.idle_before_evict_s == pytest.approx(16 + (6 - 16) / 200)


def test_eviction_for_a_request_spares_the_blocks_it_found() -> None:
    manager = manager_of(8)
    cached(manager, "ABC")
    cached(manager, "WXYZ")
    with pytest.raises(NotEnoughBlocks):
        manager.prepare(chain("ABCDE"), 5)
    evict(manager, DEVICE, 1)
    assert manager.match(chain("WXYZ")) == [DEVICE] * 3
    assert manager.prepare(chain("ABCDE"), 5).num_matched == 3


def test_if_not_all_can_be_stored_the_heads_of_the_most_recent_chains_are() -> None:
    manager = manager_of(device=8, host=3)
    cached(manager, "ABC")
    cached(manager, "XY")
    evict(manager, DEVICE, 5)
    assert manager.match(chain("XY")) == [HOST] * 2
    assert manager.match(chain("ABC")) == [HOST]
    assert manager.counts.stores_dropped == 2


def test_idle_before_evict_counts_only_blocks_that_left_their_last_tier() -> None:
    clock = Clock()
    manager = manager_of(device=8, host=8, clock=clock)
    cached(manager, "AB")
    cached(manager, "X")
    clock.now_s += 30
    cached(manager, "AB")
    clock.now_s += 30
    evict(manager, DEVICE, 2)  # X and B
    assert manager.idle_before_evict_s == 0
    clock.now_s += 15
    evict(manager, HOST, 1)
    # X, last used 75 s ago, though stored there only 15 s ago.
    assert manager.idle_before_evict_s == 75
    manager.admission = Admission(min_uses=9)
    evict(manager, DEVICE, 1)
    # A, which is stored nowhere else: its 45 s count for one two-hundredth.
    assert manager.idle_before_evict_s == pytest.approx(75 + (45 - 75) / 200)


def test_a_block_is_found_until_it_is_reclaimed_and_may_be_called_back() -> None:
    manager = manager_of(4)
    cached(manager, "ABC")
    manager.take_events()
    eviction = manager.evict(DEVICE, 3)
    assert manager.match(chain("ABC")) == [DEVICE] * 3
    assert manager.take_events() == []
    manager.withdraw(eviction)
    assert manager.take_events() == [Removed(tuple(chain("ABC")[::-1]))]
    table = manager.prepare(chain("AB"), 2)
    assert manager.take_events() == [
        Stored((block("A"),), None),
        Stored((block("AB"),), block("A")),
    ]
    assert manager.reclaim(eviction) == 1
    manager.check()
    assert manager.match(chain("ABC")) == [DEVICE] * 2
    assert table.num_matched == 2
    assert manager.counts.evicted == 1


def test_a_block_called_back_and_chosen_again_is_not_reclaimed_by_the_first_eviction() -> None:
    manager = manager_of(4)
    cached(manager, "A")
    first = manager.evict(DEVICE, 1)
    manager.withdraw(first)
    cached(manager, "A")
    manager.take_events()
    manager.evict(DEVICE, 1)
    cached(manager, "A")
    assert manager.take_events() == [], "the eviction was never withdrawn"
    second = manager.evict(DEVICE, 1)
    assert manager.reclaim(first) == 0
    assert manager.match(chain("A")) == [DEVICE]
    manager.withdraw(second)
    assert manager.reclaim(second) == 1
    assert manager.match(chain("A")) == []


def test_a_pin_keeps_blocks_until_it_ends() -> None:
    clock = Clock()
    manager = manager_of(4, clock=clock)
    cached(manager, "AB")
    cached(manager, "X")
    assert manager.pin(chain("ABC"), ttl_s=10.0) == 2
    assert [slot.block for slot in manager.evict(DEVICE, 4).leaving] == [block("X")]
    manager.check()
    clock.now_s += 5
    manager.pin(chain("A"), ttl_s=10.0)
    manager.pin(chain("AB"), ttl_s=1.0)  # shortens neither pin
    clock.now_s += 5
    assert [slot.block for slot in manager.evict(DEVICE, 4).leaving] == [block("AB")]
    clock.now_s += 5
    assert [slot.block for slot in manager.evict(DEVICE, 4).leaving] == [block("A")]
    manager.check()


def test_a_pin_holds_for_a_block_that_is_used_and_released_meanwhile() -> None:
    clock = Clock()
    manager = manager_of(4, clock=clock)
    cached(manager, "A")
    manager.pin(chain("A"), ttl_s=10.0)
    for _ in range(3):
        cached(manager, "A")
    assert idle(manager) == 0
    clock.now_s += 10
    assert idle(manager) == 1


def test_a_block_whose_pin_expired_during_use_is_idle_once_released() -> None:
    clock = Clock()
    manager = manager_of(4, clock=clock)
    table = computed(manager, "A")
    manager.pin(chain("A"), ttl_s=10.0)
    clock.now_s += 10
    manager.release(table)
    assert idle(manager) == 1
    manager.check()


def test_a_pin_for_no_time_changes_nothing() -> None:
    manager = manager_of(4)
    cached(manager, "A")
    cached(manager, "X")
    manager.pin(chain("A"), ttl_s=0.0)
    assert [slot.block for slot in manager.evict(DEVICE, 1).leaving] == [block("A")]


def test_an_evicted_block_moves_to_the_tier_below_and_is_loaded_from_there() -> None:
    manager = manager_of(4, host=4)
    cached(manager, "ABCD")
    manager.take_events()
    evict(manager, DEVICE, 3)
    assert manager.match(chain("ABCD")) == [DEVICE, HOST, HOST, HOST]
    stored, *rest = manager.take_events()
    assert rest[-1] == Removed(tuple(chain("ABCD")[:0:-1]))
    assert isinstance(stored, Stored)
    assert stored.tier is HOST

    table = manager.prepare(chain("ABCD"), 4)
    assert table.num_matched == 4
    assert not table.is_ready
    (load,) = manager.take_moves()
    assert load.is_load
    assert load.blocks == chain("ABCD")[1:]
    assert [slot.block_id for slot in load.targets] == table.block_ids[1:]
    manager.finish(load, 3)
    manager.check()
    assert table.is_ready
    assert table.num_whole == 4
    assert manager.take_events() == [Stored(tuple(chain("ABCD")[1:]), block("A"))]
    assert manager.counts.loaded == manager.counts.stored == 3


def test_a_prompt_whose_blocks_alternate_between_tiers_is_matched_in_one_go() -> None:
    manager = manager_of(8, host=8, disk=8)
    blocks = chain("ABCDE")
    held = [(n, 0, block, blocks[n - 1] if n else None) for n, block in enumerate(blocks)]
    manager.adopt(DISK, held)
    manager.adopt(HOST, held[1::2])
    cached(manager, "A")
    assert manager.match(blocks) == [DEVICE, HOST, DISK, HOST, DISK]
    table = manager.prepare(blocks, 5)
    assert [load.blocks for load in table.loads] == [blocks[1::2], blocks[2::2]]
    finish_all(manager)
    assert table.num_whole == 5


def test_requests_that_share_a_loading_prefix_load_it_once() -> None:
    manager = manager_of(8, host=4)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    first, second = (manager.prepare(chain("ABC"), 4) for _ in range(2))
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.loads == second.loads
    (load,) = manager.take_moves()
    manager.finish(load, 3)
    assert first.is_ready
    assert second.is_ready
    assert manager.counts.loaded == 3


def test_a_load_outlives_the_request_that_wanted_it() -> None:
    manager = manager_of(4, host=4)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    table = manager.prepare(chain("ABC"), 4)
    (load,) = manager.take_moves()
    manager.release(table)
    manager.check()
    assert free(manager) == 1
    manager.finish(load, 3)
    manager.check()
    assert manager.match(chain("ABC")) == [DEVICE] * 3
    assert idle(manager) == 3


def test_after_a_failed_load_all_requests_sharing_it_compute_from_the_last_good_block() -> None:
    manager = manager_of(12, host=4)
    cached(manager, "ABCD")
    evict(manager, DEVICE, 4)
    first, second = (manager.prepare(chain("ABCD"), 5) for _ in range(2))
    (load,) = manager.take_moves()
    manager.take_events()
    manager.finish(load, 1)
    manager.check()
    for table in (first, second):
        assert table.is_ready
        assert table.num_whole == 1
        manager.fall_back(table)
        manager.check()
        assert table.num_matched == 1
        assert len(table.slots) == 5
    assert first.block_ids[0] == second.block_ids[0]
    assert set(first.block_ids[1:]).isdisjoint(second.block_ids[1:])
    # The block that could not be read is dropped; those after it are still in host memory.
    assert manager.take_events() == [Stored((block("A"),), None), Removed((block("AB"),), HOST)]
    assert manager.match(chain("ABCD")) == [DEVICE]
    manager.register(first, chain("ABCD")[1:2])
    assert manager.match(chain("ABCD")) == [DEVICE, DEVICE, HOST, HOST]
    counts = manager.counts
    assert (counts.failed, counts.fallbacks, counts.recomputed) == (3, 2, 6)


def test_blocks_that_another_request_fills_first_replace_a_requests_own_slots() -> None:
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
    manager.fence()
    computed(manager, "ABCDX")
    assert manager.share(late, chain("ABCDX")) == 0


def test_reuse_is_cut_to_a_multiple_of_the_blocks_computed_at_once() -> None:
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


def test_a_request_that_cannot_fall_back_is_released() -> None:
    manager = manager_of(5, host=4)
    cached(manager, "ABCD")
    evict(manager, DEVICE, 4)
    first, second = manager.prepare(chain("ABCD"), 4), manager.prepare(chain("ABCD"), 4)
    finish_all(manager, num_done=0)
    with pytest.raises(NotEnoughBlocks, match="4 needed, 1 free"):
        manager.fall_back(first)
    manager.check()
    manager.fall_back(second)
    manager.check()
    assert free(manager) == 1


def test_write_through_stores_blocks_as_soon_as_they_are_full() -> None:
    manager = manager_of(8, host=4, disk=4, write=WritePolicy.THROUGH)
    table = manager.prepare(chain("AB"), 3)
    manager.register(table, chain("AB"))
    finish_all(manager)
    assert [manager.tiers[tier].find(block("AB")) is not None for tier in Tier] == [True] * 3
    assert manager.counts.stored == 4
    manager.release(table)
    assert finish_all(manager) == []
    evict(manager, DEVICE, 2)
    assert manager.counts.stored == 4
    assert manager.match(chain("AB")) == [HOST] * 2


def test_blocks_are_stored_once_they_were_used_min_uses_times() -> None:
    manager = manager_of(4, host=4, admission=Admission(min_uses=2))
    cached(manager, "AB")
    cached(manager, "A")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [HOST]
    assert manager.counts.stores_dropped == 0


def test_earlier_uses_of_an_evicted_block_count_when_it_is_computed_again() -> None:
    manager = manager_of(4, host=4, admission=Admission(min_uses=2))
    cached(manager, "AB")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == []
    cached(manager, "AB")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [HOST] * 2


def test_uses_are_remembered_for_as_many_evicted_blocks_as_the_device_has_slots() -> None:
    manager = manager_of(2, host=4, admission=Admission(min_uses=2))
    for word in "ABCCA":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    assert manager.match(chain("C")) == [HOST]
    assert manager.match(chain("A")) == []


def test_uses_are_remembered_for_the_blocks_last_evicted_from_any_tier() -> None:
    manager = manager_of(2, host=4)
    for word in "AB":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    evict(manager, HOST, 1)  # A, after B has left the device
    manager.admission = Admission(min_uses=2)
    for word in "CA":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    assert manager.match(chain("A")) == [HOST]


def test_a_tier_slower_than_computing_is_neither_stored_to_nor_loaded_from() -> None:
    manager = manager_of(8, host=4, disk=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    finish_all(manager)
    evict(manager, DEVICE, 2)
    evict(manager, HOST, 2)
    assert manager.match(chain("AB")) == [DISK] * 2
    manager.admission = Admission(compute_s=1.0, load_s={HOST: 0.5, DISK: 2.0})
    assert manager.match(chain("AB")) == []
    cached(manager, "AB")
    finish_all(manager)
    assert manager.tiers[HOST].find(block("A")) is not None
    manager.admission = Admission(compute_s=1.0, load_s={HOST: math.inf})
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [DISK] * 2
    assert manager.prefetch(chain("AB"), HOST) == 0, "a tier that is slow has the blocks even so"
    cached(manager, "XY")
    assert finish_all(manager) == []


def test_stores_beyond_the_limit_are_dropped_but_loads_are_not() -> None:
    manager = manager_of(12, host=8, max_storing=3)
    cached(manager, "ABCDEF")
    eviction = manager.evict(DEVICE, 6)
    assert eviction.store is not None
    assert len(eviction.store.blocks) == 3
    assert manager.counts.stores_dropped == 3
    manager.check()
    finish_all(manager)
    manager.withdraw(eviction)
    manager.reclaim(eviction)
    cached(manager, "ABCDEF")
    evict(manager, DEVICE, 6)
    assert manager.match(chain("ABCDEF")) == [HOST] * 6
    assert len(manager.prepare(chain("ABCDEF"), 6).loads[0].blocks) == 6


def test_stores_to_disk_do_not_count_towards_the_limit_of_stores_to_the_host() -> None:
    manager = manager_of(8, host=8, disk=8, max_storing=3)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    assert manager.room_below(HOST) == manager.room_below(DEVICE) == 3
    to_disk = manager.evict(HOST, 3).store
    assert to_disk is not None
    assert (manager.room_below(HOST), manager.room_below(DISK)) == (0, 0)
    cached(manager, "WXYZ")
    assert manager.room_below(DEVICE) == 3
    to_host = manager.evict(DEVICE, 3).store
    assert to_host is not None
    assert len(to_host.blocks) == 3
    manager.check()


def test_a_block_that_is_being_stored_is_neither_stored_again_nor_evicted() -> None:
    manager = manager_of(4, host=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    (store,) = manager.take_moves()
    eviction = manager.evict(DEVICE, 2)
    assert eviction.store is None
    assert eviction.leaving == []  # the store still reads them
    manager.finish(store, 2)
    assert free(manager, HOST) == 2


def test_a_block_computed_again_while_it_is_stored_starts_no_second_store() -> None:
    manager = manager_of(4, host=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    (store,) = manager.take_moves()
    manager.fence()
    computed(manager, "AB")
    assert manager.take_moves() == []
    manager.finish(store, 2)
    manager.check()
    # The copied blocks are from before the fence.
    assert free(manager, HOST) == 4


def test_blocks_that_a_store_failed_to_copy_hold_no_slots_below() -> None:
    manager = manager_of(4, host=4)
    cached(manager, "ABC")
    eviction = manager.evict(DEVICE, 3)
    finish_all(manager, num_done=1)
    manager.withdraw(eviction)
    manager.reclaim(eviction)
    manager.check()
    assert free(manager, HOST) == 3
    assert free(manager) == 4
    assert manager.counts.failed == 2


def test_prefetching_fills_only_free_slots_and_is_shared_like_any_load() -> None:
    manager = manager_of(8, host=3, disk=8)
    cached(manager, "ABCDE")
    for tier, count in ((DEVICE, 2), (HOST, 2), (DEVICE, 3), (HOST, 3)):
        evict(manager, tier, count)
    assert manager.match(chain("ABCDE")) == [DISK] * 5
    assert manager.prefetch(chain("ABCDE"), HOST) == 3
    table = manager.prepare(chain("ABCDE"), 5)
    up, from_host, from_disk = manager.take_moves()
    assert (up.source, up.target, up.blocks) == (DISK, HOST, chain("ABC"))
    assert (from_host.source, from_host.after) == (HOST, [up])
    assert (from_disk.source, from_disk.after) == (DISK, [])
    assert from_host.num_ready == 0
    manager.finish(up, 3)
    assert from_host.num_ready == 3
    manager.finish(from_disk, 2)
    manager.finish(from_host, 3)
    manager.check()
    assert table.num_whole == 5
    assert manager.prefetch(chain("ABCDE")) == 0


def test_a_block_that_is_computed_while_it_is_loaded_keeps_its_own_slot() -> None:
    manager = manager_of(4, host=4)
    table = manager.prepare(chain("A"), 1)
    cached(manager, "A")
    evict(manager, DEVICE, 1)
    assert manager.prefetch(chain("A")) == 1
    (own,) = table.slots
    manager.register(table, chain("A"))
    assert table.slots == [own]
    finish_all(manager, num_done=0)
    assert own.references == 1


def test_a_load_from_a_slot_whose_own_load_failed_has_nothing_to_copy() -> None:
    manager = manager_of(8, host=3, disk=8)
    cached(manager, "AB")
    evict(manager, DEVICE, 2)
    evict(manager, HOST, 2)
    manager.prefetch(chain("AB"), HOST)
    table = manager.prepare(chain("AB"), 2)
    up, last = manager.take_moves()
    manager.finish(up, 1)
    assert last.num_ready == 1
    manager.finish(last, last.num_ready)
    manager.check()
    assert table.num_whole == 1
    assert manager.match(chain("AB")) == [DEVICE]


def test_no_block_from_before_a_fence_is_found() -> None:
    manager = manager_of(8, host=4)
    cached(manager, "AB")
    evict(manager, DEVICE, 1)
    running = computed(manager, "XY", tail=1)
    loading = manager.prepare(chain("AB"), 2)
    (load,) = manager.take_moves()
    manager.take_events()
    manager.fence()
    manager.check()
    assert manager.take_events() == [Cleared()]
    assert manager.match(chain("AB")) == manager.match(chain("XY")) == []
    manager.finish(load, 1)
    manager.register(running, chain("XYZ")[2:])
    assert manager.match(chain("XYZ")) == []
    assert manager.take_events() == []
    assert loading.num_whole == 0
    manager.release(running)
    manager.release(loading)
    manager.check()
    assert (free(manager), free(manager, HOST)) == (8, 4)
    cached(manager, "XY")
    assert manager.match(chain("XY")) == [DEVICE] * 2


def test_only_a_manager_that_is_not_in_use_can_be_reset() -> None:
    manager = manager_of(4, host=4)
    table = computed(manager, "AB")
    with pytest.raises(ValueError, match="1 requests and 0 copies remain"):
        manager.reset()
    manager.release(table)
    manager.evict(DEVICE, 1)
    with pytest.raises(ValueError, match="0 requests and 1 copies remain"):
        manager.reset()
    finish_all(manager)
    manager.reset()
    assert free(manager) == 4


def test_adopted_blocks_are_found_and_announced() -> None:
    manager = manager_of(4, disk=4)
    manager.adopt(DISK, [(2, 5, block("A"), None), (0, 7, block("AB"), block("A"))])
    manager.check()
    assert manager.match(chain("AB")) == [DISK] * 2
    assert manager.take_events() == [Stored(tuple(chain("AB")), None, DISK)]
    assert free(manager, DISK) == 2
    table = manager.prepare(chain("AB"), 2)
    assert [slot.block_id for slot in table.loads[0].sources] == [2, 0]
    assert table.loads[0].generations == [5, 7]


def test_a_block_adopted_from_two_slots_is_found_once() -> None:
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


def test_adopted_tails_are_evicted_before_the_blocks_they_continue() -> None:
    manager = manager_of(4, disk=8)
    blocks = [*chain("ABC"), *chain("XY"), *chain("ABDE")[2:]]
    parents = [None, *blocks[:2], None, blocks[3], blocks[1], blocks[5]]
    manager.adopt(DISK, [(n, 0, b, parents[n]) for n, b in enumerate(blocks)])
    order = [slot.block for slot in manager.evict(DISK, 7).leaving]
    assert order == [block(w) for w in ("ABC", "XY", "ABDE", "X", "ABD", "AB", "A")]


def test_nothing_leaks_after_a_thousand_cancelled_requests() -> None:
    manager = manager_of(64, host=64)
    cached(manager, "ABCDEFGH")
    evict(manager, DEVICE, 8)
    for n in range(1_000):
        table = manager.prepare(chain("ABCDEFGH"[: n % 9]), 10)
        moves = manager.take_moves()
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


def test_a_manager_needs_slots_on_the_device() -> None:
    with pytest.raises(ValueError, match="needs slots on the device"):
        manager_of(0, host=4)
    with pytest.raises(ValueError, match="a tier of 0 slots"):
        BlockManager({DEVICE: 0}, now=Clock())


def count_calls(work: Callable[[], None]) -> int:
    """Number of calls of Python and C functions."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def workload(num_blocks: int) -> Callable[[], None]:
    """Every operation on `num_blocks` blocks, in each of three tiers."""
    blocks = [SequenceHash(n + 1) for n in range(num_blocks)]
    clock = Clock()
    manager = manager_of(num_blocks, num_blocks, num_blocks, clock, max_storing=num_blocks)

    def work() -> None:
        table = manager.prepare(blocks, num_blocks)
        manager.register(table, blocks)
        manager.release(table)
        manager.pin(blocks, 1.0)
        clock.now_s += 1
        for tier in (DEVICE, HOST):
            eviction = manager.evict(tier, num_blocks)
            for move in manager.take_moves():
                manager.finish(move, num_blocks)
            manager.withdraw(eviction)
            manager.reclaim(eviction)
        manager.prefetch(blocks, HOST)
        table = manager.prepare(blocks, num_blocks)
        for move in manager.take_moves():
            manager.finish(move, num_blocks // 2)
        manager.fall_back(table)
        manager.release(table)
        manager.fence()

    return work


def test_the_cost_grows_linearly_with_the_number_of_blocks() -> None:
    few, many = (count_calls(workload(n)) for n in (1_000, 10_000))
    assert 9 < many / few < 11
