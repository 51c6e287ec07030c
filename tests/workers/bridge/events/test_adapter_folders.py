"""Blocks of an adapter that is loaded again, under its name, from another folder."""

from app.core.types import TierOverlap
from tests.workers.bridge.holder import SIZE, TOKENS, announced, chain_of, stored
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import BlockRemoved

OLD, NEW = {"sql": "/old"}, {"sql": "/new"}
CHAIN = chain_of(TOKENS, "sql")


def of_adapter(hashes, start=0, parent=None):
    return stored(hashes, start, parent, lora_name="sql")


def loaded(holder, folders):
    for change in holder.blocks.load_adapters(folders):
        holder.cache.take(change)
    return holder.overlap(CHAIN)


def test_blocks_of_the_folder_before_count_no_longer(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11, 12]), stored([21, 22, 23]))
    assert loaded(holder, OLD) == TierOverlap(device=2)
    assert loaded(holder, NEW) == TierOverlap()
    assert holder.overlap() == TierOverlap(device=3)
    assert holder.blocks.num_held == 3


def test_they_count_again_once_it_is_loaded_from_there(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11, 12]), announced([11]))
    loaded(holder, OLD)
    loaded(holder, NEW)
    holder.take(BlockRemoved([12]), announced([12]))
    assert holder.overlap(CHAIN) == TierOverlap()
    assert loaded(holder, OLD) == TierOverlap(device=1, host=1)


def test_what_was_stored_since_the_last_look_is_of_the_new_folder(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11, 12]))
    loaded(holder, OLD)
    holder.take(of_adapter([31]))
    assert loaded(holder, NEW) == TierOverlap(device=1)
    holder.take(of_adapter([32], 1, 31))
    assert loaded(holder, NEW) == TierOverlap(device=2)


def test_a_block_behind_a_hidden_one_is_hidden(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11, 12]))
    loaded(holder, OLD)
    loaded(holder, NEW)
    holder.take(of_adapter([13], 2, 12), of_adapter([31]))
    assert loaded(holder, NEW) == TierOverlap(device=1)
    assert loaded(holder, OLD) == TierOverlap(device=3)


def test_an_unloaded_adapter_keeps_its_blocks(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11]))
    loaded(holder, OLD)
    assert loaded(holder, {}) == TierOverlap(device=1)
    assert loaded(holder, NEW) == TierOverlap()


def test_an_adapter_loaded_from_elsewhere_while_the_agent_was_away_is_noticed(holder):
    loaded(holder, OLD)
    holder.take(of_adapter([11, 12]), stored([21]))
    loaded(holder, OLD)
    snapshot = holder.blocks.snapshot()
    assert snapshot is not None
    for folders, held in ((NEW, 1), (OLD, 3)):
        blocks = EngineBlocks(SIZE)
        blocks.load_adapters(folders)
        blocks.restore(snapshot)
        assert blocks.num_held == held == sum(len(one.blocks) for one in blocks.held())
