import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core.types import Tier
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, GpuReadings
from app.router.metrics import Telemetry, text_of
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import FakeWorkers

# Two full blocks of four tokens, and a partial third.
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


class Scraped:
    """The samples of one scrape: `scraped("name", label="value")` is 0 if there is none."""

    def __init__(self, text):
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        return self._samples.get((f"kvroute_{name}", frozenset(labels.items())), 0.0)


async def scrape(client):
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scraped(response.text)


async def route(client, **body):
    return await client.post("/v1/route", json={"token_ids": PROMPT} | body)


@pytest.fixture
async def two(workers):
    """w1 holds PROMPT, one block of it on the device and one on the host; w2 holds nothing."""
    await workers.register("w1", max_requests=2)
    await workers.register("w2")
    await workers.publish("w1", PROMPT, Tier.HOST)
    await workers.publish("w1", PROMPT[:4])
    return workers


async def test_every_metric_has_our_prefix_and_a_help_text(client, two):
    await route(client)
    families = (await scrape(client)).families
    assert {name for name in families if not name.startswith("kvroute_")} == set()
    assert {name for name, family in families.items() if not family.documentation} == set()
    assert {name for name in families if name.endswith("_created")} == set()
    assert set(families) >= {
        "kvroute_decisions",
        "kvroute_degraded_decisions",
        "kvroute_decision_seconds",
        "kvroute_redis_round_trip_seconds",
        "kvroute_hit_fraction",
        "kvroute_isl_blocks",
        "kvroute_overlap_blocks",
        "kvroute_reservations",
        "kvroute_reserve_conflicts",
        "kvroute_decision_retries",
        "kvroute_metrics_stream_lag_seconds",
        "kvroute_load_avg",
        "kvroute_load_std",
        "kvroute_worker_queue_seconds",
        "kvroute_worker_gpu_power_watts",
    }


async def test_a_router_without_workers_has_metrics_too(client):
    scraped = await scrape(client)
    assert scraped("degraded_decisions_total") == 0.0
    assert scraped.families["kvroute_worker_requests"].samples == []
    text = (await client.get("/metrics")).text
    outcomes = set(re.findall(r'decisions_total{outcome="(\w+)",policy="latency"} 0.0', text))
    refused = {"no_workers", "too_large", "all_busy", "overloaded"}
    assert outcomes == refused | {"gone", "superseded", "failed", "limited"}


async def test_decisions_are_counted_by_policy_and_outcome(client, two):
    await route(client, exclude=["w2"])
    await route(client, exclude=["w2"], policy="logit")
    # w1 is full now.
    assert (await route(client, exclude=["w2"], policy="logit")).status_code == 429
    assert (await route(client, exclude=["w1", "w2"])).status_code == 503
    assert (await route(client, reserve=False)).status_code == 200
    scraped = await scrape(client)
    assert scraped("decisions_total", policy="latency", outcome="routed") == 2
    assert scraped("decisions_total", policy="latency", outcome="no_workers") == 1
    assert scraped("decisions_total", policy="logit", outcome="routed") == 1
    assert scraped("decisions_total", policy="logit", outcome="all_busy") == 1
    assert scraped("decision_seconds_count") == 5
    assert scraped("degraded_decisions_total") == 0


async def test_requests_to_a_fleet_without_workers_are_counted(client, workers):
    hashes = {"local_hashes": [1], "num_tokens": 4}
    assert (await route(client)).status_code == 503
    await workers.register("w1")
    await workers.retire("w1")
    assert (await client.post("/v1/route", json=hashes | {"policy": "logit"})).status_code == 503
    assert (await client.post("/find_best_worker", json=hashes)).status_code == 503
    scraped = await scrape(client)
    assert scraped("decisions_total", policy="latency", outcome="no_workers") == 2
    assert scraped("decisions_total", policy="logit", outcome="no_workers") == 1


async def test_a_refused_body_does_not_count_as_a_decision(client, two):
    assert (await route(client, policy="fastest")).status_code == 422
    scraped = await scrape(client)
    assert scraped("decision_seconds_count") == 0
    decisions = scraped.families["kvroute_decisions"].samples
    assert [s for s in decisions if s.name == "kvroute_decisions_total" and s.value] == []


async def test_invalid_requests_are_counted_by_the_code_of_their_error(
    one_redis_server, replica, two
):
    async with replica(one_redis_server.url, max_request_bytes=64) as client:
        await route(client, polcy="logit")
        await client.post("/v1/route", content=b"{")
        await client.post("/v1/route", json={"token_ids": []})
        await client.delete("/v1/requests/a", params={"worker_failed": "perhaps"})
        await client.post("/v1/route", content=bytes(65))
        found = await scrape(client)
    assert found("invalid_requests_total", code="invalid_request") == 4
    assert found("invalid_requests_total", code="body_too_large") == 1


async def test_hits_are_counted_only_for_requests_that_reserve(client, two):
    await route(client, exclude=["w2"])
    await route(client, exclude=["w1"])
    await route(client, exclude=["w2"], reserve=False)
    scraped = await scrape(client)
    assert scraped("isl_blocks_total") == 6
    assert scraped("overlap_blocks_total", tier="device") == 1
    assert scraped("overlap_blocks_total", tier="host") == 1
    assert scraped("overlap_blocks_total", tier="disk") == 0
    # Two of three blocks, then none.
    assert scraped("hit_fraction_count") == 2
    assert scraped("hit_fraction_sum") == pytest.approx(2 / 3)
    assert scraped("hit_fraction_bucket", le="0.6") == 1
    assert scraped("hit_fraction_bucket", le="0.7") == 2
    # Ten tokens; or two behind them, and four loaded from the host.
    speed = DEFAULT_SPEED
    whole_s = 10 * (speed.prefill_s_per_token + 5 * speed.prefill_s_per_token2)
    rest_s = 2 * (speed.prefill_s_per_token + 9 * speed.prefill_s_per_token2)
    saved_s = whole_s - rest_s - 4 * speed.host_s_per_token
    assert scraped("saved_prefill_seconds_total") == pytest.approx(saved_s, abs=2e-6)


async def test_reservations_are_counted_by_event(client, two):
    for request_id in ("a", "b", "c"):
        await route(client, request_id=request_id)
    await client.post("/v1/requests/a/prefill_complete")
    await client.delete("/v1/requests/a")
    await client.delete("/v1/requests/b")
    await client.delete("/v1/requests/b")
    scraped = await scrape(client)
    assert scraped("reservations_total", event="made") == 3
    assert scraped("reservations_total", event="prefill_complete") == 1
    assert scraped("reservations_total", event="released") == 2
    assert scraped("reservations_total", event="unknown") == 1
    assert scraped("reserve_conflicts_total", reason="changed") == 0
    assert scraped("decision_retries_total") == 0


async def test_a_reservation_that_expires_is_counted_by_only_one_replica(
    one_redis_server, replica, two
):
    async with (
        replica(one_redis_server.url, reservation_ttl_s=0.05) as client,
        replica(one_redis_server.url) as second,
    ):
        assert (await route(client)).json()["reserved"]
        expired = 0.0
        while not expired:
            found = [await scrape(client), await scrape(second)]
            expired = sum(s("reservations_total", event="expired") for s in found)
        assert expired == 1
        assert await two.reserved() == {}


async def test_redis_round_trip_times_are_reported_by_step(client, two):
    # Learns the block size first.
    await route(client)
    before = await scrape(client)
    for _ in range(3):
        await route(client)
    await route(client, reserve=False)
    after = await scrape(client)

    def growth(step):
        name = "redis_round_trip_seconds_count"
        return after(name, step=step) - before(name, step=step)

    # Round trips for the scrapes themselves are not counted.
    assert (growth("look_up"), growth("reserve")) == (4, 3)
    assert 0 < after("redis_round_trip_seconds_sum", step="reserve") < 10


async def test_worker_load_shows_reservations_and_reported_metrics(client, two):
    await two.occupy("w2", "a", "b", blocks=5)
    await two.report(
        "w1",
        ForwardPassMetrics(
            kv_active_blocks=20,
            kv_total_blocks=100,
            num_requests_waiting=3,
            gpu_cache_usage_perc=0.2,
        ),
    )
    await two.report("w2", ForwardPassMetrics(kv_active_blocks=60, kv_total_blocks=100))
    scraped = await scrape(client)
    # The replica reads metrics in the background: scrape until they have arrived.
    while scraped("worker_stale", worker="w2:0"):
        scraped = await scrape(client)

    def load(worker, what):
        return scraped(f"worker_{what}", worker=worker)

    assert [load("w2:0", what) for what in ("requests", "blocks", "prefill_tokens")] == [2, 10, 8]
    assert 0 < load("w2:0", "queue_seconds") <= 0.002
    assert [load("w1:0", what) for what in ("requests", "blocks", "prefill_tokens")] == [0, 0, 0]
    assert load("w1:0", "kv_active_blocks") == 20
    assert load("w1:0", "requests_waiting") == 3
    assert load("w1:0", "cache_usage") == 0.2
    assert scraped("load_avg") == pytest.approx(0.4)
    # Sample deviation of 0.2 and 0.6.
    assert scraped("load_std") == pytest.approx(0.08**0.5)
    assert 0 <= scraped("metrics_stream_lag_seconds") < 10


async def test_gpu_readings_are_shown_until_they_are_stale(client, two):
    readings = GpuReadings(memory_used_bytes=60_129_542_145, utilisation=0.0, power_w=312.345)
    await two.report("w1", ForwardPassMetrics(), DEFAULT_SPEED, readings)
    await two.report("w2", ForwardPassMetrics())
    while not (shown := gpu_samples(scraped := await scrape(client))):
        pass
    assert shown == {
        ("w1:0", "memory_used_bytes"): 60_129_542_145,
        ("w1:0", "utilisation"): 0.0,
        ("w1:0", "power_watts"): 312.345,
    }
    assert scraped("worker_stale", worker="w1:0") == 0
    while not scraped("worker_stale", worker="w1:0"):
        scraped = await scrape(client)
    assert gpu_samples(scraped) == {}


async def test_the_stream_lag_grows_while_nobody_reports(client, two):
    assert (await scrape(client))("metrics_stream_lag_seconds") == 0.0
    # The entry is dated 1970, so its age is the whole time since then.
    await two.redis.xadd("kvroute:1:{test}:metrics", {"worker": "w1:0"}, id="1-0")
    while (lag := (await scrape(client))("metrics_stream_lag_seconds")) == 0.0:
        pass
    assert lag > 1_600_000_000


async def test_the_stream_lag_grows_while_redis_is_unreachable(own_redis_server, replica):
    async with (
        connect(own_redis_server.url) as redis,
        replica(own_redis_server.url) as client,
    ):
        workers = FakeWorkers(redis)
        await workers.register("w1")
        await workers.report("w1", ForwardPassMetrics())

        async def lag():
            return (await scrape(client))("metrics_stream_lag_seconds")

        before = await eventually(lag)
        await asyncio.to_thread(own_redis_server.kill)
        await eventually(lag, lambda seconds: seconds > before + 0.5)


async def test_a_worker_that_has_left_is_no_longer_shown(client, two):
    assert "w1:0" in shown_workers(await scrape(client))
    await two.retire("w1")
    assert shown_workers(await scrape(client)) == {"w2:0"}


async def test_without_redis_degraded_decisions_are_counted_and_no_load_is_shown(
    own_redis_server, replica
):
    async with (
        connect(own_redis_server.url) as redis,
        replica(own_redis_server.url) as client,
    ):
        await FakeWorkers(redis).register("w1")
        await route(client)
        await asyncio.to_thread(own_redis_server.kill)
        for _ in range(2):
            assert (await route(client)).json()["degraded"]
        scraped = await scrape(client)
        assert scraped("degraded_decisions_total") == 2
        assert scraped("decisions_total", policy="latency", outcome="routed") == 3
        assert scraped("reservations_total", event="made") == 1
        assert scraped("hit_fraction_count") == 1
        assert shown_workers(scraped) == set()


def gpu_samples(scraped):
    prefix = "kvroute_worker_gpu_"
    return {
        (sample.labels["worker"], name.removeprefix(prefix)): sample.value
        for name, family in scraped.families.items()
        if name.startswith(prefix)
        for sample in family.samples
    }


def shown_workers(scraped):
    samples = scraped.families["kvroute_worker_requests"].samples
    return {sample.labels["worker"] for sample in samples}


async def test_other_requests_are_answered_between_any_two_metrics_of_a_scrape():
    """With a thousand workers, all metrics take 70 ms."""
    telemetry = Telemetry()
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    assert b"kvroute_worker_stale" in await text_of(telemetry, {})
    task.cancel()
    assert turns >= len(list(telemetry.registry.collect()))


async def test_what_clients_carry_themselves_counts_by_what_they_report(client, workers):
    await workers.register("w1", models=("m",))
    said = {"output_tokens=7&ttft_ms=300": "ok", "": "ok", "worker_failed=true": "worker_failed"}
    for query in said:
        path = f"/v1/requests/{(await route(client)).json()['reservation_id']}"
        for _ in range(2):  # the second ends nothing
            assert (await client.delete(f"{path}?{query}")).status_code == 200
    scraped = await scrape(client)
    ended = {
        outcome: scraped("door_requests_total", model="m", outcome=outcome, code="")
        for outcome in set(said.values())
    }
    assert ended == {"ok": 2, "worker_failed": 1}
    assert scraped("door_tokens_total", model="m", kind="output") == 7
    assert scraped("door_ttft_seconds_count", model="m") == 1
