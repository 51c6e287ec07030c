"""The commands with which operators inspect, move and delete what is in Redis."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from app.cli import main
from app.core.chains import GROUP_BLOCKS
from app.core.hashing import compute_hashes
from app.core.keys import Keyspace
from app.core.loads import Reservation, Wish
from app.core.types import Tier, TierOverlap
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, GpuReadings
from app.local.redis_server import EmbeddedRedis
from app.ops import questions
from app.state import overlap, reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.fake_worker import BLOCK_SIZE, KEYS, NAMESPACE, SHARD, FakeWorkers

PROMPT = list(range(1, 4 * 40 + 1))
"""Forty full blocks of four."""
CHAIN = compute_hashes(PROMPT, BLOCK_SIZE)[1]


@pytest.fixture
def url(one_redis_server: EmbeddedRedis) -> str:
    """URL of a Redis where w1 holds the prompt, and w2 its first ten blocks in host memory."""

    async def fill() -> None:
        async with connect(one_redis_server.url) as redis:
            workers = FakeWorkers(redis)
            first = await workers.register("w1")
            await workers.register("w2:1")
            await workers.publish("w1", PROMPT)
            await workers.publish("w2:1", PROMPT[:40], Tier.HOST)
            reservation = Reservation("req-7", prefill_tokens=100, prefill_us=5000, blocks=7)
            wish = Wish(first, reservation, max_requests=256, seen_total=None)
            made = reservations.reserve(KEYS, [wish], ttl_ms=60_000)
            assert await ScriptRunner(redis, 5).one(made) == [None]

    asyncio.run(fill())
    return one_redis_server.url


@pytest.fixture
def raw(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        yield client


def kvroute(url: str, *arguments: str, namespace: str = NAMESPACE, **options: object) -> Result:
    where = ["--redis-url", url, "--namespace", namespace]
    return CliRunner().invoke(main, [*arguments, *where], **options)  # type: ignore[arg-type]


def as_json(url: str, *arguments: str) -> object:
    result = kvroute(url, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_summary_counts_blocks_by_worker_and_tier(url: str) -> None:
    found = as_json(url, "inspect", "summary")
    assert found["namespaces"] == [NAMESPACE]
    summary = found["summary"]
    assert summary["unique_blocks"] == 40
    assert [w["blocks"] for w in summary["workers"]] == [
        {"device": 40, "host": 0, "disk": 0},
        {"device": 0, "host": 10, "disk": 0},
    ]
    assert summary["workers"][0]["load"]["requests"] == 1
    text = kvroute(url, "inspect", "summary").output
    assert "40 unique blocks, laid out for 128" in text
    assert "overfull" not in text
    assert [line.split()[:3] for line in text.splitlines()[-2:]] == [
        ["w1:0", "1", "live"],
        ["w2:1", "2", "live"],
    ]


def test_metrics_dated_later_than_the_clock_have_an_age_of_zero(url: str, raw: Redis) -> None:
    ahead_ms = int(raw.time()[0]) * 1000 + 60_000
    raw.xadd(KEYS["metrics"], {"worker": "w1:0", "incarnation": "1"}, id=f"{ahead_ms}-0")
    summary = as_json(url, "inspect", "summary")["summary"]
    assert [w["metrics_age_s"] for w in summary["workers"]] == [0.0, None]


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        *("inspect summary", "inspect block 2a", "inspect verify", "inspect waiting"),
        *("inspect worker w1", "inspect usage", "explain req-7", "whatif --policy blocks"),
    ],
)
def test_a_namespace_that_does_not_exist_is_an_error(
    url: str, command: str, form: list[str]
) -> None:
    result = kvroute(url, *command.split(), *form, namespace="typo")
    assert (result.exit_code, result.stderr) == (1, "Error: namespace 'typo' does not exist\n")
    # Only the summary lists the namespaces that exist.
    assert (NAMESPACE in result.stdout) == (command == "inspect summary")


def test_an_overfull_index_is_reported_as_such(
    url: str, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ops.questions.FULL_FACTOR", 1)
    raw.hset(SHARD["shard"], "bucket_bits", "1")
    assert "laid out for 16 (overfull" in kvroute(url, "inspect", "summary").output


async def test_the_fill_of_an_index_is_estimated_from_a_sample_of_its_buckets(
    redis: AsyncRedis,
) -> None:
    assert await questions.fill(redis, KEYS, 1, random.Random(1)) == 0
    workers = FakeWorkers(redis)
    await workers.register("w1")
    rng = random.Random(2)
    # Sixteen buckets, laid out for 128 blocks.
    for _ in range(64):
        await workers.publish("w1", [rng.getrandbits(32) for _ in range(4 * 16)])
    found = await questions.fill(redis, KEYS, 1, random.Random(1), samples=400)
    assert found == pytest.approx(1024 / 128, rel=0.25)

    for shard in (1, 2, 3):
        await redis.hset(KEYS.of_shard(shard)["shard"], "bucket_bits", "4")
    await redis.config_resetstat()
    found = await questions.fill(redis, KEYS, 4, random.Random(1), samples=400)
    assert found == pytest.approx(1024 / 128 / 4, rel=0.25)
    assert (await redis.info("commandstats"))["cmdstat_hlen"]["calls"] == 400


@pytest.mark.parametrize("bits", ["spoilt", "", "0", "-1", "25", "1e1", "9" * 5000])
def test_a_shard_whose_layout_makes_no_sense_is_not_counted(
    url: str, raw: Redis, bits: str
) -> None:
    async def fill(runner: ScriptRunner) -> float:
        return await questions.fill(runner.redis, KEYS, 1, random.Random(1))

    assert in_redis(url, fill) > 0
    raw.hset(SHARD["shard"], "bucket_bits", bits)
    assert in_redis(url, fill) == 0
    text = kvroute(url, "inspect", "summary").output
    assert "40 unique blocks, laid out for 0\n" in text


def test_a_large_bucket_is_read_in_parts(url: str, raw: Redis) -> None:
    """Buckets grow large where many chains diverge in the middle of a group."""
    many = {f"{n:016x}": "1d" for n in range(5000)}
    raw.hset(SHARD["blocks:aa"], mapping=many)
    raw.config_resetstat()
    assert "5,040 unique blocks" in kvroute(url, "inspect", "summary").output
    stats = raw.info("commandstats")
    assert "cmdstat_hvals" not in stats
    assert stats["cmdstat_hscan"]["calls"] >= 5


@pytest.mark.parametrize("field", ["shards", "block_size"])
@pytest.mark.parametrize("text", ["spoilt", "", "0", "-1", "9" * 5000])
def test_a_corrupted_setting_of_a_namespace_is_named(
    url: str, raw: Redis, field: str, text: str
) -> None:
    raw.hset(KEYS["meta"], field, text)
    for command in (["inspect", "summary"], ["dump"]):
        result = kvroute(url, *command)
        assert result.exit_code == 1
        assert result.stderr == f"Error: {KEYS['meta']}: {field} is {text!r}\n"


def test_an_index_whose_layout_makes_no_sense_is_not_dumped(url: str, raw: Redis) -> None:
    raw.hset(SHARD["shard"], "bucket_bits", "spoilt")
    result = kvroute(url, "dump")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {SHARD['shard']}: bucket_bits cannot be read\n"


def test_corrupted_names_are_shown_as_far_as_possible(url: str, raw: Redis) -> None:
    raw.hset(KEYS["requests:1"], b"\xff", b"\xfe")
    raw.zadd(KEYS["waiting:normal:}:meta"], {"request": 1})
    raw.set(b"kvroute:1:{\xff}:meta", "")
    raw.hset(SHARD["blocks:"].encode() + b"\xff", "00000000000000ff", "1d")
    assert "  \ufffd  \ufffd\n" in kvroute(url, "inspect", "worker", "w1").output
    assert as_json(url, "inspect", "summary")["namespaces"] == [NAMESPACE]
    [owner] = as_json(url, "inspect", "block", "ff")
    assert owner["key"] == SHARD["blocks:\ufffd"]


def test_leases_that_somebody_made_endless_are_shown(url: str, raw: Redis) -> None:
    raw.zadd(KEYS["leases"], {"1": "+inf", "2": "-inf"})
    endless, lapsed = as_json(url, "inspect", "summary")["summary"]["workers"]
    assert endless["lease_ms"] > 0 > lapsed["lease_ms"]


def test_a_block_is_found_by_its_hash_alone(url: str) -> None:
    assert as_json(url, "inspect", "block", f"{CHAIN[3]:016x}") == [
        {"worker": "w1:0", "incarnation": 1, "tier": "device", "key": bucket_of(3)},
        {"worker": "w2:1", "incarnation": 2, "tier": "host", "key": bucket_of(3)},
    ]
    [only] = as_json(url, "inspect", "block", f"0x{CHAIN[20]:x}")
    assert only["worker"] == "w1:0"
    assert "no worker holds it" in kvroute(url, "inspect", "block", "2a").output


def bucket_of(position: int) -> str:
    leader = CHAIN[position - position % GROUP_BLOCKS]
    return SHARD[f"blocks:{leader:016x}"[: len("blocks:") + 1]]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("xyz", "is not a hexadecimal number"),
        ("1" * 17, "has more than 16 hex digits"),
        ("-1", "is negative"),
    ],
)
def test_an_invalid_block_hash_is_refused(wrong: str, why: str) -> None:
    result = CliRunner().invoke(main, ["inspect", "block", "--", wrong])
    assert result.exit_code == 2
    assert f"{wrong!r} {why}" in result.output


def test_a_worker_is_shown_with_its_reservations(url: str) -> None:
    [found] = as_json(url, "inspect", "worker", "w1")
    assert found["info"]["address"] == "http://w1-0:80"
    assert found["blocks"] == {"device": 40, "host": 0, "disk": 0}
    assert list(found["reserved"]) == ["req-7"]
    assert found["reserved"]["req-7"].startswith("100 5000 7 p")
    lines = kvroute(url, "inspect", "worker", "w1").output.splitlines()
    assert lines[-2].split("  ")[1:] == [
        "request",
        "prefill tokens, prefill µs, blocks, p (prefilling) or d (decoding), attempt",
    ]
    assert lines[-1].startswith("  req-7  100 5000 7 p ")
    text = kvroute(url, "inspect", "worker", "w2:1").output
    assert "w2:1 at http://w2-1:80" in text
    missing = kvroute(url, "inspect", "worker", "w9")
    assert (missing.exit_code, missing.output) == (1, "Error: worker 'w9' does not exist\n")


def test_a_worker_is_shown_with_the_readings_of_its_gpu(one_redis_server: EmbeddedRedis) -> None:
    async def fill() -> None:
        async with connect(one_redis_server.url) as redis:
            workers = FakeWorkers(redis)
            for name, readings in {
                "all": GpuReadings(
                    60_129_542_145, 85_899_345_920, 0.37, 54, 312.345, 0, 87_654_321
                ),
                "some": GpuReadings(temperature_c=54),
                "none": GpuReadings(),
            }.items():
                await workers.register(name)
                await workers.report(name, ForwardPassMetrics(), DEFAULT_SPEED, readings)
            spoilt = await workers.register("spoilt")
            entry = {"incarnation": str(spoilt), "gpu_power_w": "-1"}
            await redis.xadd(KEYS["metrics"], entry)

    asyncio.run(fill())
    url = one_redis_server.url
    gpu_lines = {
        name: [line for line in lines if line.startswith("  GPU: ")]
        for name in ("all", "some", "none", "spoilt")
        if (lines := kvroute(url, "inspect", "worker", name).output.splitlines())
    }
    assert gpu_lines == {
        "all": [
            "  GPU: 56.0 GiB used, 80.0 GiB in total, 37 % busy, 54 °C, 312 W, "
            "0.0 MB/s sent over PCIe, 87.7 MB/s received"
        ],
        "some": ["  GPU: 54 °C"],
        "none": [],
        "spoilt": [],
    }
    [found] = as_json(url, "inspect", "worker", "some")
    assert found["gpu"]["temperature_c"] == 54
    assert found["gpu"]["power_w"] is None


def test_a_prompt_is_looked_up_as_tokens_or_text(url: str, tmp_path: Path) -> None:
    tokens, text = tmp_path / "prompt.json", tmp_path / "prompt.txt"
    tokens.write_text(json.dumps(PROMPT[:50]))
    text.write_bytes(bytes(PROMPT[:44]))
    assert as_json(url, "inspect", "prefix", str(tokens)) == {
        "full_blocks": 12,
        "overlaps": [
            {"worker": "w1:0", "device": 12, "host": 0, "disk": 0, "blocks": 12},
            {"worker": "w2:1", "device": 0, "host": 10, "disk": 0, "blocks": 10},
        ],
    }
    assert as_json(url, "inspect", "prefix", str(text), "--text")["full_blocks"] == 11
    assert as_json(url, "inspect", "prefix", str(tokens), "--lora-name", "x")["overlaps"] == []
    for wrong in ("[-1]", "[true]", "[4294967296]"):
        tokens.write_text(wrong)
        refused = kvroute(url, "inspect", "prefix", str(tokens))
        assert refused.stderr.startswith(f"Error: {tokens} is not a JSON list of token ids")
    refused = kvroute(url, "inspect", "prefix", str(text))
    assert refused.stderr.startswith(f"Error: {text} is not JSON: ")


def test_a_worker_without_a_valid_lease_is_not_shown_as_holding_a_prompt(
    url: str, raw: Redis, tmp_path: Path
) -> None:
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(PROMPT))
    raw.zadd(KEYS["leases"], {"1": 1})
    [found] = as_json(url, "inspect", "prefix", str(tokens))["overlaps"]
    assert found["worker"] == "w2:1"
    raw.zrem(KEYS["leases"], "2")
    assert as_json(url, "inspect", "prefix", str(tokens))["overlaps"] == []


def test_an_index_that_cannot_be_read_is_not_taken_for_an_empty_one(
    url: str, raw: Redis, tmp_path: Path
) -> None:
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(PROMPT))
    raw.set(SHARD["dead"], "spoilt")
    result = kvroute(url, "inspect", "prefix", str(tokens))
    assert result.exit_code == 1
    assert "the index cannot be read in 'test#0'" in result.output


def test_verify_finds_nothing_wrong_with_an_intact_namespace(url: str) -> None:
    result = kvroute(url, "inspect", "verify")
    assert result.exit_code == 0
    assert "no contradictions found" in result.output


def test_a_key_that_only_looks_like_a_bucket_does_not_count(url: str, raw: Redis) -> None:
    raw.zadd(KEYS["waiting:normal:a:blocks:b"], {"replica-1 5 -": 1})
    raw.set("kvroute:1:{test#x}:blocks:0", "mine")
    verified = as_json(url, "inspect", "verify")
    assert verified == {"buckets": 2, "existing_buckets": 2, "findings": []}
    assert as_json(url, "inspect", "summary")["summary"]["unique_blocks"] == 40
    assert len(as_json(url, "inspect", "block", f"{CHAIN[3]:016x}")) == 2


def test_verify_says_how_many_buckets_it_did_not_check(url: str) -> None:
    verified = as_json(url, "inspect", "verify", "--max-buckets", "1")
    assert verified == {"buckets": 1, "existing_buckets": 2, "findings": []}
    text = kvroute(url, "inspect", "verify", "--max-buckets", "1").output
    assert "1 of 2 buckets; the rest were not checked (--max-buckets)\n" in text
    text = kvroute(url, "inspect", "verify", "--max-buckets", "2").output
    assert "checked all reservations and 2 buckets\n" in text


Damage = Callable[[Redis], object]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda r: r.hset(KEYS["load"], "1", "1 2 3 4 5 6 7 8"), "not the sum of its requests"),
        (lambda r: r.hset(KEYS["load"], "1", "spoilt"), "not the sum of its requests"),
        (lambda r: r.hset(KEYS["requests:1"], "req-7", "spoilt"), "not the sum of its requests"),
        (lambda r: r.hset(KEYS["requests:1"], "req-7", "a b c p x"), "not the sum of its requests"),
        (lambda r: r.hset(KEYS["writers"], b"\xff", "x"), "an incarnation of an unknown worker"),
        (lambda r: r.delete(KEYS["prefills:1"]), "a prefill queue that does not match"),
        (lambda r: r.delete(KEYS["reservations"]), "a request without its reservation"),
        (lambda r: r.delete(KEYS["expiry"]), "a reservation without expiry"),
        (lambda r: r.delete(KEYS["requests:1"]), "a reservation without its request"),
        (lambda r: r.hdel(KEYS["workers"], "1"), "an incarnation of an unknown worker"),
        (lambda r: r.hset(KEYS["load"], "9", "0 0 0 0 0 0 0 0"), "an incarnation that has ended"),
        (
            lambda r: r.hset(KEYS["current"], "w1:0", "9"),
            "a worker whose current incarnation has ended",
        ),
        (lambda r: r.zrem(KEYS["leases"], "2"), "a lease but no writer, or the reverse"),
        (lambda r: r.set(SHARD["blocks:0"], "spoilt"), "a bucket that is not a hash"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "2d1d"), "owners that cannot be read"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "9" * 5000 + "d"), "owners that cannot be read"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "77d"), "an unknown owner"),
    ],
)
def test_verify_finds_contradictions(
    url: str, raw: Redis, monkeypatch: pytest.MonkeyPatch, damage: Damage, what: str
) -> None:
    monkeypatch.setattr("app.ops.verify.LOOK_INTERVAL_S", 0.01)
    damage(raw)
    result = kvroute(url, "inspect", "verify")
    assert result.exit_code == 1
    assert what in result.output
    assert "no contradictions found" not in result.output


def test_verify_reads_many_reservations_in_parts(
    url: str, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ops.verify.LOOKS", 1)
    requests = [f"r{i}" for i in range(1000)]
    raw.hset(KEYS["reservations"], mapping=dict.fromkeys(requests, "1"))
    raw.zadd(KEYS["expiry"], dict.fromkeys(requests, 1 << 50))
    raw.config_resetstat()
    found = json.loads(kvroute(url, "inspect", "verify", "--json").output)["findings"]
    assert [(f["what"], f["count"]) for f in found] == [("a reservation without its request", 1000)]
    calls = {name: stats["calls"] for name, stats in raw.info("commandstats").items()}
    assert calls["cmdstat_hscan"] > 4
    assert calls["cmdstat_zscan"] > 4


def in_redis(url: str, work: Callable[[ScriptRunner], Awaitable[object]]) -> object:
    async def run() -> object:
        async with connect(url) as redis:
            return await work(ScriptRunner(redis, 5))

    return asyncio.run(run())


def overlaps(url: str, keyspace: Keyspace) -> dict[str, TierOverlap]:
    """Overlaps with the prompt, by worker key."""

    async def look(runner: ScriptRunner) -> dict[str, TierOverlap]:
        [found], _ = await overlap.match(runner, keyspace, [CHAIN])
        current = await runner.redis.hgetall(keyspace["current"])
        names = {int(inc): name.decode() for name, inc in current.items()}
        return {names[inc]: overlap for inc, overlap in (found or {}).items() if inc in names}

    return in_redis(url, look)  # type: ignore[return-value]


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
    assert kvroute(url, "dump").stdout == before


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
        r"Error: worker w2:1 is live in namespace 'test', with a lease that ends in [56]\d\.\d s: "
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


def test_a_reset_asks_and_deletes_only_its_own_namespace(url: str, raw: Redis) -> None:
    others = ["kvroute:1:{tes}:meta", "kvroute:1:{test2#0}:shard", "test", "kvroute:1:{a/test}:x"]
    for other in others:
        raw.set(other, "mine")
    keys = raw.dbsize() - len(others)
    refused = kvroute(url, "reset", input="n\n")
    assert f"Delete {keys} keys of namespace 'test'?" in refused.output
    assert refused.exit_code == 1
    assert raw.dbsize() == keys + len(others)
    assert kvroute(url, "reset", input="y\n").exit_code == 0
    assert sorted(key.decode() for key in raw.scan_iter()) == sorted(others)
