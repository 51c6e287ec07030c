"""Events of groups with sliding windows or recurrent states, and the blocks that are shown then."""

from itertools import groupby
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.events import Ends
from app.core.overlaps import Resume
from app.core.types import TierOverlap
from tests.workers.bridge.holder import SIZE, TOKENS, Holder, announced, chain_of
from workers.agent.ownership import Ownership
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored

FULL, WINDOW, OTHER = 0, 1, 2
KINDS = {FULL: "full_attention", WINDOW: "sliding_window", OTHER: "sliding_window"}
SEEN = 2 * SIZE + 1
"""Tokens in a window that needs two blocks."""


def stored(names, group, parent=None, *, start=0, kind=None, seen=SEEN, medium="GPU"):
    kind = kind or KINDS[group]
    return BlockStored(
        names,
        parent,
        TOKENS[start * SIZE : (start + len(names)) * SIZE],
        SIZE,
        medium=medium,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=seen if kind.startswith("sliding") else None,
    )


def removed(*names, group):
    return BlockRemoved(names, "GPU", group)


NAMES = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def windowed(holder):
    """Holds six blocks in both groups."""
    assert holder.after(stored(NAMES, FULL), stored(NAMES, WINDOW)) == TierOverlap(device=6)
    return holder


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_are_shown_once_the_window_group_holds_them_too(holder, order):
    holder.take(*[stored(NAMES, FULL), stored(NAMES, WINDOW)][::order])
    assert holder.overlap() == TierOverlap(device=6)


def test_an_engine_without_windows_tells_of_no_ends(holder):
    assert not any(isinstance(one, Ends) for one in holder.blocks.take(stored(NAMES, FULL)))


def test_the_overlap_ends_where_the_window_group_lost_a_block_of_the_window(windowed):
    assert windowed.after(removed(16, group=WINDOW)) == TierOverlap(device=5)
    windowed.take(removed(14, group=WINDOW))
    assert windowed.overlap() == TierOverlap(device=3), "15 alone is not a window"
    assert windowed.after(removed(12, group=WINDOW)) == TierOverlap(device=1)


def test_blocks_before_the_window_are_not_needed(windowed):
    assert windowed.after(removed(11, 12, 13, 14, group=WINDOW)) == TierOverlap(device=6)
    assert windowed.after(removed(15, group=WINDOW)) == TierOverlap()


def test_what_is_stored_again_is_shown_again(windowed):
    assert windowed.after(removed(12, 13, 14, 15, group=WINDOW)) == TierOverlap(device=1)
    assert windowed.after(stored([15], WINDOW, 14, start=4)) == TierOverlap(device=6)
    windowed.take(removed(13, group=FULL))
    assert windowed.overlap() == TierOverlap(device=1), "12 leads to nothing that can be reached"
    assert windowed.after(stored([13], FULL, 12, start=2)) == TierOverlap(device=6)


@pytest.mark.parametrize(("seen", "num_blocks"), [(2, 1), (SIZE + 1, 1), (SIZE + 2, 2), (None, 6)])
def test_a_window_needs_the_blocks_that_hold_the_tokens_it_sees(holder, seen, num_blocks):
    holder.take(stored(NAMES, FULL), stored(NAMES, WINDOW, seen=seen))
    assert holder.after(removed(*NAMES[: 6 - num_blocks], group=WINDOW)) == TierOverlap(device=6)
    assert holder.after(removed(NAMES[6 - num_blocks], group=WINDOW)) == TierOverlap()


def test_a_recurrent_state_is_needed_at_the_end_only(holder):
    states = replace(stored(NAMES[:4], WINDOW, kind="mamba"), block_hashes=[14])
    assert holder.after(stored(NAMES, FULL), states) == TierOverlap(device=4)
    assert holder.after(removed(14, group=WINDOW)) == TierOverlap()


@pytest.mark.parametrize("seen", [SEEN, SIZE])
def test_each_group_with_a_window_has_to_hold_its_own(windowed, seen):
    assert windowed.after(stored(NAMES[:3], OTHER, seen=seen)) == TierOverlap(device=3)
    assert windowed.after(removed(13, group=WINDOW)) == TierOverlap(device=2)


def test_a_copy_of_a_window_block_suffices(windowed):
    windowed.take(stored([16], WINDOW, 15, start=5), removed(16, group=WINDOW))
    assert windowed.overlap() == TierOverlap(device=6)
    windowed.take(replace(removed(16, group=WINDOW), remaining_copy_counts=[0]))
    assert windowed.overlap() == TierOverlap(device=5)


def test_an_offloaded_window_block_suffices(windowed):
    windowed.take(replace(announced([16]), group_idx=WINDOW), removed(16, group=WINDOW))
    assert windowed.overlap() == TierOverlap(device=6)
    assert windowed.after(BlockRemoved([16], "CPU", WINDOW)) == TierOverlap(device=5)


def test_only_the_tiers_of_the_group_that_counts_are_shown(windowed):
    windowed.take(replace(announced([11, 12, 16]), group_idx=FULL), removed(12, group=FULL))
    assert windowed.overlap() == TierOverlap(device=1, host=5)
    assert windowed.after(BlockRemoved([11, 12, 16], "CPU", FULL)) == TierOverlap(device=1)


def test_remote_blocks_of_a_window_do_not_count(windowed):
    windowed.take(removed(16, group=WINDOW))
    windowed.take(replace(stored([16], WINDOW, 15, start=5), locality="REMOTE"))
    assert windowed.overlap() == TierOverlap(device=5)


def test_a_clear_forgets_what_windows_hold_but_not_what_they_need(windowed):
    assert windowed.after(AllBlocksCleared(), stored(NAMES, FULL)) == TierOverlap()
    assert windowed.after(stored(NAMES[:2], WINDOW)) == TierOverlap(device=2)


@pytest.mark.parametrize("kind", ["chunked_local_attention", "cross_attention", "unknown"])
def test_a_group_whose_needs_events_do_not_say_needs_all(holder, kind):
    holder.take(stored(NAMES, FULL), stored(NAMES[:4], WINDOW, kind=kind))
    assert holder.overlap() == TierOverlap(device=4)
    assert holder.after(removed(12, group=WINDOW)) == TierOverlap(device=1)


def test_another_group_with_attention_over_the_whole_prefix_needs_all(holder):
    holder.take(stored(NAMES, FULL), stored(NAMES, WINDOW, kind="full_attention"))
    assert holder.overlap() == TierOverlap(device=6)
    assert holder.after(removed(13, group=WINDOW)) == TierOverlap(device=2)
    holder.take(stored([13], WINDOW, 12, start=2, kind="full_attention"))
    assert holder.overlap() == TierOverlap(device=6)


def test_a_prompt_that_branches_off_between_two_ends_is_reused_up_to_the_first(windowed):
    assert windowed.after(removed(13, 14, group=WINDOW)) == TierOverlap(device=6)
    for length, reused in ((5, 2), (4, 2), (3, 2), (2, 2), (1, 1)):
        branch = chain_of(TOKENS[: length * SIZE] + [7] * SIZE)
        assert windowed.overlap(branch) == TierOverlap(device=reused)


def test_a_snapshot_of_what_windows_hold_is_not_taken(windowed):
    assert windowed.blocks.snapshot() is None


def test_the_part_of_a_block_at_the_end_of_a_prompt_is_left_out(holder):
    large = replace(stored(NAMES[:1], FULL), block_size=2 * SIZE, token_ids=TOKENS[: 2 * SIZE])
    holder.take(large, stored([13], FULL, 99, start=3))
    holder.clock.now = 60
    assert not holder.blocks.is_blind
    assert holder.overlap() == TierOverlap(device=2)


@pytest.mark.parametrize("order", [1, -1])
def test_where_events_leave_blocks_out_these_were_before_what_all_groups_have(holder, order):
    """The blocks of the first group are twice as long: 12, 14 and 16 end theirs."""
    large = replace(stored([12, 14, 16], FULL), block_size=2 * SIZE, token_ids=TOKENS[: 6 * SIZE])
    masked = replace(stored(NAMES, WINDOW), block_hashes=[12, 15, 16])
    holder.take(*[large, masked][::order])
    assert holder.overlap() == TierOverlap(device=6), "15 and 16 are a window, 12 is none"
    assert holder.after(removed(15, group=WINDOW)) == TierOverlap()
    assert holder.after(stored([11, 12], WINDOW)) == TierOverlap(device=2)


Prompt = tuple[int, ...]
"""A number for each block of the index."""


class Engine:
    """Holds blocks of several groups, and reuses them as vLLM does.

    sizes and needed: for each group, how many blocks of the index one of its own holds, and how
    many of its own it needs before an end. Group 0 needs all.
    """

    def __init__(self, sizes, needed):
        self.sizes, self.needed = sizes, needed
        self.holder, self.ownership = Holder(), Ownership()
        self.shown = {}
        self.names = {}
        self.held = [[] for _ in sizes]
        for group in range(len(sizes)):
            self.store(group, (9,) * lcm(*sizes))

    def take(self, event):
        changes = self.holder.blocks.take(event)
        self.ownership.apply(changes)
        self.ownership.check()
        for change in changes:
            self.holder.cache.take(change)
        for block, tier, _, back in self.ownership.drain(0):
            if tier is None:
                self.shown.pop(block)
            else:
                self.shown[block] = back

    def promised(self, prompt):
        """How many blocks of a longer prompt are promised to be reused."""
        chain = chain_of(tokens_of(prompt))
        held = next((n for n, block in enumerate(chain) if block not in self.shown), len(chain))
        back = self.shown[chain[held - 1]] if held else 0
        return Resume.of(held, back).last if back else held

    def ends(self, group, prompt):
        """The prefixes of `prompt` that end with a block of the group."""
        return [prompt[:n] for n in range(self.sizes[group], len(prompt) + 1, self.sizes[group])]

    def store(self, group, prompt, skipped=0):
        """Those of the prompt's blocks that the group lacks, each stretch in an event; with a
        window, without the first `skipped`."""
        ends = self.ends(group, prompt)
        first = skipped if group else 0
        lacking = [at for at in range(first, len(ends)) if ends[at] not in self.held[group]]
        for _, pairs in groupby(enumerate(lacking), lambda pair: pair[1] - pair[0]):
            stretch = [at for _, at in pairs]
            size = self.sizes[group] * SIZE
            self.take(
                BlockStored(
                    [self.name(ends[at]) for at in stretch],
                    self.name(ends[stretch[0] - 1]) if stretch[0] else None,
                    tokens_of(prompt)[stretch[0] * size : (stretch[-1] + 1) * size],
                    size,
                    group_idx=group,
                    kv_cache_spec_kind=KINDS[group],
                    kv_cache_spec_sliding_window=self.needed[group] * size + 1 if group else None,
                )
            )
        self.held[group] += [ends[at] for at in lacking]

    def remove(self, group, at):
        if self.held[group]:
            end = self.held[group].pop(at % len(self.held[group]))
            self.take(removed(self.name(end), group=group))

    def name(self, end):
        return self.names.setdefault(end, len(self.names))

    def can_resume_after(self, prompt):
        ends = [self.ends(group, prompt) for group in range(len(self.sizes))]
        return all(each[-1:] == [prompt] for each in ends) and all(
            end in self.held[group]
            for group, num in enumerate(self.needed)
            for end in ends[group][-num if group else 0 :]
        )

    def reused(self, prompt):
        lengths = range(len(prompt), 0, -1)
        return next((n for n in lengths if self.can_resume_after(prompt[:n])), 0)

    def check(self, prompt):
        """What is promised is what is reused, wherever a prompt leaves what is held."""
        for length in range(len(prompt) + 1):
            reused = self.reused(prompt[:length])
            assert self.holder.overlap(chain_of(tokens_of(prompt[:length]))).total == reused
            assert self.promised(prompt[:length]) == reused


def tokens_of(prompt):
    return [token for block in prompt for token in range(block * SIZE, (block + 1) * SIZE)]


GROUP = st.sampled_from([FULL, WINDOW, OTHER])
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
STEP = st.one_of(
    st.tuples(st.sets(GROUP, min_size=1), PROMPT, st.integers(0, 8)),
    st.tuples(GROUP, st.integers(0, 99)),
)


@settings(max_examples=150)
@given(
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.lists(STEP, max_size=40),
)
def test_whatever_groups_store_and_remove_what_is_promised_is_reused(sizes, needed, steps):
    engine = Engine([*sizes], [*needed])
    prompts = [(9,) * 12]
    for step in steps:
        match step:
            case set() as groups, tuple() as prompt, int() as skipped:
                prompts.append(prompt)
                for group in sorted(groups):
                    engine.store(group, prompt, skipped)
            case int() as group, int() as at:
                engine.remove(group, at)
        for prompt in prompts:
            engine.check(prompt)
    for group in range(len(sizes)):
        while engine.held[group]:
            engine.remove(group, 0)
    windows = engine.holder.blocks._windows
    assert not windows._ends
    assert not windows._names, "nothing is remembered of what is gone"
    assert not any(window.blocks for window in windows._windows)
