"""Events that arrive before those that they build on."""

import pytest

from app.core.errors import InvalidRequest
from app.core.events import Stored
from app.core.types import Tier, TierOverlap
from tests.workers.bridge.holder import CHAIN, SIZE, TOKENS, Clock, announced, chain_of, stored
from workers.bridge.events import pending
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored


def test_blocks_wait_for_their_parent_in_order(holder):
    holder.take(
        stored([13], start=2, parent=12),
        stored([14, 15], start=3, parent=13),
        announced([14]),
        BlockRemoved([15]),
        BlockRemoved([14]),
        stored([12], start=1, parent=11),
    )
    assert holder.overlap() == TierOverlap()
    assert holder.after(stored([11])) == TierOverlap(device=3, host=1)
    holder.clock.now = 2 * pending.MAX_WAIT_S
    assert not holder.blocks.is_blind


def test_a_chain_as_long_as_the_waiting_limit_may_wait_for_its_root(holder):
    tokens = list(range(pending.MAX_WAITING * SIZE))
    first, *others = [
        BlockStored([n + 1], n or None, tokens[n * SIZE : (n + 1) * SIZE], SIZE)
        for n in range(pending.MAX_WAITING)
    ]
    holder.take(*reversed(others))
    assert holder.overlap(chain_of(tokens)) == TierOverlap()
    holder.take(first)
    assert holder.overlap(chain_of(tokens)) == TierOverlap(device=pending.MAX_WAITING)
    holder.clock.now = 2 * pending.MAX_WAIT_S
    assert not holder.blocks.is_blind


@pytest.mark.parametrize(
    "bad",
    [
        BlockStored([12], 11, TOKENS[:5], SIZE),
        BlockStored([12], 11, TOKENS, 0),
        stored([12], start=1, parent=11, extra_keys=[]),
    ],
)
def test_an_invalid_event_is_refused_at_once_instead_of_waiting(holder, bad):
    with pytest.raises(InvalidRequest):
        holder.take(bad)
    assert holder.after(stored([11])) == TierOverlap(device=1)


def test_a_parent_missing_for_too_long_sets_is_blind(holder):
    holder.take(stored([12], start=1, parent=11))
    holder.clock.now = pending.MAX_WAIT_S
    assert not holder.blocks.is_blind
    holder.clock.now += 0.1
    assert holder.blocks.is_blind
    holder.take(AllBlocksCleared())
    assert not holder.blocks.is_blind


def test_exceeding_the_waiting_limit_sets_is_blind_at_once(holder, monkeypatch):
    monkeypatch.setattr(pending, "MAX_WAITING", 3)
    holder.take(stored([12, 13], start=1, parent=11), BlockRemoved([12]))
    assert not holder.blocks.is_blind
    holder.take(BlockRemoved([13]))
    assert holder.blocks.is_blind


def test_an_offload_of_a_block_that_is_never_stored_does_not_set_is_blind(holder, monkeypatch):
    monkeypatch.setattr(pending, "MAX_WAITING", 4)
    holder.take(announced([11, 31, 32]))
    holder.clock.now = 2 * pending.MAX_WAIT_S
    assert not holder.blocks.is_blind
    holder.take(stored([12], start=1, parent=11))
    # What waits for the parent stays; offloads alone give way.
    holder.take(stored([22, 23], start=1, parent=21))
    assert (holder.blocks.num_left_out, holder.blocks.is_blind) == (2, False)
    assert holder.after(stored([11]), BlockRemoved([11])) == TierOverlap(host=2)
    holder.clock.now += pending.MAX_WAIT_S + 0.1
    assert holder.blocks.is_blind


def test_a_removal_waits_with_its_block_when_offloads_are_left_out(holder, monkeypatch):
    monkeypatch.setattr(pending, "MAX_WAITING", 4)
    holder.take(stored([12], start=1, parent=11), announced([12]), BlockRemoved([12]))
    holder.take(announced([31]), announced([32]), stored([11]))
    assert holder.overlap() == TierOverlap(device=1, host=1)


def test_a_late_joiner_leaves_out_events_that_continue_unknown_blocks(monkeypatch):
    monkeypatch.setattr(pending, "MAX_WAITING", 3)
    clock = Clock()
    late = EngineBlocks(SIZE, clock, joined_late=True)
    assert late.take(stored([12], start=1, parent=11)) == []
    clock.now = pending.MAX_WAIT_S + 0.1
    assert not late.is_blind
    # The next event that has to wait replaces those that have waited too long.
    assert late.take(stored([22, 23], start=1, parent=21)) == []
    assert late.num_left_out == 1
    # A parent that arrives in time resolves the blocks that wait for it.
    device = Tier.DEVICE
    assert late.take(stored([21])) == [
        Stored((CHAIN[0],), None, device),
        Stored((CHAIN[1], CHAIN[2]), CHAIN[0], device),
    ]
    # When more blocks would wait than may, the oldest are left out.
    late.take(stored([32, 33], start=1, parent=31))
    late.take(stored([42, 43], start=1, parent=41))
    assert (late.num_left_out, late.is_blind) == (3, False)
    assert late.take(stored([31])) == [Stored((CHAIN[0],), None, device)]
    assert late.take(stored([32], start=1, parent=31)) == [Stored((CHAIN[1],), CHAIN[0], device)]


def test_a_late_joiner_leaves_out_no_removal_of_a_block_that_may_yet_be_known(holder):
    holder.blocks = EngineBlocks(SIZE, holder.clock, joined_late=True)
    holder.take(stored([21], start=1, parent=11))
    holder.clock.now = pending.MAX_WAIT_S
    # Two copies of 13, which wait for different blocks.
    holder.take(stored([13], start=2, parent=12), stored([12, 13], start=1, parent=11))
    holder.take(BlockRemoved([13]), BlockRemoved([13]))
    holder.clock.now += 0.1
    holder.take(stored([32], start=1, parent=31))
    assert holder.blocks.num_left_out == 3
    assert holder.after(stored([11]), stored([12], start=1, parent=11)) == TierOverlap(device=2)
