"""`kvroute inspect verify` finds contradictions, and only those."""

import json
from collections.abc import Callable

import pytest
from redis import Redis

from app.core.keys import MODELS
from tests.fake_worker import KEYS, SHARD
from tests.ops.conftest import CHAIN, as_json, kvroute


def test_verify_finds_nothing_wrong_with_an_intact_namespace(url):
    result = kvroute(url, "inspect", "verify")
    assert result.exit_code == 0
    assert "no contradictions found" in result.output


def test_a_worker_whose_agent_is_away_is_no_contradiction(url, raw):
    raw.hset(KEYS["verdicts"], "a:0", '{"away":{"since_ms":1700000000000}}')
    assert as_json(url, "inspect", "verify")["findings"] == []


def test_a_key_that_only_looks_like_a_bucket_does_not_count(url, raw):
    raw.zadd(KEYS["waiting:normal:a:blocks:b"], {"replica-1 5 -": 1})
    raw.set("kvroute:1:{test#x}:blocks:0", "mine")
    verified = as_json(url, "inspect", "verify")
    assert verified == {"buckets": 2, "existing_buckets": 2, "findings": []}
    assert as_json(url, "inspect", "summary")["summary"]["unique_blocks"] == 40
    assert len(as_json(url, "inspect", "block", f"{CHAIN[3]:016x}")) == 2


def test_verify_says_how_many_buckets_it_did_not_check(url):
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
        (lambda r: r.hset(SHARD["blocks:zz"], "00", "1d"), "a bucket that nobody looks for"),
        (lambda r: r.hset(SHARD["shard"], "bucket_bits", "x"), "bucket bits that cannot be read"),
        (lambda r: r.hset(SHARD["applied"], "junk", "0 x"), "a writer that is no incarnation"),
        (lambda r: r.sadd(SHARD["dead"], "junk"), "a writer that is no incarnation"),
        (lambda r: r.hset(SHARD["predictions"], "a", "x"), "a number of predictions"),
        (lambda r: r.set(SHARD["predicted:0"], "spoilt"), "a key that is not a hash"),
        (lambda r: r.set(KEYS["reservations"], "spoilt"), "a key that is not a hash"),
        (lambda r: r.set(KEYS["leases"], "spoilt"), "a key that is not a zset"),
        (lambda r: r.set(KEYS["metrics"], "spoilt"), "a key that is not a stream"),
        (lambda r: r.set(KEYS["waiting:normal:a"], "spoilt"), "a key that is not a zset"),
        (lambda r: r.rename(KEYS["load"], KEYS["load.bak"]), "a key that is none of kvroute's"),
        (lambda r: r.hset(KEYS["blocks:0"], "00", "1d"), "a key that is none of kvroute's"),
        (lambda r: r.rpush(KEYS["prefills:77"], "r1"), "requests of an incarnation that has ended"),
        (lambda r: r.hset(KEYS["requests:x"], "r1", "y"), "requests of an incarnation that has"),
        (
            lambda r: r.set(KEYS.of_shard(3)["blocks:0"], "spoilt"),
            "a shard past the last one",
        ),
        (lambda r: r.hset(KEYS["meta"], "incarnations", "x"), "a number of the namespace"),
        (lambda r: r.hset(KEYS["meta"], "version", "x"), "a number of the namespace"),
        (lambda r: r.hset(KEYS["meta"], "block_size", "8"), "another block size"),
        (lambda r: r.hset(KEYS["workers"], "1", "spoilt"), "a worker's entry that cannot be read"),
        (lambda r: r.zadd(KEYS["leases"], {"1": 9e15}), "a lease that ends later"),
        (lambda r: r.zadd(KEYS["expiry"], {"req-7": 9e15}), "a reservation that lasts longer"),
        (lambda r: r.hset(KEYS["verdicts"], "a:0", "x"), "a worker's record that cannot be read"),
        (lambda r: r.hset(KEYS["verdicts"], "a:0", '{"away":5}'), "a worker's record that cannot"),
        (lambda r: r.hset(KEYS["planner"], "token", "abc"), "a field of the planner"),
        (lambda r: r.hset(KEYS["planner"], "state", "[]"), "a field of the planner"),
        (lambda r: r.hset(KEYS["planner"], "until_ms", 1 << 49), "a planner's lease that ends"),
        (lambda r: r.hset(MODELS, "m", "{} 1"), "an entry in the list of models"),
        (
            lambda r: r.hset(MODELS, "llama", "test 9000000000000"),
            "a model announced later than now",
        ),
        (lambda r: r.set(MODELS, "spoilt"), "a key that is not a hash"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "1-5"), "owners that cannot be read"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "1-5,1d"), "owners that cannot be read"),
        (lambda r: r.hset(SHARD["blocks:0"], "00", "2-5 1d"), "the engine of no owner goes on"),
    ],
)
def test_verify_finds_contradictions(url, raw, monkeypatch, damage, what):
    monkeypatch.setattr("app.ops.verify.LOOK_INTERVAL_S", 0.01)
    damage(raw)
    result = kvroute(url, "inspect", "verify")
    assert result.exit_code == 1
    assert what in result.output
    assert "no contradictions found" not in result.output


def test_verify_names_all_damage_at_once(url, raw, monkeypatch):
    monkeypatch.setattr("app.ops.verify.LOOK_INTERVAL_S", 0.01)
    raw.set(KEYS["metrics"], "spoilt")
    raw.set(KEYS["sessions.bak"], "mine")
    for name in ("planner", "leases", "prefills:1", "current"):
        raw.delete(KEYS[name])
        raw.set(KEYS[name], "spoilt")
    for name in ("applied", "dead", "predictions"):
        raw.delete(SHARD[name])
        raw.set(SHARD[name], "spoilt")
    raw.hset(KEYS["load"], "9", "0 0 0 0 0 0 0 0")
    raw.hset(SHARD["blocks:0"], "00", "2d1d")
    raw.hset(MODELS, "m", "{} 1")
    result = kvroute(url, "inspect", "verify", "--json")
    assert result.exit_code == 1
    found = {f["what"]: f["examples"] for f in json.loads(result.output)["findings"]}
    assert {KEYS["planner"], KEYS["prefills:1"], KEYS["current"], SHARD["predictions"]} < {
        *found["a key that is not a hash"],
        *found["a key that is not a list"],
    }
    assert found["a key that is not a stream"] == [KEYS["metrics"]]
    assert found["a key that is not a zset"] == [KEYS["leases"]]
    assert {
        "a key that is none of kvroute's",
        "an entry in the list of models that cannot be read",
        "the load of an incarnation that has ended",
        "a prefill queue that does not match the requests prefilling",
        "owners that cannot be read",
    } < set(found)


def test_verify_reads_many_reservations_in_parts(url, raw, monkeypatch):
    monkeypatch.setattr("app.ops.verify.LOOKS", 1)
    requests = [f"r{i}" for i in range(1000)]
    raw.hset(KEYS["reservations"], mapping=dict.fromkeys(requests, "1"))
    raw.zadd(KEYS["expiry"], dict.fromkeys(requests, 1 << 40))
    raw.config_resetstat()
    found = json.loads(kvroute(url, "inspect", "verify", "--json").output)["findings"]
    assert [(f["what"], f["count"]) for f in found] == [("a reservation without its request", 1000)]
    calls = {name: stats["calls"] for name, stats in raw.info("commandstats").items()}
    assert calls["cmdstat_hscan"] > 4
    assert calls["cmdstat_zscan"] > 4


HOSTILE = "\x9b2J\u202e\u2028\n\x1b[31m"


@pytest.mark.parametrize(
    "command",
    ["verify", "verify --json", "summary --json", "worker w1", "worker w1 --json", "waiting"],
)
def test_no_name_in_redis_moves_the_cursor_or_ends_a_line(url, raw, command):
    for key in ("workers", "current", "load", "reservations", "writers", "requests:1"):
        raw.hset(KEYS[key], HOSTILE, HOSTILE)
    written = raw.hget(KEYS["workers"], "1")
    info = json.loads(written) | {"engine": HOSTILE, "accelerator": HOSTILE}
    raw.hset(KEYS["workers"], "1", json.dumps(info))
    raw.zadd(KEYS["flows"], {f"normal:{HOSTILE}": 1})
    raw.zadd(KEYS[f"waiting:normal:{HOSTILE}"], {f"r-1{HOSTILE} 5 -": 1})
    text = kvroute(url, "inspect", *command.split()).output
    assert "2J" in text
    assert [line for line in text.split("\n") if not line.isprintable()] == []
