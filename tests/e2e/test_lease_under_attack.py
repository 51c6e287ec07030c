"""A worker that reads hostile bodies renews its lease all the same."""

import asyncio

import httpx

from tests.attack.hostile_bodies import hostile_door_bodies
from tests.door.conftest import worker
from tests.eventually import eventually
from tests.fake_worker import KEYS

LEASE_S = 8.0
"""Renewed every two seconds: what holds a worker up for six would let it lapse, and a busy machine
holds it up for less."""
BODY_BYTES = 8 * 1024 * 1024


async def test_no_body_keeps_a_worker_from_renewing_its_lease(one_redis_server, redis):
    bodies = [(path, body) for _, path, body in hostile_door_bodies(BODY_BYTES)]
    with worker(one_redis_server.url, "a", lease_ttl_s=LEASE_S) as only:
        inc = await eventually(lambda: redis.hget(KEYS["current"], "a:0"), within_s=30.0)
        assert inc is not None

        async def send(http, path, body):
            headers = {"content-type": "application/json"}
            answer = await http.post(f"{only.url}{path}", content=body, headers=headers)
            return answer.status_code

        async with httpx.AsyncClient(timeout=60) as http:
            sending = asyncio.gather(*(send(http, *each) for each in bodies))
            while not sending.done():
                expires_ms = await redis.zscore(KEYS["leases"], inc)
                seconds, micros = await redis.time()
                assert expires_ms is not None
                assert expires_ms > seconds * 1000 + micros / 1000, "its lease has lapsed"
                await asyncio.sleep(0.05)
            statuses = await sending
    assert set(statuses) <= {400, 413, 422, 503}
