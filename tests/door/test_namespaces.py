"""One replica and the models of several namespaces."""

import asyncio

from app.core.keys import MODELS
from app.state.models import directory
from tests.door.conftest import MODEL, models, replica, until_serving, worker_here
from tests.door.test_answers import chat
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE
from tests.ops.conftest import kvroute


async def test_metrics_are_those_of_all_namespaces_that_the_door_serves(one_redis_server):
    url = one_redis_server.url
    async with (
        worker_here(url, "a"),
        worker_here(url, "b", namespace="other", model_name="other-model"),
        replica(url) as door,
    ):
        await until_serving(door, 1)
        await eventually(lambda: models(door), lambda found: len(found) == 2, within_s=30.0)
        for model, count in (("sim-model", 1), ("other-model", 2)):
            for _ in range(count):
                answer = await door.post("/v1/chat/completions", json=chat("x", model=model))
                assert answer.status_code == 200, answer.text
        found = await scrape(door)
    decided = {"policy": "latency", "outcome": "routed"}
    assert found("decisions_total", **decided) == 1
    assert found("decisions_total", **decided, namespace="other") == 2
    workers = {
        (sample.labels["worker"], sample.labels.get("namespace"))
        for sample in found.families["kvroute_worker_requests"].samples
    }
    assert workers == {("a:0", None), ("b:0", "other")}
    assert found("door_requests_total", model="other-model", outcome="ok", code="200") == 2


async def test_a_namespace_that_has_lost_its_workers_is_shown_with_none(one_redis_server):
    url = one_redis_server.url

    async def live():
        family = (await scrape(door)).families["kvroute_workers"]
        return {sample.labels.get("namespace"): sample.value for sample in family.samples}

    async with worker_here(url, "a"), replica(url) as door:
        async with worker_here(url, "b", namespace="other", model_name="other-model"):
            await eventually(live, lambda seen: seen == {None: 1, "other": 1}, within_s=30.0)
        await eventually(live, lambda seen: seen == {None: 1, "other": 0}, within_s=30.0)


async def test_a_replica_is_ready_while_any_of_its_namespaces_has_a_worker(one_redis_server):
    url = one_redis_server.url

    async def readiness():
        answer = await door.get("/readiness")
        said = answer.json()
        assert answer.status_code == (200 if said["ready"] else 503)
        return said["ready"], said["missing"]

    def ready_but(*missing):
        return True, [f"workers: none is alive in namespace {name}" for name in missing]

    async with replica(url) as door:
        assert await readiness() == (False, ["workers: none is alive"])
        async with worker_here(url, "b", namespace="other", model_name="other-model"):
            await eventually(readiness, lambda said: said == ready_but())
            async with worker_here(url, "a"):
                await eventually(lambda: models(door), lambda found: len(found) == 2)
                assert await readiness() == ready_but()
            await eventually(readiness, lambda said: said == ready_but(NAMESPACE))
        await eventually(readiness, lambda said: not said[0])


async def test_a_name_that_two_namespaces_announce_is_the_first_ones_at_every_replica(
    one_redis_server, redis
):
    url = one_redis_server.url
    async with worker_here(url, "first", namespace="other"):
        await eventually(lambda: directory(redis), lambda claims: claims == {MODEL: ("other",)})
        async with worker_here(url, "second"):
            async with replica(url) as door:
                await until_serving(door, 1)
                answer = await door.post("/v1/chat/completions", json=chat("x"))
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-kvroute-worker"] == "first:0"
            assert await directory(redis) == {MODEL: ("other", NAMESPACE)}
            for command in ("inspect verify", "doctor"):
                shown = await asyncio.to_thread(kvroute, url, *command.split())
                assert f"{MODEL} is namespace other's (second:0)" in shown.output


async def test_names_of_namespaces_without_workers_cost_a_replica_nothing(one_redis_server, redis):
    url = one_redis_server.url
    await redis.hset(MODELS, mapping={f"model-{n}": f"ns-{n} 9999999999" for n in range(3000)})
    async with (
        worker_here(url, "a"),
        worker_here(url, "b", namespace="other", model_name="other-model"),
        replica(url) as door,
    ):
        await eventually(lambda: models(door), lambda found: len(found) == 2, within_s=30.0)
        shown = (await door.get("/metrics")).text
        assert 'namespace="other"' in shown
        assert 'namespace="ns-' not in shown
        assert len(await redis.client_list()) < 60


async def test_a_replica_that_is_ready_lists_its_models(one_redis_server):
    url = one_redis_server.url
    async with worker_here(url, "a"):
        async with replica(url) as first:
            await until_serving(first, 1)
        async with replica(url) as door:

            async def readiness():
                return (await door.get("/readiness")).status_code

            await eventually(readiness, lambda status: status == 200)
            assert await models(door) == [MODEL]
