"""`kvroute drain` on a real Redis."""

import asyncio

import pytest
from redis import Redis

from app.ops import drain
from app.state import reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers, fake_agent, running
from tests.ops.conftest import kvroute, said


def test_a_worker_with_requests_is_not_drained_at_the_deadline(url, raw):
    result = kvroute(url, "drain", "w1", "--deadline-s", "0.3")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "w1 gets no more requests; 1 request left on it",
        "Error: after 0.3 s, 1 request left",
    ]
    assert "draining" in kvroute(url, "inspect", "summary").output
    assert raw.hget(KEYS["verdicts"], "w1:0").startswith(b'{"draining":')


def test_without_a_deadline_it_does_not_wait(url):
    assert said(url, "drain", "w1:0", "--deadline-s", "0") == (
        0,
        "w1:0 gets no more requests; 1 request left on it\n",
    )


def test_a_worker_without_requests_is_drained_at_once_and_comes_back(url, raw):
    assert said(url, "drain", "w2") == (0, "w2 is drained: stop it, or `kvroute drain w2 --undo`\n")
    assert said(url, "drain", "w2", "--undo") == (0, "w2 gets requests again\n")
    assert raw.hget(KEYS["verdicts"], "w2:1").startswith(b'{"undone":')


@pytest.mark.parametrize("name", ["w3", "w1:1", "w"])
def test_an_unknown_worker_is_named(url, name):
    assert said(url, "drain", name) == (
        1,
        f"Error: worker {name!r} does not exist in namespace 'test'\n",
    )


def test_a_redis_that_hangs_is_waited_for_until_the_deadline(own_redis_server, monkeypatch):
    monkeypatch.setattr(drain, "TIMEOUT_S", 0.1)
    with Redis.from_url(own_redis_server.url) as raw:
        raw.hset(KEYS["current"], "w1:0", "1")
        raw.hset(KEYS["load"], "1", "0 0 0 0 7 1 1 1 0 0 0 0")
        raw.client_pause(700, all=False)
    result = kvroute(own_redis_server.url, "drain", "w1", "--deadline-s", "2")
    said = result.output.splitlines()
    assert said[0] == "waiting for Redis: no answer within 100 ms"
    # On a busy machine, it is waited for again.
    assert [line for line in said if line != said[0]] == [
        "w1 gets no more requests; 1 request left on it",
        "Error: after 2 s, 1 request left",
    ]


async def test_a_worker_that_redis_has_just_lost_is_not_called_drained(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr(drain, "CARRIED_MS", 2500)
    workers = FakeWorkers(redis)
    await workers.register("w1")
    await workers.occupy("w1", "r1")
    arguments = ("drain", "w1", "--deadline-s", "3")
    draining = asyncio.create_task(asyncio.to_thread(kvroute, one_redis_server.url, *arguments))

    async def marked():
        return bool(await redis.exists(KEYS["verdicts"]))

    await eventually(marked)
    await redis.flushall()
    await eventually(marked, lambda found: not found and not draining.done())
    await workers.register("w1")
    await workers.occupy("w1", "r1")
    await eventually(marked)
    assert (await draining).output.splitlines()[-1] == "Error: after 3 s, 1 request left"


async def test_an_agent_that_is_told_to_stop_waits_for_the_requests_on_its_worker(one_redis_server):
    async with (
        connect(one_redis_server.url) as redis,
        started_replica(one_redis_server.url) as replica,
    ):
        runner = ScriptRunner(redis, 5.0)
        async with (
            running(fake_agent(runner, KEYS, "a")) as first,
            running(fake_agent(runner, KEYS, "b")),
        ):
            asked = {"token_ids": [1] * 8, "exclude": ["b"]}
            await eventually(_status(replica, asked), lambda status: status == 200)
            held = (await replica.post("/v1/route", json=asked | {"request_id": "r"})).json()
            assert not await first.drain(0.2)
            draining = asyncio.create_task(first.drain(20.0))
            asked = {"token_ids": [1] * 8}
            for _ in range(20):
                answer = (await replica.post("/v1/route", json=asked)).json()
                assert answer["worker_id"] == "b"
            listed = (await replica.get("/v1/workers")).json()
            assert [(w["worker_id"], w["state"]) for w in listed["paused"]] == [("a", "draining")]
            shown = (await replica.get("/metrics")).text
            assert 'kvroute_worker_state{state="draining",worker="a:0"} 1.0' in shown
            assert not draining.done()
            for name in await redis.hkeys(KEYS[f"requests:{first.incarnation}"]):
                releases = [reservations.Release(name.decode())]
                await runner.one(reservations.release(KEYS, releases))
            assert await draining
            assert held["worker_id"] == "a"


def _status(replica, asked):
    async def status():
        return (await replica.post("/v1/route", json=asked)).status_code

    return status
