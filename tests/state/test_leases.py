from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from redis.asyncio import Redis

from app.core.types import Incarnation, WorkerInfo, WorkerKey
from app.state.leases import absent, decode_info, encode_info
from app.state.scripts import ScriptRunner
from tests.fake_workers import KEYS, FakeWorkers

INFO = WorkerInfo(
    key=WorkerKey("gpu-7", 3),
    address="http://10.0.0.7:8081",
    block_size=16,
    kv_total_blocks=25_000,
    max_requests=256,
    accelerator="NVIDIA H100",
)


def test_a_worker_info_is_read_as_it_was_written() -> None:
    assert decode_info(encode_info(INFO, 3000)) == INFO
    assert decode_info(encode_info(INFO, 3000).decode()) == INFO


def test_a_worker_info_with_the_smallest_numbers_is_read() -> None:
    smallest = replace(INFO, block_size=1, kv_total_blocks=0, max_requests=0)
    assert decode_info(encode_info(smallest, 3000)) == smallest


def test_a_worker_info_is_json_that_a_person_can_read() -> None:
    assert orjson.loads(encode_info(INFO, 3000)) == {
        "worker": "gpu-7:3",
        "address": "http://10.0.0.7:8081",
        "block_size": 16,
        "kv_total_blocks": 25_000,
        "max_requests": 256,
        "accelerator": "NVIDIA H100",
        "lease_ttl_ms": 3000,
    }


def test_a_field_that_a_later_version_adds_is_ignored() -> None:
    fields = orjson.loads(encode_info(INFO, 3000)) | {"colour": "red"}
    assert decode_info(orjson.dumps(fields)) == INFO


@pytest.mark.parametrize(
    "field", sorted(orjson.loads(encode_info(INFO, 3000)).keys() - {"lease_ttl_ms"})
)
def test_a_worker_info_without_one_of_its_fields_is_refused(field: str) -> None:
    fields = orjson.loads(encode_info(INFO, 3000))
    del fields[field]
    with pytest.raises(KeyError, match=field):
        decode_info(orjson.dumps(fields))


@pytest.mark.parametrize("text", ["", "gpu-7", '{"worker": "gpu-7"'])
def test_a_worker_info_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1 column"):
        decode_info(text)


def test_a_worker_info_of_a_nameless_worker_is_refused() -> None:
    fields = orjson.loads(encode_info(INFO, 3000)) | {"worker": ":0"}
    with pytest.raises(ValueError, match="not a worker key: ':0'"):
        decode_info(orjson.dumps(fields))


@pytest.mark.parametrize("field", ["block_size", "kv_total_blocks", "max_requests"])
def test_a_worker_info_with_null_for_a_number_is_refused(field: str) -> None:
    fields = orjson.loads(encode_info(INFO, 3000)) | {field: None}
    with pytest.raises(TypeError, match="NoneType"):
        decode_info(orjson.dumps(fields))


@pytest.mark.parametrize("value", [-1, 10**12 + 1, "9" * 400])
@pytest.mark.parametrize("field", ["block_size", "kv_total_blocks", "max_requests"])
def test_a_worker_info_with_a_number_out_of_bounds_is_refused(field: str, value: int | str) -> None:
    fields = orjson.loads(encode_info(INFO, 3000)) | {field: value}
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        decode_info(orjson.dumps(fields))


async def test_an_incarnation_that_is_no_writer_is_absent(redis: Redis) -> None:
    workers, runner = FakeWorkers(redis), ScriptRunner(redis, timeout_s=5)
    a, b = await workers.register("a"), await workers.register("b")
    assert await runner.one(absent(KEYS, [a, Incarnation(77), b])) == [77]
    await redis.hdel(KEYS["writers"], str(a))
    assert await runner.one(absent(KEYS, {a, b})) == [a]


async def test_every_incarnation_is_absent_from_an_emptied_redis(redis: Redis) -> None:
    asked = [Incarnation(n) for n in range(1, 10_001)]
    assert await ScriptRunner(redis, timeout_s=5).one(absent(KEYS, asked)) == asked
