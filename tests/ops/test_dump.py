"""What `kvroute dump` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from redis import Redis

from app.core.keys import Keyspace
from app.core.types import TierOverlap
from tests.fake_worker import KEYS, SHARD
from tests.ops.conftest import bucket_of, kvroute, overlaps


def test_an_index_whose_layout_makes_no_sense_is_not_dumped(url: str, raw: Redis) -> None:
    raw.hset(SHARD["shard"], "bucket_bits", "spoilt")
    result = kvroute(url, "dump")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {SHARD['shard']}: bucket_bits cannot be read\n"


def test_an_index_has_the_same_overlaps_after_dump_and_restore(url: str, tmp_path: Path) -> None:
    file = tmp_path / "index.jsonl"
    before = overlaps(url, KEYS)
    assert before == {"w1:0": TierOverlap(device=40), "w2:1": TierOverlap(host=10)}
    assert kvroute(url, "dump", "--out", str(file)).exit_code == 0
    head, *rest = [json.loads(line) for line in file.read_text().splitlines()]
    assert (head["block_size"], head["shards"], head["bucket_bits"]) == (4, 1, [4])
    assert sum(len(row["stored"]) for row in rest if "stored" in row) == 50

    # Into another namespace, and, after a reset, into its own.
    copied = kvroute(url, "restore", "--in", str(file), namespace="copy")
    assert copied.exit_code == 0, copied.output
    assert overlaps(url, Keyspace("copy")) == before
    assert kvroute(url, "reset", "--yes").exit_code == 0
    assert overlaps(url, KEYS) == {}
    assert kvroute(url, "restore", "--in", str(file)).exit_code == 0
    assert overlaps(url, KEYS) == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["dump", "--out", "/dev/full"], "--out /dev/full: No space left on device"),
        (["inspect", "prefix", "/proc/self/mem"], "[Errno 5] Input/output error"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_to_its_end_is_reported_in_one_line(
    url: str, arguments: list[str], error: str
) -> None:
    result = kvroute(url, *arguments)
    assert (result.exit_code, result.output) == (1, f"Error: {error}\n")


def test_a_dump_that_nobody_reads_to_its_end_ends_quietly(url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = kvroute(url, "dump", "--out", f"/dev/fd/{writer}")
    os.close(writer)
    assert (result.exit_code, result.output) == (1, "")


def test_a_dump_leaves_out_what_cannot_be_read(url: str, raw: Redis) -> None:
    before = kvroute(url, "dump").stdout
    raw.hset(KEYS["workers"], mapping={"9": "spoilt", "x": "{}"})
    raw.zadd(KEYS["waiting:normal:a:blocks:0"], {"request": 1})
    raw.set(SHARD["blocks:f"], "spoilt")
    assert sorted(kvroute(url, "dump").stdout.splitlines()) == sorted(before.splitlines())


def test_entries_that_no_lookup_would_find_are_not_dumped(url: str, raw: Redis) -> None:
    before = kvroute(url, "dump").stdout
    for stray in (
        KEYS["blocks:0"],
        KEYS.of_shard(1)["blocks:0"],
        SHARD["blocks:00"],
        SHARD["x:blocks:0"],
    ):
        raw.hset(stray, "00000000000000aa", "1d")
    raw.hset(bucket_of(0), "spoilt", "1d")
    assert sorted(kvroute(url, "dump").stdout.splitlines()) == sorted(before.splitlines())
