"""Batches of events, in the bytes that engines publish and in those that would be a mistake."""

import msgspec
import pytest
from msgspec.structs import fields

from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored
from workers.bridge.events.vllm import WireError, decode, encode

STORED = BlockStored([7, b"\x01" * 32], 5, [1, 2, 3, 4], 2, medium="GPU", lora_name="sql")


def packed(*events, ts=1.5, rank=None):
    return msgspec.msgpack.encode([ts, list(events), rank])


def test_events_that_were_encoded_are_decoded_as_they_were():
    events = [STORED, BlockRemoved([7], "CPU", 1), AllBlocksCleared()]
    batch = decode(encode(2.5, events, 3))
    assert (batch.ts, batch.events, batch.rank) == (2.5, events, 3)
    assert (batch.num_unknown, batch.num_broken) == (0, 0)


def test_no_field_of_an_event_is_lost():
    stored = BlockStored(
        [7],
        5,
        [1, 2],
        2,
        medium="GPU",
        lora_name="sql",
        cache_salt="red",
        extra_keys=[["red"]],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        locality="LOCAL",
        lora_id=3,
        kv_cache_spec_sliding_window=128,
        lookahead_token_ids=[[3]],
    )
    removed = BlockRemoved([7], "GPU", 1, "LOCAL", [2])
    for event in (stored, removed):
        assert all(getattr(event, field.name) is not None for field in fields(event))
    assert decode(encode(1.0, [stored, removed])).events == [stored, removed]


def test_maps_and_arrays_of_one_batch_are_told_apart_one_by_one():
    as_map = {
        "type": "BlockStored",
        "block_hashes": [7, b"\x01" * 32],
        "parent_block_hash": 5,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "sql",
    }
    as_array = ["BlockStored", [7, b"\x01" * 32], 5, [1, 2, 3, 4], 2, None, "GPU", "sql"]
    batch = decode(packed(as_map, as_array, ["BlockRemoved", [7]], ["AllBlocksCleared"]))
    assert batch.events == [STORED, STORED, BlockRemoved([7]), AllBlocksCleared()]


def test_the_last_fields_of_an_array_are_the_newest():
    old = ["BlockStored", [7], None, [1], 1, None, "GPU", None, [["s"]], 2, "mla_attention"]
    (event,) = decode(packed(old)).events
    assert isinstance(event, BlockStored)
    assert (event.extra_keys, event.group_idx) == ([["s"]], 2)
    assert event.kv_cache_spec_kind == "mla_attention"


def test_fields_and_elements_that_are_not_known_are_ignored():
    as_map = {"type": "BlockRemoved", "block_hashes": [7], "reason": {"why": [1]}}
    batch = decode(packed(as_map, ["BlockRemoved", [8], "GPU", 0, None, {"more": 1}]))
    assert [event.block_hashes for event in batch.events] == [[7], [8]]


@pytest.mark.parametrize("event", [{"type": "New"}, ["New", 1], {"no": "type"}, [], 7, None, "x"])
def test_an_event_of_a_kind_that_is_not_known_is_counted_and_skipped(event):
    batch = decode(packed(event, ["AllBlocksCleared"]))
    assert batch.events == [AllBlocksCleared()]
    assert (batch.num_unknown, batch.num_broken) == (1, 0)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [7]},
        {"type": "BlockRemoved", "block_hashes": "7"},
        ["BlockStored", [7], None, 9, 1],
        ["BlockRemoved"],
    ],
)
def test_an_event_that_cannot_be_read_counts_as_missed(event):
    batch = decode(packed(event, ["AllBlocksCleared"]))
    assert batch.events == [AllBlocksCleared()]
    assert (batch.num_unknown, batch.num_broken) == (0, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        b"\x01",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.5, 7]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
    ],
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(WireError, match="not a batch of events"):
        decode(payload)


def test_a_batch_may_end_without_a_rank():
    assert decode(msgspec.msgpack.encode([1, []])).rank is None
