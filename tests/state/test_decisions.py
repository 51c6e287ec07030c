from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
import pytest
from redis.asyncio import Redis

from app.core.config import RouterSettings
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import SequenceHash, TierOverlap
from app.local.redis_server import EmbeddedRedis
from app.policy.affinity import Affinity
from app.policy.cost import Candidates
from app.state import decisions
from app.state.client import Client
from app.state.connect import connect
from app.state.decisions import (
    ENTRY,
    FIELDS,
    MAX_UNWRITTEN,
    MAX_WRITTEN,
    Record,
    Recorder,
    Seen,
    Usage,
    decode,
    encode,
    sampled,
    usages,
)
from app.state.scripts import Call, ScriptRunner
from tests.eventually import eventually
from tests.redis_servers import stopped

KEYS = Keyspace("test")


def record(request_id: str, blocks: list[SequenceHash], seen: Seen | None = None) -> Record:
    return Record(
        request_id=request_id,
        at_ms=1_700_000_000_123,
        worker="w1:0",
        policy="latency",
        locality="load",
        isl_tokens=16 * len(blocks) + 1,
        full_blocks=len(blocks),
        overlap=TierOverlap(3, 2, 1),
        best="w2:1",
        best_overlap=9,
        tries=2,
        waited_ms=40,
        blocks=sampled(blocks),
        seen=seen,
    )


def as_redis_gives_it(values: tuple[object, ...]) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in zip(ENTRY, values, strict=True)
    }


CHAIN = [SequenceHash(2**63 + i) for i in range(100)]


def test_a_record_is_read_as_it_was_written() -> None:
    written = record("r1", CHAIN)
    assert decode(as_redis_gives_it(encode(written))) == written
    empty = record("r1", [])
    assert decode(as_redis_gives_it(encode(empty))) == empty


@pytest.mark.parametrize("max_queue_s", [2.5, np.inf])
def test_the_candidates_of_a_decision_are_read_as_they_were_written(max_queue_s: float) -> None:
    matrix = np.arange(len(FIELDS) * 3, dtype=np.float64).reshape(-1, 3) + 0.5
    # As without Redis.
    matrix[FIELDS.index("max_requests")] = np.inf
    eligible, affinity = [True, False, True], Affinity(1, 0.5, max_queue_s)
    seen = Seen(["w0:0", "w1:0", "w2:1"], 1, Candidates(*matrix), eligible, affinity)
    found = decode(as_redis_gives_it(encode(record("r1", CHAIN, seen)))).seen
    assert found is not None
    assert (found.workers, found.block_size) == (seen.workers, 1)
    assert (found.eligible, found.affinity) == (eligible, affinity)
    for name, values in zip(FIELDS, matrix, strict=True):
        assert getattr(found.candidates, name).tolist() == values.tolist()


@pytest.mark.parametrize("missing", ["worker", "best", "overlap", "blocks"])
def test_an_entry_that_lacks_a_field_is_refused(missing: str) -> None:
    entry = as_redis_gives_it(encode(record("r1", CHAIN)))
    del entry[missing.encode()]
    with pytest.raises(KeyError, match=missing):
        decode(entry)


def test_candidates_that_do_not_match_the_workers_are_refused() -> None:
    matrix = np.zeros((len(FIELDS), 2))
    seen = Seen(["w0:0"], 16, Candidates(*matrix), [True])
    with pytest.raises(ValueError, match="does not fit 1 workers"):
        decode(as_redis_gives_it(encode(record("r1", CHAIN, seen))))


@pytest.mark.parametrize(
    ("field", "value"),
    [("policy", "spoilt"), ("locality", "spoilt"), ("isl_tokens", "0"), ("isl_tokens", "9" * 400)],
)
def test_an_entry_that_cannot_be_explained_is_refused(field: str, value: str) -> None:
    entry = as_redis_gives_it(encode(record("r1", CHAIN))) | {field.encode(): value.encode()}
    with pytest.raises(ValueError, match=value):
        decode(entry)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("eligible", []),
        ("affinity", [1, 0.5, None]),
        ("affinity", [0, [], 1]),
        ("active_requests", [None]),
    ],
)
def test_candidates_that_cannot_be_priced_again_are_refused(field: str, value: Any) -> None:
    seen = Seen(["w0:0"], 16, Candidates(*np.zeros((len(FIELDS), 1))), [True], Affinity(0, 0.5))
    entry = as_redis_gives_it(encode(record("r1", CHAIN, seen)))
    entry[b"seen"] = orjson.dumps(orjson.loads(entry[b"seen"]) | {field: value})
    with pytest.raises((LookupError, TypeError, ValueError)):
        decode(entry)


def test_a_prefix_counts_once_for_each_request_that_has_all_of_it() -> None:
    system, document = CHAIN[:20], CHAIN[:40]

    def private(n: int, stem: list[SequenceHash], length: int) -> list[SequenceHash]:
        return [*stem, *(SequenceHash(1000 * n + i) for i in range(length))]

    prompts = [private(1, system, 30), private(2, document, 8), private(3, document, 60), CHAIN[:4]]
    found = list(usages(record(f"r{n}", prompt) for n, prompt in enumerate(prompts)))
    # 40 and 20 are among the recorded positions, and so is 4.
    assert found[:3] == [Usage(CHAIN[3], 4, 4), Usage(CHAIN[19], 20, 3), Usage(CHAIN[39], 40, 2)]
    assert [(usage.num_blocks, usage.requests) for usage in found[3:]] == [
        (96, 1),
        (48, 1),
        (48, 1),
    ]


async def test_records_are_read_page_by_page_the_latest_first_without_corrupted_ones(
    redis: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "PAGE", 2)
    entries = [as_redis_gives_it(encode(record(f"r{n}", CHAIN))) for n in range(6)]
    entries[1][b"policy"] = b"spoilt"
    entries[2][b"overlap"] = b"1 2 3 4"
    del entries[3][b"tries"]
    for entry in entries:
        await redis.xadd(KEYS["decisions"], {**entry})
    found = [record.request_id async for record in decisions.read(redis, KEYS)]
    assert found == ["r5", "r4", "r0"]


async def test_the_oldest_decisions_are_trimmed_when_there_are_too_many(redis: Redis) -> None:
    runner = ScriptRunner(redis, timeout_s=5)
    entry = encode(record("r1", CHAIN))
    for _ in range(8):
        await runner.run([decisions.record(KEYS, 100, entry)] * 100)
    assert 100 <= await redis.xlen(KEYS["decisions"]) < 250


async def test_when_too_many_decisions_are_unwritten_the_oldest_are_dropped(redis: Redis) -> None:
    recorder = Recorder(ScriptRunner(redis, timeout_s=5), KEYS, RouterSettings())
    for n in range(MAX_UNWRITTEN + 3):
        recorder.add(lambda _, n=n: record(f"r{n}", CHAIN))
    writing = asyncio.create_task(recorder.run())
    written = partial(redis.xrange, KEYS["decisions"])
    entries = await eventually(written, lambda found: len(found) >= MAX_UNWRITTEN)
    writing.cancel()
    ids = [entry[b"request_id"].decode() for _, entry in entries]
    assert ids == [f"r{n}" for n in range(3, MAX_UNWRITTEN + 3)]


async def test_what_redis_does_not_accept_is_lost_but_not_what_comes_later(
    own_redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "app.state.decisions")

    async def log() -> str:
        return caplog.text

    async with connect(own_redis_server.url) as redis:
        recorder = Recorder(ScriptRunner(redis, timeout_s=5), KEYS, RouterSettings())
        own_redis_server.kill()
        recorder.add(lambda _: record("r0", CHAIN))
        writing = asyncio.create_task(recorder.run())
        await eventually(log, lambda text: "decisions not recorded" in text)
        own_redis_server.start()
        recorder.add(lambda _: record("r1", CHAIN))
        [(_, entry)] = await eventually(partial(redis.xrange, KEYS["decisions"]))
        writing.cancel()
    assert entry[b"request_id"] == b"r1"


async def test_none_are_recorded_if_none_are_to_be_kept(redis: Redis) -> None:
    made: list[str] = []

    def make(request_id: str) -> Record:
        made.append(request_id)
        return record(request_id, CHAIN)

    runner = ScriptRunner(redis, timeout_s=5)
    off = Recorder(runner, KEYS, RouterSettings(decisions_kept=0))
    on = Recorder(runner, KEYS, RouterSettings())
    writing = [asyncio.create_task(recorder.run()) for recorder in (off, on)]
    off.add(lambda _: make("off"))
    on.add(lambda _: make("on"))
    await eventually(partial(redis.xrange, KEYS["decisions"]))
    for task in writing:
        task.cancel()
    assert made == ["on"]


async def test_no_round_trip_writes_more_than_redis_can_in_a_millisecond(redis: Redis) -> None:
    written: list[int] = []

    class Runner(ScriptRunner):
        async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
            replies = await super().run(calls)
            written.append(len(replies))
            return replies

    recorder = Recorder(Runner(redis, timeout_s=5), KEYS, RouterSettings())
    for n in range(2 * MAX_WRITTEN + 1):
        recorder.add(lambda _, n=n: record(f"r{n}", CHAIN))
    writing = asyncio.create_task(recorder.run())
    await eventually(partial(redis.xlen, KEYS["decisions"]), lambda n: n > 2 * MAX_WRITTEN)
    writing.cancel()
    assert written == [MAX_WRITTEN, MAX_WRITTEN, 1]


async def test_reading_from_a_redis_that_hangs_ends_with_an_error(
    own_redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "PAGE_TIMEOUT_S", 0.05)
    async with connect(own_redis_server.url) as redis:
        await redis.ping()
        with stopped(own_redis_server.pid):
            async with asyncio.timeout(10.0):
                with pytest.raises(RedisUnavailable):
                    [one async for one in decisions.read(redis, KEYS)]


def test_a_prompt_of_less_than_a_block_has_no_prefixes() -> None:
    found = list(usages([record("r1", []), record("r2", CHAIN[:4])]))
    assert [(usage.num_blocks, usage.requests) for usage in found] == [(4, 1)]
