"""What `kvroute inspect` shows of a namespace."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import main
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, GpuReadings
from app.state import reading
from app.state.connect import connect
from tests.fake_worker import KEYS, NAMESPACE, SHARD, FakeWorkers
from tests.ops.conftest import CHAIN, PROMPT, as_json, bucket_of, in_redis, kvroute, said


def test_the_summary_counts_blocks_by_worker_and_tier(url):
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
        ["w1:0", "1", "serving"],
        ["w2:1", "2", "serving"],
    ]


def test_metrics_dated_later_than_the_clock_have_an_age_of_zero(url, raw):
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
def test_a_namespace_that_does_not_exist_is_an_error(url, command, form):
    result = kvroute(url, *command.split(), *form, namespace="typo")
    assert (result.exit_code, result.stderr) == (1, "Error: namespace 'typo' does not exist\n")
    # Only the summary lists the namespaces that exist.
    assert (NAMESPACE in result.stdout) == (command == "inspect summary")


def test_an_overfull_index_is_reported_as_such(url, raw, monkeypatch):
    monkeypatch.setattr("app.ops.namespaces.FULL_FACTOR", 1)
    raw.hset(SHARD["shard"], "bucket_bits", "1")
    assert "laid out for 16 (overfull" in kvroute(url, "inspect", "summary").output


@pytest.mark.parametrize("bits", ["spoilt", "", "0", "-1", "25", "1e1", "9" * 5000])
def test_a_shard_whose_layout_makes_no_sense_is_not_counted(url, raw, bits):
    async def fill(runner):
        return await reading.fill(runner.redis, KEYS, 1, random.Random(1))

    assert in_redis(url, fill) > 0
    raw.hset(SHARD["shard"], "bucket_bits", bits)
    assert in_redis(url, fill) == 0
    text = kvroute(url, "inspect", "summary").output
    assert "40 unique blocks, laid out for 0\n" in text


def test_a_large_bucket_is_read_in_parts(url, raw):
    """Buckets grow large where many chains diverge in the middle of a group."""
    many = {f"{n:016x}": "1d" for n in range(5000)}
    raw.hset(SHARD["blocks:aa"], mapping=many)
    raw.config_resetstat()
    assert "5,040 unique blocks" in kvroute(url, "inspect", "summary").output
    stats = raw.info("commandstats")
    assert "cmdstat_hvals" not in stats
    assert stats["cmdstat_hscan"]["calls"] >= 5


@pytest.mark.parametrize("field", ["shards", "block_size"])
@pytest.mark.parametrize("text", ["spoilt", "", "0", "-1", "9" * 500])
def test_a_corrupted_setting_of_a_namespace_is_named(url, raw, field, text):
    raw.hset(KEYS["meta"], field, text)
    result = kvroute(url, "inspect", "summary")
    assert result.exit_code == 1
    assert result.stderr == f"Error: {KEYS['meta']}: {field} is {text!r}\n"


def test_corrupted_names_are_shown_as_far_as_possible(url, raw):
    raw.hset(KEYS["requests:1"], b"\xff", b"\xfe")
    raw.zadd(KEYS["waiting:normal:}:meta"], {"request": 1})
    raw.set(b"kvroute:1:{\xff}:meta", "")
    raw.hset(SHARD["blocks:"].encode() + b"\xff", "00000000000000ff", "1d")
    assert "  \ufffd  \ufffd\n" in kvroute(url, "inspect", "worker", "w1").output
    assert as_json(url, "inspect", "summary")["namespaces"] == [NAMESPACE]
    [owner] = as_json(url, "inspect", "block", "ff")
    assert owner["key"] == SHARD["blocks:\ufffd"]


def test_leases_that_somebody_made_endless_are_shown(url, raw):
    raw.zadd(KEYS["leases"], {"1": "+inf", "2": "-inf"})
    endless, lapsed = as_json(url, "inspect", "summary")["summary"]["workers"]
    assert endless["lease_ms"] > 0 > lapsed["lease_ms"]


def test_a_block_is_found_by_its_hash_alone(url):
    assert as_json(url, "inspect", "block", f"{CHAIN[3]:016x}") == [
        {"worker": "w1:0", "incarnation": 1, "tier": "device", "key": bucket_of(3)},
        {"worker": "w2:1", "incarnation": 2, "tier": "host", "key": bucket_of(3)},
    ]
    [only] = as_json(url, "inspect", "block", f"0x{CHAIN[20]:x}")
    assert only["worker"] == "w1:0"
    assert "no worker holds it" in kvroute(url, "inspect", "block", "2a").output


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("xyz", "is not a hexadecimal number"),
        ("1" * 17, "has more than 16 hex digits"),
        ("-1", "is negative"),
    ],
)
def test_an_invalid_block_hash_is_refused(wrong, why):
    result = CliRunner().invoke(main, ["inspect", "block", "--", wrong])
    assert result.exit_code == 2
    assert f"{wrong!r} {why}" in result.output


def test_a_worker_is_shown_with_its_reservations(url):
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
    assert said(url, "inspect", "worker", "w9") == (1, "Error: worker 'w9' does not exist\n")


def test_a_worker_is_shown_with_the_readings_of_its_gpu(one_redis_server):
    async def fill():
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


def test_a_prompt_is_looked_up_as_tokens_or_text(url, tmp_path):
    tokens, text = tmp_path / "prompt.json", tmp_path / "prompt.txt"
    tokens.write_text(json.dumps(PROMPT[:50]))
    text.write_bytes(bytes(PROMPT[:44]))
    assert as_json(url, "inspect", "prefix", str(tokens)) == {
        "full_blocks": 12,
        "overlaps": [
            {"worker": "w1:0", "device": 12, "host": 0, "disk": 0, "blocks": 12, "reused": 12},
            {"worker": "w2:1", "device": 0, "host": 10, "disk": 0, "blocks": 10, "reused": 10},
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


def test_a_worker_without_a_valid_lease_is_not_shown_as_holding_a_prompt(url, raw, tmp_path):
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(PROMPT))
    raw.zadd(KEYS["leases"], {"1": 1})
    [found] = as_json(url, "inspect", "prefix", str(tokens))["overlaps"]
    assert found["worker"] == "w2:1"
    raw.zrem(KEYS["leases"], "2")
    assert as_json(url, "inspect", "prefix", str(tokens))["overlaps"] == []


def test_an_index_that_cannot_be_read_is_not_taken_for_an_empty_one(url, raw, tmp_path):
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(PROMPT))
    raw.set(SHARD["dead"], "spoilt")
    result = kvroute(url, "inspect", "prefix", str(tokens))
    assert result.exit_code == 1
    assert "the index cannot be read in 'test#0'" in result.output


def steady(shown):
    """What a command shows, without what changes with time and with the server's buffers."""
    return re.sub(r'"(lease_ms|memory_bytes|metrics_age_s)": [^,}]+', "", json.dumps(shown))


@pytest.mark.parametrize(
    "command",
    [
        ["summary"],
        ["worker", "w1"],
        ["block", f"{CHAIN[0]:016x}"],
        ["prefix", "prompt.json"],
        ["verify"],
        ["waiting"],
        ["usage"],
    ],
    ids=lambda command: command[0],
)
def test_a_full_redis_is_inspected_like_any_other(command, url, raw, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompt.json").write_text(json.dumps(PROMPT))
    before = steady(as_json(url, "inspect", *command))
    raw.config_set("maxmemory", 1)
    try:
        assert steady(as_json(url, "inspect", *command)) == before
    finally:
        raw.config_set("maxmemory", 0)
