"""What real engines have published, byte for byte, against what they said was cached.

tests/data/README.md says how the recordings were made.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from app.core.hashing import compute_local_hashes, compute_sequence_hashes, seed_for
from tests.workers.kv.cache_model import CacheModel
from workers.bridge.events import vllm
from workers.bridge.events.blocks import EngineBlocks
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored, salt_in

DATA = Path(__file__).parents[3] / "data" / "engines"


class Recording(NamedTuple):
    """counts: of stored, removed and cleared. hits: requests of which something was cached.
    overstated: of how many less was cached than shown."""

    folder: str
    block_size: int
    announces_copies: bool
    counts: tuple[int, int, int]
    hits: int
    overstated: int = 0


RECORDINGS = [
    Recording("vllm-0.32", 32, True, (22, 15, 1), 15),
    Recording("vllm-0.23", 32, True, (22, 15, 1), 15),
    # Two prompts that branch off before the point at which the engine can resume.
    Recording("vllm-0.32-windows", 32, True, (56, 33, 0), 6, overstated=2),
    Recording("sglang-0.5", 16, False, (22, 5, 2), 16),
]

VLLM_FIRST = BlockStored(
    [9042080911517430003, 1813897308229988711],
    None,
    [],
    32,
    medium="GPU",
    extra_keys=[None, None],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
)
SGLANG_FIRST = BlockStored(
    [7634483017840992389, -532210375967203569, -6219596223371141807, -4006039156556214666],
    None,
    [],
    16,
    medium="GPU",
)


def steps_of(recording):
    """Requests, the first of them none at all: what was cached of each when it came, and the
    batches that were published until the next one."""
    return msgspec.msgpack.decode((DATA / recording.folder / "recording.msgpack").read_bytes())


def batches_of(recording):
    return [vllm.decode(payload) for step in steps_of(recording) for payload in step["payloads"]]


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda r: r.folder)
def test_every_event_is_understood(recording):
    batches = batches_of(recording)
    assert sum(batch.num_unknown + batch.num_broken for batch in batches) == 0
    kinds = Counter(type(event) for batch in batches for event in batch.events)
    found = kinds[BlockStored], kinds[BlockRemoved], kinds[AllBlocksCleared]
    assert found == recording.counts


@pytest.mark.parametrize(
    ("folder", "first", "with_adapter", "with_salt"),
    [
        ("vllm-0.32", VLLM_FIRST, 1, 4),
        ("vllm-0.23", VLLM_FIRST, 1, 4),
        ("sglang-0.5", SGLANG_FIRST, 0, 13),
    ],
)
def test_events_say_what_the_engine_has_done(folder, first, with_adapter, with_salt):
    [recording] = [r for r in RECORDINGS if r.folder == folder]
    stored = [
        event
        for batch in batches_of(recording)
        for event in batch.events
        if isinstance(event, BlockStored)
    ]
    [asked] = [s["tokens"] for s in steps_of(recording)[:5] if len(s["tokens"]) >= 64]
    num = first.block_size * len(first.block_hashes)
    assert stored[0] == replace(first, token_ids=asked[:num])
    assert sum(event.lora_name == "sql" for event in stored) == with_adapter
    assert sum("red" in (event.cache_salt, salt_in(event)) for event in stored) == with_salt


@pytest.mark.parametrize(
    ("recording", "index_block_size"),
    [(r, size) for r in RECORDINGS for size in (16, 32) if r.block_size % size == 0],
    ids=lambda value: value.folder if isinstance(value, Recording) else str(value),
)
def test_what_is_shown_is_what_the_engine_then_finds(recording, index_block_size):
    blocks = EngineBlocks(index_block_size, announces_copies=recording.announces_copies)
    shown = CacheModel()
    hits = overstated = 0
    for step in steps_of(recording):
        tokens = step["tokens"]
        seed = seed_for(step["lora_name"], step["cache_salt"])
        local = compute_local_hashes(tokens, index_block_size, seed=seed)
        overlap = shown.scan(compute_sequence_hashes(local)).total * index_block_size
        # The last token is always computed. vLLM announces a reset with the next step only.
        stated = 0 if step["is_reset"] else min(overlap, max(0, len(tokens) - 1))
        stated -= stated % recording.block_size
        assert step["cached"] <= stated
        hits += step["cached"] > 0
        overstated += step["cached"] < stated
        for payload in step["payloads"]:
            for event in vllm.decode(payload).events:
                for change in blocks.take(event):
                    shown.take(change)
    assert (hits, overstated) == (recording.hits, recording.overstated)
