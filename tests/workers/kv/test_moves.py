"""Blocks on their way between tiers. Prompts are words; see words.py."""

import math

import pytest

from app.core.errors import NotEnoughBlocks
from app.core.events import Removed, Stored
from app.core.types import Tier
from tests.workers.kv.words import (
    DEVICE,
    DISK,
    HOST,
    block,
    cached,
    chain,
    evict,
    finish_all,
    free,
    hashes,
    idle,
    manager_of,
)
from workers.kv.moves import AdmissionPolicy, WritePolicy


def test_an_evicted_block_moves_to_the_tier_below_and_is_loaded_from_there():
    manager = manager_of(4, host=4)
    cached(manager, "ABCD")
    manager.events.take()
    evict(manager, DEVICE, 3)
    assert manager.match(chain("ABCD")) == [DEVICE, HOST, HOST, HOST]
    stored, *rest = manager.events.take()
    assert rest[-1] == Removed(hashes("ABCD")[:0:-1])
    assert isinstance(stored, Stored)
    assert stored.tier is HOST

    table = manager.prepare(chain("ABCD"), 4)
    assert table.num_matched == 4
    assert not table.is_ready
    (load,) = manager.moves.take_planned()
    assert load.is_load
    assert load.blocks == chain("ABCD")[1:]
    assert [slot.block_id for slot in load.targets] == table.block_ids[1:]
    manager.finish(load, 3)
    manager.check()
    assert table.is_ready
    assert table.num_whole == 4
    assert manager.events.take() == [Stored(hashes("ABCD")[1:], hashes("A")[0])]
    assert manager.counts.loaded == manager.counts.stored == 3


def test_a_prompt_whose_blocks_alternate_between_tiers_is_matched_in_one_go():
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


def test_requests_that_share_a_loading_prefix_load_it_once():
    manager = manager_of(8, host=4)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    first, second = (manager.prepare(chain("ABC"), 4) for _ in range(2))
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.loads == second.loads
    (load,) = manager.moves.take_planned()
    manager.finish(load, 3)
    assert first.is_ready
    assert second.is_ready
    assert manager.counts.loaded == 3


def test_a_load_outlives_the_request_that_wanted_it():
    manager = manager_of(4, host=4)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    table = manager.prepare(chain("ABC"), 4)
    (load,) = manager.moves.take_planned()
    manager.release(table)
    manager.check()
    assert free(manager) == 1
    manager.finish(load, 3)
    manager.check()
    assert manager.match(chain("ABC")) == [DEVICE] * 3
    assert idle(manager) == 3


def test_after_a_failed_load_all_requests_sharing_it_compute_from_the_last_good_block():
    manager = manager_of(12, host=4)
    cached(manager, "ABCD")
    evict(manager, DEVICE, 4)
    first, second = (manager.prepare(chain("ABCD"), 5) for _ in range(2))
    (load,) = manager.moves.take_planned()
    manager.events.take()
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
    assert manager.events.take() == [Stored(hashes("A"), None), Removed(hashes("AB")[1:], HOST)]
    assert manager.match(chain("ABCD")) == [DEVICE]
    manager.register(first, chain("ABCD")[1:2])
    assert manager.match(chain("ABCD")) == [DEVICE, DEVICE, HOST, HOST]
    counts = manager.counts
    assert (counts.failed, counts.fallbacks, counts.recomputed) == (3, 2, 6)


def test_a_request_that_cannot_fall_back_is_released():
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


def test_write_through_stores_blocks_as_soon_as_they_are_full():
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


def test_blocks_are_stored_once_they_were_used_min_uses_times():
    manager = manager_of(4, host=4, admission=AdmissionPolicy(min_uses=2))
    cached(manager, "AB")
    cached(manager, "A")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [HOST]
    assert manager.counts.stores_dropped == 0


def test_earlier_uses_of_an_evicted_block_count_when_it_is_computed_again():
    manager = manager_of(4, host=4, admission=AdmissionPolicy(min_uses=2))
    cached(manager, "AB")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == []
    cached(manager, "AB")
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [HOST] * 2


def test_uses_are_remembered_for_as_many_evicted_blocks_as_the_device_has_slots():
    manager = manager_of(2, host=4, admission=AdmissionPolicy(min_uses=2))
    for word in "ABCCA":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    assert manager.match(chain("C")) == [HOST]
    assert manager.match(chain("A")) == []


def test_uses_are_remembered_for_the_blocks_last_evicted_from_any_tier():
    manager = manager_of(2, host=4)
    for word in "AB":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    evict(manager, HOST, 1)  # A, after B has left the device
    manager.admission = AdmissionPolicy(min_uses=2)
    for word in "CA":
        cached(manager, word)
        evict(manager, DEVICE, 1)
    assert manager.match(chain("A")) == [HOST]


def test_a_tier_slower_than_computing_is_neither_stored_to_nor_loaded_from():
    manager = manager_of(8, host=4, disk=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    finish_all(manager)
    evict(manager, DEVICE, 2)
    evict(manager, HOST, 2)
    assert manager.match(chain("AB")) == [DISK] * 2
    manager.admission = AdmissionPolicy(compute_s=1.0, load_s={HOST: 0.5, DISK: 2.0})
    assert manager.match(chain("AB")) == []
    cached(manager, "AB")
    finish_all(manager)
    assert manager.tiers[HOST].find(block("A")) is not None
    manager.admission = AdmissionPolicy(compute_s=1.0, load_s={HOST: math.inf})
    evict(manager, DEVICE, 2)
    assert manager.match(chain("AB")) == [DISK] * 2
    cached(manager, "XY")
    assert finish_all(manager) == []


def test_stores_beyond_the_limit_are_dropped_but_loads_are_not():
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


def test_stores_to_disk_do_not_count_towards_the_limit_of_stores_to_the_host():
    manager = manager_of(8, host=8, disk=8, max_storing=3)
    cached(manager, "ABC")
    evict(manager, DEVICE, 3)
    assert manager.moves.room_below(HOST) == manager.moves.room_below(DEVICE) == 3
    to_disk = manager.evict(HOST, 3).store
    assert to_disk is not None
    assert (manager.moves.room_below(HOST), manager.moves.room_below(DISK)) == (0, 0)
    cached(manager, "WXYZ")
    assert manager.moves.room_below(DEVICE) == 3
    to_host = manager.evict(DEVICE, 3).store
    assert to_host is not None
    assert len(to_host.blocks) == 3
    manager.check()


def test_a_block_that_is_being_stored_is_neither_stored_again_nor_evicted():
    manager = manager_of(4, host=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    (store,) = manager.moves.take_planned()
    eviction = manager.evict(DEVICE, 2)
    assert eviction.store is None
    assert eviction.leaving == []  # the store still reads them
    manager.finish(store, 2)
    assert free(manager, HOST) == 2


def test_blocks_that_a_store_failed_to_copy_hold_no_slots_below():
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


def test_prefetching_fills_only_free_slots_and_is_shared_like_any_load():
    manager = manager_of(8, host=3, disk=8)
    cached(manager, "ABCDE")
    for tier, count in ((DEVICE, 2), (HOST, 2), (DEVICE, 3)):
        evict(manager, tier, count)
    assert manager.match(chain("ABCDE")) == [HOST] * 3 + [DISK] * 2
    other = manager.prepare([], 4)
    assert manager.prefetch(chain("ABCDE")) == 4
    from_host, from_disk = manager.moves.take_planned()
    assert (from_host.source, from_host.blocks) == (HOST, chain("ABC"))
    assert (from_disk.source, from_disk.blocks) == (DISK, chain("ABCD")[3:])
    manager.release(other)
    table = manager.prepare(chain("ABCDE"), 5)
    (last,) = manager.moves.take_planned()
    assert (last.source, last.blocks) == (DISK, [block("ABCDE")])
    assert table.loads == [from_host, from_disk, last]
    for move in table.loads:
        manager.finish(move, len(move.blocks))
    manager.check()
    assert table.num_whole == 5
    assert manager.prefetch(chain("ABCDE")) == 0


def test_a_block_that_is_computed_while_it_is_loaded_keeps_its_own_slot():
    manager = manager_of(4, host=4)
    table = manager.prepare(chain("A"), 1)
    cached(manager, "A")
    evict(manager, DEVICE, 1)
    assert manager.prefetch(chain("A")) == 1
    (own,) = table.slots
    manager.register(table, chain("A"))
    assert table.slots == [own]
    kept = manager.keep(table)
    assert kept.slots == [own], "the other one is not filled yet"
    manager.check()
    finish_all(manager, num_done=0)
    manager.release(table)
    assert own.references == 1
    manager.release(kept)
    manager.check()
    assert free(manager) == 4
