"""How long answers may take, and whom it is held against when they take longer."""

import asyncio
from dataclasses import replace

from app.door import carriage
from app.state.scripts import ScriptRunner
from tests.door.conftest import replica, until_serving
from tests.fake_worker import KEYS, FakeWorker, worker_info
from tests.fakes.engine import fake_engine
from tests.fakes.faults import Faults

PATH = "/v1/completions"
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3}


async def register(redis, name, engine):
    info = replace(worker_info(name, kv_total_blocks=10_000), address=engine.url, models=("m",))
    worker = FakeWorker(ScriptRunner(redis, 5.0), KEYS, info)
    await worker.register()
    await worker.activate()


async def failures(door):
    shown = (await door.get("/v1/workers")).json()
    assert shown["paused"] == []
    return [worker["failures"] for worker in shown["workers"]]


async def test_a_whole_answer_that_takes_long_is_not_held_against_its_worker(
    one_redis_server, redis
):
    async with (
        fake_engine(prefill_s=1.0) as one,
        fake_engine(prefill_s=1.0) as other,
        replica(one_redis_server.url, answer_timeout_s=0.2, whole_timeout_s=60) as door,
    ):
        await register(redis, "a", one)
        await register(redis, "b", other)
        await until_serving(door, 2)
        asking = [door.post(PATH, json=ASKED) for _ in range(4)]
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert await failures(door) == [0, 0]


async def test_a_whole_answer_that_takes_too_long_is_504_and_blames_nobody(one_redis_server, redis):
    async with (
        fake_engine() as one,
        fake_engine() as other,
        replica(one_redis_server.url, whole_timeout_s=0.3) as door,
    ):
        await register(redis, "a", one)
        await register(redis, "b", other)
        await until_serving(door, 2)
        one.faults = other.faults = Faults(how="hang")
        answer = await door.post(PATH, json=ASKED)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "answer_timeout"
        assert await failures(door) == [0, 0]
        assert one.started + other.started == 1


async def test_a_stream_that_says_nothing_for_longer_than_predicted_goes_to_another_worker(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr(carriage, "FIRST_TOKEN_S", 0.3)
    async with (
        fake_engine() as one,
        fake_engine() as other,
        replica(one_redis_server.url, answer_timeout_s=60) as door,
    ):
        await register(redis, "a", one)
        await register(redis, "b", other)
        await until_serving(door, 2)
        one.faults = Faults(how="hang")
        answers = [await door.post(PATH, json=ASKED | {"stream": True}) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert all("tok" in answer.text for answer in answers)
        assert one.started >= 1
        assert other.finished == 4
