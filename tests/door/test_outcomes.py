"""How requests end is told apart, in metrics, the access log and the last errors."""

import asyncio
import json

import httpx
import pytest
from click.testing import CliRunner

from app.core.keys import DATA_VERSION
from app.core.outcomes import KINDS, Kind, kind_of, of_refusal, told_apart
from app.ops.inspect import inspect
from app.state import last_errors
from app.state.last_errors import Error
from app.state.scripts import ScriptRunner
from tests.door.conftest import replica, sick_worker, until_serving
from tests.door.test_access_log import lines
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.fakes.faults import HANG_S, Faults

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
OOM = "CUDA out of memory"
SAYS_OOM = json.dumps({"error": {"message": OOM, "code": 500}})


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        ("ok", Kind.OK),
        ("engine_error", Kind.ENGINE),
        ("engine_full", Kind.ENGINE),
        ("worker_failed", Kind.ENGINE),
        ("answer_timeout", Kind.ENGINE),
        ("error_event", Kind.ENGINE),
        ("cut", Kind.CUT),
        ("left_before_token", Kind.LEFT_BEFORE),
        ("left_after_token", Kind.LEFT_AFTER),
        ("refused", Kind.UNFIT),
        ("invalid_api_key", Kind.REFUSED),
        ("whatever_comes_next", Kind.REFUSED),
    ],
)
def test_each_outcome_is_of_a_kind(outcome, kind):
    assert kind_of(outcome) is kind
    assert kind in KINDS


def test_an_ending_is_told_apart_by_how_far_the_answer_was():
    assert told_apart("client_gone", has_begun=True, has_token=False) == "left_before_token"
    assert told_apart("client_gone", has_begun=True, has_token=True) == "left_after_token"
    assert told_apart("worker_failed", has_begun=True, has_token=True) == "cut"
    assert told_apart("worker_failed", has_begun=False, has_token=False) == "worker_failed"
    assert told_apart("stopping", has_begun=True, has_token=True) == "stopping"
    assert of_refusal(429, is_failure=True, is_full=True) == "engine_full"
    assert of_refusal(404, is_failure=True, is_full=False) == "engine_error"
    assert of_refusal(501, is_failure=False, is_full=False) == "engine_error"
    assert of_refusal(400, is_failure=False, is_full=False) == "refused"


@pytest.mark.parametrize(
    ("faults", "streams", "ending"),
    [
        (Faults(status=500, body=SAYS_OOM), False, ("engine_error", 500, OOM, "status_500")),
        (Faults(status=500, body=SAYS_OOM), True, ("engine_error", 500, OOM, "status_500")),
        (
            Faults(how="error first", error_event=f"data: {SAYS_OOM}\n\n"),
            True,
            ("error_event", 200, OOM, "error_event"),
        ),
        (
            Faults(how="error within", error_event=f"data: {SAYS_OOM}\n\n"),
            True,
            ("error_event", 200, OOM, "error_event"),
        ),
        (Faults(how="reset within"), True, ("cut", 200, "", "broken")),
        (Faults(how="unfinished"), True, ("cut", 200, "", "cut")),
        (Faults(how="reset first"), True, ("worker_failed", 502, "", "no_answer")),
        (
            Faults(status=429, headers={"retry-after": "3"}, body=SAYS_OOM),
            False,
            ("engine_full", 429, OOM, "load"),
        ),
        (
            Faults(status=400, body=json.dumps({"error": {"message": "no such thing"}})),
            False,
            ("refused", 400, "no such thing", "status_400"),
        ),
    ],
)
async def test_what_a_request_fails_of_is_told_everywhere(
    one_redis_server, redis, capsys, faults, streams, ending
):
    outcome, status, words, cause = ending
    settings = {"access_log": True, "migrate": False}
    async with (
        sick_worker(redis, "e") as engine,
        replica(one_redis_server.url, **settings) as door,
    ):
        await until_serving(door, 1)
        engine.faults = faults
        await door.post(PATH, json=BODY | {"stream": streams})

        async def logged():
            return lines(capsys)

        line = (await eventually(logged))[-1]
        assert (line["outcome"], line["status"]) == (outcome, status)
        assert words in line["error"]
        found = await scrape(door)
        labels = {"model": "m", "outcome": outcome, "code": str(status)}
        assert found("door_requests_total", **labels) == 1
        _, [told] = await eventually(lambda: last_errors.read(redis, KEYS), lambda read: read[1])
        assert (told.error.worker, told.error.cause) == ("e:0", cause)
        assert told.requests in (1, 2)  # the only worker is asked a second time
        assert words in told.error.words


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        (Faults(how="hang"), "left_before_token"),
        (Faults(prefill_s=HANG_S), "left_before_token"),
        (Faults(token_s=HANG_S), "left_after_token"),
    ],
)
async def test_clients_that_leave_before_a_token_are_told_from_those_that_leave_later(
    one_redis_server, redis, faults, outcome
):
    async with sick_worker(redis, "e") as engine, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        engine.faults = faults
        with pytest.raises(httpx.ReadTimeout):
            await door.post(PATH, json=BODY | {"stream": True}, timeout=3.0)

        def is_counted(found):
            by_worker = found("door_worker_requests_total", worker="e:0", outcome=outcome, cause="")
            return by_worker == 1

        await eventually(lambda: scrape(door), is_counted)


async def test_errors_are_told_seldom_and_added_up(one_redis_server, redis):
    async with sick_worker(redis, "e") as engine, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        engine.faults = Faults(status=500, body=SAYS_OOM)
        for _ in range(5):
            assert (await door.post(PATH, json=BODY)).status_code in (500, 503)
        assert await eventually(lambda: redis.xlen(KEYS["errors"]), bool) <= 2


async def test_errors_are_shown_together(one_redis_server, redis):
    oom = Error("m", "e:0", "status_500", OOM, "r1")
    unknown = Error("", "", "model_not_found", "The model 'x' does not exist.", "r3")
    runner = ScriptRunner(redis, 5.0)
    await redis.hset(KEYS["meta"], mapping={"version": DATA_VERSION, "block_size": 4, "shards": 1})
    for error, requests in (
        (oom, 3),
        (unknown, 1),
        (oom._replace(request_id="r2"), 4),
        (unknown._replace(words="The model 'y' does not exist."), 1),
    ):
        await runner.one(last_errors.record(KEYS, error, requests))
    _, found = await last_errors.read(redis, KEYS)
    assert [(one.requests, one.error.request_id) for one in found] == [(2, "r3"), (7, "r2")]
    arguments = ["errors", "--redis-url", one_redis_server.url, "--namespace", KEYS.namespace]
    shown = await asyncio.to_thread(CliRunner().invoke, inspect, arguments)
    assert OOM in shown.output, shown.output
    as_json = await asyncio.to_thread(CliRunner().invoke, inspect, [*arguments, "--json"])
    assert [one["requests"] for one in json.loads(as_json.output)] == [2, 7]


async def test_an_answer_at_a_second_try_counts_as_the_workers(one_redis_server, redis):
    async with sick_worker(redis, "e") as engine, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        engine.faults = Faults(status=500, body=SAYS_OOM, times=1)
        assert (await door.post(PATH, json=BODY)).status_code == 200
        found = await scrape(door)
    at = "door_worker_requests_total"
    assert found(at, worker="e:0", outcome="failed", cause="status_500") == 1
    assert found(at, worker="e:0", outcome="ok", cause="") >= 1
