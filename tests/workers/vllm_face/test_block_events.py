from __future__ import annotations

from app.core.events import Cleared, Removed, Stored
from app.core.hashing import compute_hashes, token_bytes
from app.core.types import Tier, TierOverlap
from tests.workers.bridge.holder import Holder
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored
from workers.vllm_face.block_events import BlockEvents

DEVICE, HOST, DISK = Tier
SIZE = 4
PROMPT = list(range(100, 114))  # three blocks and two tokens
_, (A, B, C) = compute_hashes(PROMPT, SIZE)


def arrived(events: BlockEvents, request_id: str = "r") -> list[object]:
    return [*events.arrived(request_id, (A, B, C), token_bytes(PROMPT))]


def whole(blocks: list[int], tokens: list[int], parent: int | None, medium: str) -> BlockStored:
    return BlockStored(
        blocks,
        parent,
        tokens,
        SIZE,
        medium=medium,
        extra_keys=[None] * len(blocks),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def named(blocks: list[int], medium: str) -> BlockStored:
    return BlockStored(blocks, None, [], 0, medium=medium, group_idx=0)


def test_a_stored_chain_comes_with_parent_and_tokens() -> None:
    events = BlockEvents(SIZE)
    arrived(events)
    assert events.take([Stored((A,), None)]) == [whole([A], PROMPT[:4], None, "GPU")]
    assert events.take([Stored((B, C), A)]) == [whole([B, C], PROMPT[4:12], A, "GPU")]


def test_a_slower_tier_is_told_by_hashes_alone_and_a_removal_names_its_medium() -> None:
    events = BlockEvents(SIZE)
    arrived(events)
    events.take([Stored((A, B), None)])
    assert events.take([Stored((A, B), None, HOST), Removed((B, A))]) == [
        named([A, B], "CPU"),
        BlockRemoved([B, A], "GPU", 0),
    ]
    assert events.take([Stored((A,), None, DISK)]) == [named([A], "STORAGE")]


def test_a_block_stored_again_is_not_told_again() -> None:
    """Subscribers count how often each was stored."""
    events = BlockEvents(SIZE)
    arrived(events)
    events.take([Stored((A, B), None)])
    assert events.take([Stored((A, B, C), None)]) == [whole([C], PROMPT[8:12], B, "GPU")]
    assert events.take([Removed((C, C, 99))]) == [BlockRemoved([C], "GPU", 0)]


def test_blocks_from_an_earlier_life_are_told_once_a_request_brings_their_tokens() -> None:
    events = BlockEvents(SIZE)
    assert events.take([Stored((A, B), None, DISK), Stored((B,), A)]) == []
    assert events.take([Removed((99,), DISK)]) == []
    assert arrived(events) == [
        whole([A], PROMPT[:4], None, "STORAGE"),
        whole([B], PROMPT[4:8], A, "STORAGE"),
        whole([B], PROMPT[4:8], A, "GPU"),
    ]
    assert events.take([Removed((A,), DISK)]) == [BlockRemoved([A], "STORAGE", 0)]


def test_what_was_never_told_is_not_removed() -> None:
    events = BlockEvents(SIZE)
    events.take([Stored((A,), None, DISK)])
    assert events.take([Removed((A,), DISK)]) == []
    assert events.num_blocks == 0


def test_tokens_are_kept_while_a_request_or_a_tier_has_the_block() -> None:
    events = BlockEvents(SIZE)
    arrived(events)
    arrived(events, "s")
    events.take([Stored((A,), None)])
    events.left("r")
    events.settle()
    assert events.num_blocks == 3
    events.left("s")
    assert events.num_blocks == 3  # the step it left in may store more
    events.settle()
    assert events.num_blocks == 1
    events.take([Removed((A,))])
    assert events.num_blocks == 0


def test_a_reset_clears_everything_but_what_requests_have_brought() -> None:
    events = BlockEvents(SIZE)
    arrived(events)
    events.take([Stored((A,), None)])
    assert events.take([Cleared()]) == [AllBlocksCleared()]
    assert events.take([Stored((A,), None)]) == [whole([A], PROMPT[:4], None, "GPU")]
    events.left("r")
    events.settle()
    events.take([Cleared()])
    assert events.num_blocks == 0


def test_an_output_block_comes_with_the_tokens_that_were_generated() -> None:
    events = BlockEvents(SIZE)
    arrived(events)
    _, (*_, output) = compute_hashes([*PROMPT, 1, 2], SIZE)
    events.generated(output, C, [112, 113, 1, 2])
    assert events.take([Stored((A, B, C), None), Stored((output,), C)]) == [
        whole([A, B, C], PROMPT[:12], None, "GPU"),
        whole([output], [112, 113, 1, 2], C, "GPU"),
    ]


def test_a_subscriber_makes_our_own_hashes_of_them() -> None:
    holder = Holder()
    events = BlockEvents(SIZE)
    arrived(events)
    holder.take(*events.take([Stored((A, B, C), None), Stored((C,), B, HOST), Removed((C,))]))
    assert holder.overlap([A, B, C]) == TierOverlap(2, 1, 0)
