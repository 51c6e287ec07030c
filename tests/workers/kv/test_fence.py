from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.core.events import Cleared
from app.core.types import SequenceHash
from tests.workers.kv.words import (
    DEVICE,
    HOST,
    Clock,
    cached,
    chain,
    computed,
    count_calls,
    evict,
    finish_all,
    free,
)
from workers.kv.fence import FencingBlockManager
from workers.kv.policies import WritePolicy


def fencing(device: int, host: int = 0, **options: Any) -> FencingBlockManager:
    sizes = {DEVICE: device, HOST: host} if host else {DEVICE: device}
    return FencingBlockManager(sizes, now=Clock(), **options)


def test_a_block_computed_again_while_it_is_stored_starts_no_second_store() -> None:
    manager = fencing(4, host=4, write=WritePolicy.THROUGH)
    cached(manager, "AB")
    (store,) = manager.take_moves()
    manager.fence()
    computed(manager, "AB")
    assert manager.take_moves() == []
    manager.finish(store, 2)
    manager.check()
    # The copied blocks are from before the fence.
    assert free(manager, HOST) == 4


def test_no_block_from_before_a_fence_is_found() -> None:
    manager = fencing(8, host=4)
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
    manager = fencing(4, host=4)
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


def test_a_request_from_before_a_fence_shares_nothing_computed_after_it() -> None:
    manager = fencing(12)
    late = manager.prepare(chain("AB"), 3)
    manager.fence()
    computed(manager, "AB")
    assert manager.share(late, chain("AB")) == 0
    manager.check()


def fenced(num_blocks: int) -> Callable[[], None]:
    """A fence while `num_blocks` blocks are there."""
    blocks = [SequenceHash(n + 1) for n in range(num_blocks)]
    manager = fencing(num_blocks)
    manager.register(manager.prepare([], num_blocks), blocks)
    return manager.fence


def test_the_cost_of_a_fence_grows_linearly_with_the_number_of_blocks() -> None:
    few, many = (count_calls(fenced(n)) for n in (1_000, 10_000))
    assert 9 < many / few < 11
