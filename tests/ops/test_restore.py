"""What `kvroute restore` makes of a dump, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import threading

import pytest
from click.testing import Result
from redis import Redis

from app.core.keys import Keyspace
from tests.fake_worker import KEYS
from tests.ops.conftest import kvroute, overlaps

HEAD = {"kvroute": 1, "block_size": 4, "shards": 2, "bucket_bits": [4, 5]}
INFO = {
    "worker": "w1:0",
    "address": "http://w1:80",
    "block_size": 4,
    "kv_total_blocks": 100,
    "max_requests": 256,
    "accelerator": "cpu",
}
WORKER = {"worker": "w1:0", "info": INFO, "incarnation": 7}
STORED = {
    "stored": ["00000000000000aa"],
    "incarnation": 7,
    "tier": "device",
    "shard": 1,
    "bucket": "f8",
}


END = {"end": True}


def dumped(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in [*rows, END])


def test_a_dump_written_by_hand_is_restored(url: str, raw: Redis) -> None:
    result = kvroute(url, "restore", input=dumped(HEAD, WORKER, STORED, STORED), namespace="copy")
    assert (result.exit_code, result.output) == (0, "2 entries restored\n")
    assert raw.hgetall("kvroute:1:{copy#1}:blocks:f8") == {b"00000000000000aa": b"1d"}


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("", "line 1 is {}: not the first line of a dump of version 1"),
        ("nonsense", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"kvroute": 9}', "line 1 is {'kvroute': 9}: not the first line of a dump of version 1"),
        (dumped(HEAD | {"block_size": "4"}), "line 1: block_size is '4', not a whole number"),
        (
            dumped(HEAD | {"shards": True}),
            "line 1: shards is True, not a whole number from 1 to 1024",
        ),
        (dumped(HEAD | {"bucket_bits": 5}), "line 1: bucket_bits is 5, not a list"),
        *[
            (
                dumped(HEAD | {"bucket_bits": bits}),
                f"line 1: bucket_bits is {bits}, not a number from 1 to 24 for each of 2 shards",
            )
            for bits in ([4], [4, 0], [4, 25], [4, "5"])
        ],
        (dumped(HEAD, WORKER | {"worker": 5}), "line 2: worker is 5, not text"),
        (dumped(HEAD, WORKER | {"worker": "w2:0"}), "line 2: worker is 'w2:0', not 'w1:0', as in"),
        (dumped(HEAD, WORKER | {"incarnation": "7"}), "line 2: incarnation is '7', not a whole"),
        (dumped(HEAD, WORKER, WORKER), "line 3: incarnation is 7, not one that is new to the dump"),
        (dumped(HEAD, WORKER | {"info": 5}), "line 2: info is 5, not an object"),
        *[
            (
                dumped(HEAD, WORKER | {"info": INFO | {field: value}}),
                f"line 2: info.{field} is {value!r}, not {wanted}",
            )
            for field, value, wanted in [
                ("worker", "w1", "<worker_id>:<dp_rank>"),
                ("address", None, "text"),
                ("block_size", 16, "4, as on line 1"),
                ("kv_total_blocks", 1.5, "a whole number"),
                ("max_requests", -1, "a whole number"),
                ("accelerator", [], "text"),
            ]
        ],
        *[
            (
                dumped(HEAD, WORKER, STORED, STORED | {field: value}),
                f"line 4: {field} is {value!r}, not {wanted}",
            )
            for field, value, wanted in [
                ("incarnation", 8, "that of a worker on an earlier line"),
                ("incarnation", [7], "a whole number"),
                ("shard", 9, "a whole number from 0 to 1"),
                ("shard", None, "a whole number from 0 to 1"),
                ("bucket", 5, "text"),
                ("bucket", "f", "the name of a bucket for 5 bucket bits"),
                ("bucket", "f4", "the name of a bucket for 5 bucket bits"),
                ("bucket", "F8", "the name of a bucket for 5 bucket bits"),
                ("tier", "tape", "one of device, host, disk"),
                ("tier", 1, "text"),
                ("stored", "abc", "a list"),
                ("stored", {"aa": 1}, "a list"),
            ]
        ],
        *[
            (
                dumped(HEAD, WORKER, STORED | {"stored": ["00000000000000aa", block]}),
                f"line 3: an entry of stored is {block!r}, not 16 hex digits",
            )
            for block in ("zz", 5, "0x000000000000aa", "00000000000000aaa")
        ],
        (dumped(HEAD, WORKER, STORED) + '{"stored"', "line 5 is not JSON"),
        (dumped(HEAD, WORKER, STORED, END), "line 5 comes after the end of the dump"),
        (
            dumped(HEAD, WORKER, STORED).removesuffix(dumped()),
            "the dump was cut off: its last line is missing",
        ),
    ],
)
def test_a_damaged_dump_is_refused_by_line_before_anything_is_written(
    url: str, raw: Redis, lines: str, error: str
) -> None:
    result = kvroute(url, "restore", input=lines, namespace="copy")
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert line.startswith(f"Error: {error}")
    assert list(raw.scan_iter("kvroute:1:{copy*")) == []


def test_a_dump_is_restored_from_a_pipe(url: str) -> None:
    lines = kvroute(url, "dump").stdout_bytes
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(lines)
    result = kvroute(url, "restore", "--in", f"/dev/fd/{reader}", namespace="copy")
    os.close(reader)
    assert result.exit_code == 0, result.output
    assert overlaps(url, Keyspace("copy")) == overlaps(url, KEYS)


def test_a_restore_uses_no_incarnation_that_a_shard_knows_from_before(url: str, raw: Redis) -> None:
    lines = kvroute(url, "dump").stdout_bytes
    copy = Keyspace("copy")
    raw.hset(copy.of_shard(0)["applied"], mapping={"1": "7 other", "3": "7 other"})
    restored = kvroute(url, "restore", namespace="copy", input=lines)
    assert restored.exit_code == 0, restored.output
    assert overlaps(url, copy) == overlaps(url, KEYS)


def test_a_dump_is_restored_only_into_an_index_with_the_same_layout(url: str, raw: Redis) -> None:
    lines = kvroute(url, "dump").stdout
    raw.hset("kvroute:1:{copy#0}:shard", "bucket_bits", "9")
    result = kvroute(url, "restore", input=lines, namespace="copy")
    assert result.exit_code == 1
    assert "shard 0 of 'copy' has 9 bucket bits, but the dump has 4" in result.output


def contents(raw: Redis) -> dict[bytes, bytes]:
    return {key: raw.dump(key) for key in raw.scan_iter()}


@pytest.mark.parametrize("staged", [False, True])
def test_a_restore_over_a_live_worker_is_refused_and_changes_nothing(
    url: str, raw: Redis, staged: bool
) -> None:
    lines = kvroute(url, "dump").stdout
    raw.zadd(KEYS["leases"], {"1": 1})
    if staged:
        raw.hdel(KEYS["current"], "w2:1")
    before = contents(raw)
    result = kvroute(url, "restore", input=lines)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: worker w2:1 is live in namespace 'test', with a lease that ends in 3\d{3}\.\d s: "
        r"restore into another --namespace, or stop the worker first\n",
        result.output,
    )
    assert contents(raw) == before


def test_a_restore_ignores_ended_leases_and_leases_of_unknown_workers(url: str, raw: Redis) -> None:
    lines = kvroute(url, "dump").stdout
    before = overlaps(url, KEYS)
    raw.zadd(KEYS["leases"], {"1": 1})
    raw.hset(KEYS["workers"], "2", "spoilt")
    raw.hdel(KEYS["current"], "w2:1")
    assert kvroute(url, "restore", input=lines).exit_code == 0
    assert overlaps(url, KEYS) == before
    assert set(raw.hvals(KEYS["current"])) == {b"3", b"4"}


def test_a_restore_that_takes_longer_than_its_leases_keeps_them_alive(url: str, raw: Redis) -> None:
    leases, ended = Keyspace("copy")["leases"], threading.Event()
    left_ms: list[float] = []

    def watch() -> None:
        with Redis.from_url(url) as redis:
            while not ended.wait(0.01):
                end_ms, (seconds, micros) = redis.zscore(leases, "1"), redis.time()
                if end_ms is not None:
                    left_ms.append(end_ms - seconds * 1000 - micros / 1000)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        lines = dumped(HEAD, WORKER, *[STORED] * 10_000)
        result = kvroute(url, "restore", "--lease-ttl-s", "1", input=lines, namespace="copy")
    finally:
        ended.set()
        watching.join()
    assert result.exit_code == 0, result.output
    assert left_ms
    assert min(left_ms) > 0
    assert raw.hgetall(Keyspace("copy")["current"]) == {b"w1:0": b"1"}


def test_workers_are_restored_next_to_other_live_ones(url: str, raw: Redis) -> None:
    head = HEAD | {"shards": 1, "bucket_bits": [4]}
    worker = WORKER | {"worker": "w9:0", "info": INFO | {"worker": "w9:0"}}
    stored = STORED | {"shard": 0, "bucket": "0"}
    result = kvroute(url, "restore", input=dumped(head, worker, stored))
    assert (result.exit_code, result.output) == (0, "1 entry restored\n")
    assert raw.hgetall(KEYS["current"]) == {b"w1:0": b"1", b"w2:1": b"2", b"w9:0": b"3"}


def test_a_second_restore_waits_for_the_leases_of_the_first(url: str, raw: Redis) -> None:
    def restore() -> Result:
        return kvroute(url, "restore", input=dumped(HEAD, WORKER, STORED), namespace="copy")

    assert restore().exit_code == 0
    assert "worker w1:0 is live in namespace 'copy'" in restore().output
    raw.zadd(Keyspace("copy")["leases"], {"1": 1})
    assert restore().exit_code == 0
