"""Whether the console and `kvroute doctor` name a key that floods the fleet, and no other."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from app.ops.doctor import doctor
from tests.door.conftest import replica, sick_worker, until_serving
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE
from tests.fakes.faults import Faults

KEYS = ("ann", "bob", "cat", "dan", "eve")
OPERATOR = {"authorization": "Bearer o"}
AT_ONCE = 30


@asynccontextmanager
async def loaded(door, keys, most):
    """Requests of all keys, most of them of some, as many at once as a worker has no places for."""

    async def ask(key):
        while True:
            body = {"model": "m", "prompt": [*range(1, 500)], "max_tokens": 4}
            headers = {"authorization": f"Bearer {key}"}
            await door.post("/v1/completions", json=body, headers=headers)

    asking = [asyncio.create_task(ask(most[n % len(most)])) for n in range(AT_ONCE)]
    asking += [asyncio.create_task(ask(key)) for key in keys if key not in most]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.fixture
async def door(one_redis_server, redis, tmp_path):
    file = tmp_path / "keys"
    file.write_text("ops o operator\n" + "".join(f"{key} {key}\n" for key in KEYS))
    async with (
        sick_worker(redis, "a", max_requests=4) as engine,
        replica(one_redis_server.url, api_key_file=str(file)) as client,
    ):
        client.headers.update(OPERATOR)
        await until_serving(client, 1)
        engine.faults = Faults(token_s=0.01)
        yield client


async def flooding(door):
    """What the console says of keys that flood."""
    figures = (await door.get("/console/api/overview", headers=OPERATOR)).json()
    return [str(one) for one in figures["findings"] if one["name"] == "KvrouteKeyFloods"]


async def test_the_key_that_floods_the_fleet_is_named(door, one_redis_server):
    async with loaded(door, KEYS, ["ann"]):
        [said] = await eventually(lambda: flooding(door))
        assert "ann's" in said
        command = ["--redis-url", one_redis_server.url, "--namespace", NAMESPACE]
        done = await asyncio.to_thread(CliRunner().invoke, doctor, command)
    assert done.exit_code == 1
    assert "✗ KvrouteKeyFloods: " in done.output


async def test_the_same_load_of_five_keys_names_none(door):
    async with loaded(door, KEYS, list(KEYS)):

        async def has_waited():
            row = (await door.get("/v1/usage", headers=OPERATOR)).json()["total"]
            assert not await flooding(door)
            return row["waited_ms"] > 20_000 and row["requests"] > 3 * AT_ONCE

        assert await eventually(has_waited)
