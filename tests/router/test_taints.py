"""Workers that may hold KV of one prompt as another's, as routers keep away from them."""

from __future__ import annotations

from app.core.types import WorkerKey
from app.local.redis_server import EmbeddedRedis
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers, worker_info
from tests.redis_servers import stopped
from tests.router.test_router import Replica, placed, request, route_all, router, running, workers

__all__ = ["router", "workers"]


async def test_all_replicas_leave_a_tainted_worker_out(
    one_redis_server: EmbeddedRedis, router: Replica, workers: FakeWorkers
) -> None:
    await workers.register("w1")
    await workers.register("w2")
    async with running(one_redis_server.url) as other:
        await other.refresh()
        await router.refresh()
        await router.taint(worker_info("w1"), "fetched late")
        assert router.counted("worker_taints") == 1
        for replica in (router, other):
            answers = await route_all(replica, *(request(f"r{n}") for n in range(4)))
            assert placed(answers) == {"w2": 4}
            assert replica.fleet.is_tainted(WorkerKey("w1"))
            assert not replica.fleet.is_tainted(WorkerKey("w2"))


async def test_without_redis_it_is_left_out_and_redis_is_told_later(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis, running(own_redis_server.url) as router:
        workers = FakeWorkers(redis)
        await workers.register("w1")
        await workers.register("w2")
        await router.refresh()
        with stopped(own_redis_server.pid):
            await router.taint(worker_info("w1"), "fetched late")
            answers = await route_all(router, *(request(f"r{n}") for n in range(4)))
            assert placed(answers) == {"w2": 4}
            assert router.fleet.is_tainted(WorkerKey("w1"))

        async def marks() -> list[bytes]:
            records = await redis.hgetall(KEYS["verdicts"])
            return [name for name, text in records.items() if b"tainted" in text]

        assert await eventually(marks) == [b"w1:0"]
        assert placed(await route_all(router, request("r9"))) == {"w2": 1}
