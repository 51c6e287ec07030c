"""What the door counts of requests: by model, by worker, and by what their time was spent on."""

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from app.door.record import Stage
from app.http.metrics import Children, Counter, Family
from tests.door.conftest import completing, replica, until_serving
from tests.door.test_access_log import ASKED, PATH, complete, lines
from tests.edge.test_metrics import scrape
from tests.eventually import eventually


async def full(_):
    return web.json_response({"error": "full"}, status=503, headers={"retry-after": "1"})


async def timed(_):
    """A whole answer that says when its first token was there, as vLLM does."""
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    metrics = {"time_to_first_token_ms": 0.25, "queue_time_ms": 1}
    return web.json_response({"choices": [{"text": "x"}], "usage": usage, "metrics": metrics})


async def test_the_time_of_a_request_is_split_into_what_it_was_spent_on(one_redis_server, redis):
    async with completing(redis, "a", complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for streams in (True, False):
            answer = await door.post(PATH, json=ASKED | {"stream": streams})
            assert answer.status_code == 200
        found = await scrape(door)

    def spent(stage):
        labels = {"model": "m", "stage": stage}
        count = found("door_stage_seconds_count", **labels)
        return count, found("door_stage_seconds_sum", **labels)

    counts = {stage: spent(stage)[0] for stage in Stage}
    assert counts == {
        **dict.fromkeys((Stage.BODY, Stage.TOKENS, Stage.DECIDE), 2),
        **dict.fromkeys((Stage.FIRST_TOKEN, Stage.REST, Stage.WHOLE), 1),
        **dict.fromkeys((Stage.WAIT, Stage.FAILED), 0),
    }
    whole_s = found("door_request_seconds_sum", model="m")
    assert sum(spent(stage)[1] for stage in Stage) == pytest.approx(whole_s)


async def test_the_first_token_of_a_whole_answer_is_when_its_engine_says(
    one_redis_server, redis, capsys
):
    settings = {"access_log": True}
    async with completing(redis, "a", timed), replica(one_redis_server.url, **settings) as door:
        await until_serving(door, 1)
        lines(capsys)
        await door.post(PATH, json=ASKED)
        [line] = lines(capsys)
        found = await scrape(door)
    assert line["whole_s"] is None
    assert line["first_token_s"] == pytest.approx(0.00025, abs=1e-4)
    assert line["ttft_s"] == pytest.approx(line["duration_s"] - line["rest_s"], abs=2e-4)
    assert found("door_ttft_seconds_count", model="m") == 1
    assert found("door_time_per_output_token_seconds_count", model="m") == 1


async def test_workers_are_told_apart_by_how_requests_ended_there_until_they_leave(
    one_redis_server, redis
):
    async with (
        replica(one_redis_server.url) as door,
        completing(redis, "a", complete),
        completing(redis, "b", full) as other,
    ):
        await until_serving(door, 2)

        async def both_asked():
            await door.post(PATH, json=ASKED | {"stream": True})
            return await scrape(door)

        def is_full(found):
            return (
                found("door_worker_requests_total", worker="b:0", outcome="full", cause="load") > 0
            )

        found = await eventually(both_asked, is_full)
        answered = found("door_worker_requests_total", worker="a:0", outcome="ok", cause="")
        assert answered == found("door_requests_total", model="m", outcome="ok", code="200")
        first_tokens = found("door_worker_first_token_seconds_count", worker="a:0")
        assert first_tokens == answered
        assert found("door_worker_requests_total", worker="b:0", outcome="ok", cause="") == 0
        await other.retire()
        await until_serving(door, 1)
        left = await scrape(door)
    assert not is_full(left)
    assert left("door_worker_requests_total", worker="a:0", outcome="ok", cause="") == answered


def test_a_metric_has_so_many_children_and_one_for_all_others():
    registry = CollectorRegistry()
    metric = Counter(Family("seen", "counter", "help", ("who", "what")))
    registry.register(metric)
    children = Children(metric, most=2)
    for who in "abcda":
        children[who, "x"].inc()

    def seen(who, what):
        return registry.get_sample_value("seen_total", {"who": who, "what": what})

    assert [seen(who, "x") for who in "abcd"] == [2, 1, None, None]
    assert seen("other", "other") == 2
    children.keep(0, {"b", "other"})
    assert seen("a", "x") is None
    children["c", "x"].inc()
    assert (seen("other", "other"), seen("c", "x")) == (3, None)


async def test_the_cached_tokens_that_an_engine_reports_are_the_last_step_of_reuse(
    one_redis_server, redis
):
    async with completing(redis, "a", complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        await door.post(PATH, json=ASKED)
        found = await scrape(door)
    tokens = {
        step: found("reuse_tokens_total", model="m", step=step)
        for step in ("prompt", "seen", "used", "unforeseen")
    }
    assert tokens == {"prompt": 5, "seen": 0, "used": 0, "unforeseen": 4}
