import asyncio
from types import SimpleNamespace

import orjson
import pytest

from app.core.worker_report import (
    DEFAULT_SPEED,
    GPU,
    INFO,
    METRICS,
    ForwardPassMetrics,
    GpuReadings,
)
from app.edge.operators import KEPT_S
from app.router.router import Router
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers


async def listed(client):
    response = await client.get("/v1/workers")
    assert response.status_code == 200
    return response.json()


async def listed_once_fresh(client, workers, reports):
    """The list, once what these workers report has arrived."""

    async def look():
        for name, report in reports.items():  # again each time: it is stale after a while
            await workers.report(name, *report)
        return await listed(client)

    def is_fresh(answer):
        fresh = {worker["worker_id"] for worker in answer["workers"] if not worker["stale"]}
        return fresh == reports.keys()

    return await eventually(look, is_fresh)


async def test_a_fleet_without_workers_is_an_empty_list(client):
    assert await listed(client) == {"workers": [], "paused": [], "load_avg": 0.0, "load_std": 0.0}


async def test_a_worker_is_listed_with_its_registration_and_its_reservations(client, workers):
    incarnation = await workers.register("w1:2", max_requests=8, kv_total_blocks=100)
    await workers.occupy("w1:2", "a", "b", blocks=5)
    await client.post("/v1/requests/a/prefill_complete")
    (worker,) = (await listed(client))["workers"]
    queue_s = worker.pop("queue_s")
    reported = orjson.loads(
        orjson.dumps({item.answer: item.default for item in (*INFO, *METRICS) if item.answer})
    )
    assert worker == reported | {
        "worker_id": "w1",
        "dp_rank": 2,
        "address": "http://w1-2:80",
        "incarnation": incarnation,
        "accelerator": "cpu",
        "block_size": 4,
        "max_requests": 8,
        "active_requests": 2,
        "decoding_requests": 1,
        "others_requests": 0,
        "failures": 0,
        "failed_share": 0.0,
        "state": "serving",
        "since_s": None,
        "until_s": None,
        "cause": None,
        "witnesses": [],
        "active_blocks": 10,
        "prefill_tokens": 4,
        "kv_active_blocks": 0,
        "kv_total_blocks": 100,
        "num_requests_waiting": 0,
        "gpu_cache_usage": 0.0,
        "gpu_prefix_cache_hit_rate": 0.0,
        "kv_idle_before_evict_s": 0.0,
        "gpu": None,
        "stale": True,
        "unique_value_s": None,
    }
    # One prefill of 1 ms is left, and is draining.
    assert 0.0 <= queue_s <= 0.001


async def test_metrics_of_a_worker_are_shown_and_end_its_staleness(client, workers):
    await workers.register("w1")
    reported = ForwardPassMetrics(
        request_active_slots=3,
        request_total_slots=256,
        kv_active_blocks=25,
        kv_total_blocks=100,
        num_requests_waiting=2,
        gpu_cache_usage_perc=0.25,
        gpu_prefix_cache_hit_rate=0.5,
        kv_idle_before_evict_s=412.5,
    )
    (worker,) = (await listed_once_fresh(client, workers, {"w1": (reported,)}))["workers"]
    assert worker["kv_active_blocks"] == 25
    assert worker["num_requests_waiting"] == 2
    assert worker["gpu_cache_usage"] == 0.25
    assert worker["gpu_prefix_cache_hit_rate"] == 0.5
    assert worker["kv_idle_before_evict_s"] == 412.5


async def test_gpu_readings_are_shown_and_missing_ones_are_null(client, workers):
    await workers.register("w1")
    readings = GpuReadings(memory_used_bytes=60_129_542_145, utilisation=0.0)
    reports = {"w1": (ForwardPassMetrics(), DEFAULT_SPEED, readings)}
    (worker,) = (await listed_once_fresh(client, workers, reports))["workers"]
    missing = {item.answer: None for item in GPU}
    assert worker["gpu"] == missing | {"memory_used_bytes": 60_129_542_145, "utilisation": 0.0}


async def test_load_statistics_leave_out_workers_that_report_nothing(client, workers):
    reports = {}
    for name, used in (("w1", 20), ("w2", 40), ("w3", 60)):
        await workers.register(name)
        reports[name] = (ForwardPassMetrics(kv_active_blocks=used, kv_total_blocks=100),)
    await workers.register("w4")
    answer = await listed_once_fresh(client, workers, reports)
    # Sample deviation of 0.2, 0.4 and 0.6.
    assert answer["load_avg"] == pytest.approx(0.4)
    assert answer["load_std"] == pytest.approx(0.2)
    assert [w["stale"] for w in answer["workers"]] == [False, False, False, True]


async def test_a_worker_registered_again_is_listed_only_as_its_new_incarnation(client, workers):
    await workers.register("w1")
    await workers.occupy("w1", "a")
    second = await workers.register("w1")
    (worker,) = (await listed(client))["workers"]
    assert (worker["incarnation"], worker["active_requests"]) == (second, 0)


async def test_a_retired_worker_is_no_longer_listed(client, workers):
    await workers.register("w1")
    await workers.register("w2")
    await workers.retire("w1")
    assert [w["worker_id"] for w in (await listed(client))["workers"]] == ["w2"]


async def test_without_redis_the_list_is_unavailable(own_redis_server, replica):
    own_redis_server.kill()
    async with replica(own_redis_server.url) as client:
        response = await client.get("/v1/workers")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "redis_unavailable"


async def test_health_does_not_depend_on_redis(own_redis_server, replica):
    own_redis_server.kill()
    async with replica(own_redis_server.url) as client:
        response = await client.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
        response = await client.head("/health")
        assert (response.status_code, response.content) == (200, b"")


async def test_a_router_is_ready_while_a_worker_is_alive(client, workers):
    async def readiness():
        response = await client.get("/readiness")
        return response.status_code, response.json()

    not_ready = (503, {"ready": False, "missing": ["workers: none is alive"]})
    is_ready = (200, {"ready": True, "missing": []})
    assert await readiness() == not_ready
    await workers.register("w1")
    await eventually(readiness, lambda said: said == is_ready)
    await workers.retire("w1")
    await eventually(readiness, lambda said: said == not_ready)


async def test_however_many_ask_whether_a_router_is_ready_it_looks_once(
    client, workers, monkeypatch
):
    looks = []
    refresh = Router.refresh

    async def counted(router):
        looks.append(router)
        return await refresh(router)

    await workers.register("w1")
    monkeypatch.setattr(Router, "refresh", counted)
    clock = SimpleNamespace(now_s=1e6, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("app.console.kept.time", clock)
    asked = [client.get("/readiness") for _ in range(64)]
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    for _ in range(64):
        assert (await client.get("/readiness")).status_code == 200
    assert len(looks) == 1
    clock.now_s += KEPT_S
    assert (await client.get("/readiness")).status_code == 200
    assert len(looks) == 2


async def test_without_redis_a_router_that_knows_workers_is_ready_and_says_what_is_missing(
    own_redis_server, replica
):
    async with (
        connect(own_redis_server.url) as redis,
        replica(own_redis_server.url) as client,
    ):
        await FakeWorkers(redis).register("w1")
        assert (await client.get("/readiness")).json() == {"ready": True, "missing": []}
        await asyncio.to_thread(own_redis_server.kill)

        async def missing():
            response = await client.get("/readiness")
            assert (response.status_code, response.json()["ready"]) == (200, True)
            return response.json()["missing"]

        [told] = await eventually(missing)
        assert told.startswith("redis: ")


async def test_an_eviction_policy_that_becomes_dangerous_is_told_once_each_time(
    own_redis_server, replica, monkeypatch, caplog
):
    monkeypatch.setattr("app.router.maintenance.POLICY_INTERVAL_S", 0.01)
    async with (
        connect(own_redis_server.url) as redis,
        replica(own_redis_server.url) as client,
    ):
        await FakeWorkers(redis).register("w1")

        async def told():
            ready = await client.get("/readiness")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            shown = (await client.get("/metrics")).text
            return ready.json()["missing"], "kvroute_redis_may_evict 1.0" in shown

        for n, policy in enumerate(("allkeys-lru", "allkeys-lfu"), start=1):
            await redis.config_set("maxmemory-policy", policy)
            [missing], _ = await eventually(told, all)
            assert missing.startswith(f"redis: Redis has maxmemory-policy {policy}: once full")
            await redis.config_set("maxmemory-policy", "volatile-lru")
            await eventually(told, lambda found: found == ([], False))
            warnings = [r.message for r in caplog.records if r.name == "app.router.maintenance"]
            assert len(warnings) == 2 * n
            assert policy in warnings[-2]
            assert "no keys any more" in warnings[-1]


async def test_without_redis_a_router_that_knows_no_worker_is_not_ready(own_redis_server, replica):
    own_redis_server.kill()
    async with replica(own_redis_server.url) as client:
        response = await client.get("/readiness")
        assert (response.status_code, response.json()["ready"]) == (503, False)
        redis, workers = response.json()["missing"]
        assert redis.startswith("redis: ")
        assert workers == "workers: none is alive"


async def test_what_losing_a_worker_would_cost_is_listed_once_a_planner_says(client, workers):
    await workers.register("w1")
    assert (await listed(client))["workers"][0]["unique_value_s"] is None
    await workers.redis.hset(KEYS["planner"], "values", '{"w1": 2.5}')
    assert (await listed(client))["workers"][0]["unique_value_s"] == 2.5
