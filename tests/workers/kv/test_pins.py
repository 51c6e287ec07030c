from __future__ import annotations

from collections.abc import Callable

import pytest

from app.core.errors import NotEnoughBlocks
from app.core.types import SequenceHash
from tests.workers.kv.words import (
    DEVICE,
    HOST,
    Clock,
    block,
    cached,
    chain,
    computed,
    count_calls,
    evict,
    finish_all,
    idle,
)
from workers.kv.pins import PinningBlockManager


def pinning(num_slots: int, host: int = 0, clock: Clock | None = None) -> PinningBlockManager:
    sizes = {DEVICE: num_slots, HOST: host} if host else {DEVICE: num_slots}
    return PinningBlockManager(sizes, now=clock or Clock())


def cached_with(manager: PinningBlockManager, word: str, priority: int) -> None:
    """Compute the blocks of `word` and release them with that priority."""
    table = computed(manager, word)
    manager.rank(table, priority)
    manager.release(table)
    manager.check()


def test_eviction_goes_by_priority_then_recency_then_tails_before_heads() -> None:
    manager = pinning(10)
    cached(manager, "ABC")
    cached_with(manager, "XY", priority=1)
    cached(manager, "PQ")
    cached(manager, "AB")  # used again
    eviction = manager.evict(DEVICE, 9)
    order = [slot.block for slot in eviction.leaving]
    assert order == [block(w) for w in ("ABC", "PQ", "P", "AB", "A", "XY", "X")]


def test_a_block_keeps_the_highest_priority_that_it_was_released_with() -> None:
    manager = pinning(4)
    cached_with(manager, "A", priority=2)
    cached_with(manager, "X", priority=1)
    cached_with(manager, "A", priority=0)
    assert [slot.block for slot in manager.evict(DEVICE, 1).leaving] == [block("X")]


def test_a_pin_keeps_blocks_until_it_ends() -> None:
    clock = Clock()
    manager = pinning(4, clock=clock)
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
    manager = pinning(4, clock=clock)
    cached(manager, "A")
    manager.pin(chain("A"), ttl_s=10.0)
    for _ in range(3):
        cached(manager, "A")
    assert idle(manager) == 0
    clock.now_s += 10
    assert idle(manager) == 1


def test_a_block_whose_pin_expired_during_use_is_idle_once_released() -> None:
    clock = Clock()
    manager = pinning(4, clock=clock)
    table = computed(manager, "A")
    manager.pin(chain("A"), ttl_s=10.0)
    clock.now_s += 10
    manager.release(table)
    assert idle(manager) == 1
    manager.check()


def test_a_pin_for_no_time_changes_nothing() -> None:
    manager = pinning(4)
    cached(manager, "A")
    cached(manager, "X")
    manager.pin(chain("A"), ttl_s=0.0)
    assert [slot.block for slot in manager.evict(DEVICE, 1).leaving] == [block("A")]


def test_a_block_keeps_its_priority_in_other_tiers() -> None:
    manager = pinning(4, host=4)
    cached_with(manager, "A", priority=1)
    cached(manager, "X")
    evict(manager, DEVICE, 2)
    assert [slot.block for slot in manager.evict(HOST, 1).leaving] == [block("X")]
    table = manager.prepare(chain("A"), 1)
    finish_all(manager)
    manager.release(table)
    cached(manager, "X")
    assert [slot.block for slot in manager.evict(DEVICE, 1).leaving] == [block("X")]


def test_a_refused_request_is_told_that_pinned_blocks_were_not_evictable_anyway() -> None:
    manager = pinning(8, host=8)
    cached(manager, "ABC")
    manager.pin(chain("A"), ttl_s=10.0)
    assert manager.evict(DEVICE, 1).store is not None
    # A cannot be evicted, B can be, and ABC is leaving while it is being stored.
    with pytest.raises(NotEnoughBlocks) as refused:
        manager.prepare(chain("ABC"), 9)
    assert (refused.value.needed, refused.value.free, refused.value.kept) == (6, 5, 2)


def pinned(num_blocks: int) -> Callable[[], None]:
    """Pins that begin and end for `num_blocks` blocks, which are then evicted."""
    blocks = [SequenceHash(n + 1) for n in range(num_blocks)]
    clock = Clock()
    manager = pinning(num_blocks, clock=clock)

    def work() -> None:
        table = manager.prepare([], num_blocks)
        manager.register(table, blocks)
        manager.rank(table, 1)
        manager.release(table)
        manager.pin(blocks, 1.0)
        clock.now_s += 1
        assert len(manager.evict(DEVICE, num_blocks).leaving) == num_blocks

    return work


def test_the_cost_of_pins_grows_linearly_with_the_number_of_blocks() -> None:
    few, many = (count_calls(pinned(n)) for n in (1_000, 10_000))
    assert 9 < many / few < 11
