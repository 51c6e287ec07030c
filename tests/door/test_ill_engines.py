"""A worker whose agent takes its engine to be ill: requests go on elsewhere, on all paths."""

from app.state.scripts import ScriptRunner
from tests.door.conftest import replica, sick_worker, until_serving
from tests.door.sick_fleet import EMBEDDINGS, STREAMED, TOKENIZE, asked
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running

WHY = "has requests, and computes nothing of them"


async def paused(door):
    return (await door.get("/v1/workers")).json()["paused"]


async def test_an_ill_worker_is_left_alone_and_its_model_is_answered(one_redis_server, redis):
    ill = fake_agent(ScriptRunner(redis, 5.0), KEYS, "ill", models=("m",))
    async with (
        running(ill),
        sick_worker(redis, "well"),
        sick_worker(redis, "another"),
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 3)
        ill.ill = WHY
        [one] = await eventually(lambda: paused(door))
        assert (one["worker_id"], one["state"], one["cause"]) == ("ill", "ill", WHY)
        for path in (*STREAMED, EMBEDDINGS, TOKENIZE):
            answer = await door.post(path, json=asked(path))
            assert answer.status_code == 200, (path, answer.text)
        [card] = (await door.get("/v1/models")).json()["data"]
        assert card["id"] == "m"
        assert (await door.get("/readiness")).json()["ready"]
        for question in ("overview", "workers"):
            assert (await door.get(f"/console/api/{question}")).status_code == 200
        ill.ill = ""
        await eventually(lambda: paused(door), lambda found: found == [])
