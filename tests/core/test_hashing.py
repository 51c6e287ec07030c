"""Block hashes, against the conformance vectors and by hand."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from app.core.errors import InvalidRequest
from app.core.hashing import (
    compute_hashes,
    compute_local_hashes,
    compute_sequence_hashes,
    next_sequence_hash,
    seed_for,
    token_bytes,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "hash_vectors.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["note"] for case in CASES])
def test_hashes_equal_the_conformance_vectors(case):
    local = compute_local_hashes(
        case["tokens"],
        case["block_size"],
        seed=seed_for(case["lora_name"], case["cache_namespace"]),
        eagle=case["is_eagle"],
        mm_hashes=case["block_mm_hashes"],
    )
    assert [f"{h:016x}" for h in local] == case["local_hashes"]
    assert [f"{h:016x}" for h in compute_sequence_hashes(local)] == case["sequence_hashes"]


def test_a_list_an_array_and_raw_bytes_hash_alike():
    tokens = [0, 2**32 - 1, *range(100_000, 100_038)]
    expected = compute_hashes(tokens, 16)
    assert len(expected[0]) == 2
    for same in (
        np.array(tokens),
        np.array(tokens, "<u4"),
        np.array(tokens, ">u4"),
        np.array(tokens, "<u4").tobytes(),
    ):
        assert compute_hashes(same, 16) == expected


def test_a_chain_can_be_continued_one_block_at_a_time():
    local, sequence = compute_hashes(range(12), 4)
    assert next_sequence_hash(None, local[0]) == sequence[0] == local[0]
    assert next_sequence_hash(sequence[0], local[1]) == sequence[1]
    assert next_sequence_hash(sequence[1], local[2]) == sequence[2]


def test_hashing_prompts_of_many_lengths_retains_no_memory():
    tracemalloc.start()
    try:
        for length in range(20_000, 20_010):
            compute_local_hashes(bytes(4 * length), 1)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 500_000


def test_multimodal_items_are_appended_to_their_block_in_sorted_order():
    tokens = list(range(8))
    raw = token_bytes(tokens)
    plain, touched = compute_local_hashes(tokens, 4, mm_hashes=[[], [9, 2**63]])
    assert plain == xxh3_64_intdigest(raw[:16], 1337)
    items = (9).to_bytes(8, "little") + (2**63).to_bytes(8, "little")
    assert touched == xxh3_64_intdigest(raw[16:] + items, 1337)
    assert compute_local_hashes(tokens, 4, mm_hashes=[[], [2**63, 9]]) == [plain, touched]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2], "token_ids"),
        ([1, 2**32], "token_ids"),
        ([1, 2.5], "token_ids"),
        ([1, "x"], "token_ids"),
        (b"\x01\x02\x03", "3 bytes"),
        (np.array([1.0, 2.0]), "float64"),
        (np.array([-1]), r"\[0, 2\^32\)"),
        (np.array([2**32]), r"\[0, 2\^32\)"),
    ],
)
def test_a_token_that_is_not_a_u32_is_refused(tokens, message):
    with pytest.raises(InvalidRequest, match=message):
        compute_hashes(tokens, 4)
