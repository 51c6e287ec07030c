"""Workers that refuse, break off or say errors while others are well: clients notice nothing of it,
and the sick get no more than a few tries until they are well again."""

import asyncio
import gc
from contextlib import AsyncExitStack

import pytest

from app.core.errors import NoWorkers
from app.door.evidence import TRIES
from app.door.lifecycle import Lifecycle
from app.local.redis_server import free_port
from app.policy.policies import POLICIES
from tests.door.conftest import replica, until_serving
from tests.door.sick_fleet import (
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    STREAMED,
    TOKENIZE,
    asked,
    few_quick,
    leased,
    sick_fleet,
    statuses,
)
from tests.door.test_failures import nothing_reserved
from tests.eventually import eventually
from tests.fakes.faults import FOREIGN, Faults

ALL = 120
REFUSALS = {
    "401": (1, Faults(status=401)),
    "403": (1, Faults(status=403)),
    "404": (1, Faults(status=404)),
    "500 of two": (2, Faults(status=500)),
    "500 of three": (3, Faults(status=500)),
    "502": (1, Faults(status=502)),
    "503": (3, Faults(status=503)),
    "503 for a time": (3, Faults(status=503, headers={"retry-after": "2"})),
    "429": (3, Faults(status=429)),
    "resets": (1, Faults(how="reset first")),
    "empty": (2, Faults(how="empty")),
    "error": (2, Faults(how="error first")),
    "half": (2, Faults(how="unfinished")),
}
"""Of whole answers: how many fall ill with what."""


async def failed_tries(door, worker):
    """Requests that were taken from that worker, whatever the cause."""
    lines = (await door.get("/metrics")).text.splitlines()
    ends = f'outcome="failed",worker="{worker}"}}'
    told = [line.rpartition(" ") for line in lines if "door_worker_requests_total{" in line]
    return sum(float(value) for name, _, value in told if name.endswith(ends))


async def back_to_even(fleet, number, **more):
    """The fault has ended."""

    async def shares():
        return await fleet.shares(**more)

    await eventually(shares, lambda found: min(found[:number]) >= 0.5, within_s=60.0)


async def well_though_some_are_sick(fleet, number, faults):
    """Nothing fails, the sick are tried seldom, and are back soon after they are well."""
    fleet.fall_ill(faults, number)
    assert statuses(await fleet.ask_many(ALL)) == {200: ALL}
    fleet.assert_few_tries(at_once=24)
    fleet.recover()
    await back_to_even(fleet, number)


@pytest.mark.parametrize("name", few_quick(REFUSALS, "401", "500 of two"))
async def test_workers_that_refuse_at_once_cost_no_request_and_draw_none(
    one_redis_server, redis, name
):
    async with sick_fleet(redis, one_redis_server.url, 6) as fleet:
        await well_though_some_are_sick(fleet, *REFUSALS[name])
        await nothing_reserved(redis)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["401", "500 of two", "503 for a time"])
async def test_replicas_know_what_the_others_were_refused(one_redis_server, redis, name):
    async with sick_fleet(redis, one_redis_server.url, 6, replicas=3) as fleet:
        await well_though_some_are_sick(fleet, *REFUSALS[name])


@pytest.mark.parametrize("policy", few_quick(POLICIES, "round_robin"))
async def test_a_worker_that_refuses_at_once_looks_cheap_to_no_policy(
    one_redis_server, redis, policy
):
    async with sick_fleet(redis, one_redis_server.url, 3, policy=policy) as fleet:
        fleet.fall_ill(Faults(status=500))
        assert statuses(await fleet.ask_many(60, at_once=6)) == {200: 60}
        fleet.assert_few_tries(at_once=6)


@pytest.mark.parametrize(
    "how", few_quick(("error first", "error before tokens", "empty"), "error before tokens")
)
@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_that_fails_before_it_says_anything_is_another_workers(
    one_redis_server, redis, path, how
):
    async with sick_fleet(redis, one_redis_server.url, 3, path=path) as fleet:
        fleet.fall_ill(Faults(how=how))
        answers = await fleet.ask_many(30, at_once=6, stream=True)
        assert statuses(answers) == {200: 30}
        assert not any("died" in answer.text for answer in answers)
        fleet.assert_few_tries(at_once=6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("foreign", few_quick(FOREIGN, "a page", "half"))
async def test_what_is_no_answer_of_the_api_is_asked_of_another_worker(
    one_redis_server, redis, foreign, stream
):
    async with sick_fleet(redis, one_redis_server.url, 2) as fleet:
        fleet.fall_ill(FOREIGN[foreign])
        for path in STREAMED if stream else (*STREAMED, EMBEDDINGS):
            fleet.path = path
            while not fleet.came()[0] and sum(fleet.came()) < 30:
                answers = await fleet.ask_many(4, at_once=4, stream=stream)
                assert statuses(answers) == {200: 4}
                assert not any("Sign in" in answer.text for answer in answers)
        assert await failed_tries(fleet.doors[0], "e0:0") >= 1
        for engine in fleet.engines:
            engine.faults = FOREIGN[foreign]
        fleet.path = MESSAGES
        refused = await fleet.ask(stream=stream)
        assert refused.status_code == 502
        assert "Sign in" not in refused.text


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("how", few_quick(("error within", "unfinished", "reset within"), ""))
async def test_a_stream_that_fails_behind_its_first_token_counts_as_a_failure(
    one_redis_server, redis, path, how
):
    async with sick_fleet(redis, one_redis_server.url, 2, path=path) as fleet:
        fleet.fall_ill(Faults(how=how))
        [door] = fleet.doors
        while not fleet.came()[0]:
            answer = await fleet.ask(stream=True)
        assert answer.status_code == 200
        assert "died" in answer.text or "broke off" in answer.text or "ended before" in answer.text
        assert await failed_tries(door, "e0:0") == 1
        shown = (await door.get("/v1/workers")).json()
        [sick] = [w for w in (*shown["workers"], *shown["paused"]) if w["worker_id"] == "e0"]
        assert sick["failures"] == 1
        assert sick["cause"] in ("error_event", "cut", "broken")


async def test_a_request_that_no_worker_bears_is_held_against_none(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 6) as fleet:
        fleet.fall_ill(Faults(status=500, only="poison"), 6)
        poison, *well = await asyncio.gather(
            fleet.ask(user="poison"), *(fleet.ask(number) for number in range(20))
        )
        assert poison.status_code == 500
        assert statuses(well) == {200: 20}
        assert sum(fleet.came()) == 20 + TRIES
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert shown["paused"] == []
        assert [worker["failures"] for worker in shown["workers"]] == [0] * 6


async def test_where_all_are_sick_half_of_them_are_still_asked(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 4) as fleet:
        fleet.fall_ill(Faults(how="reset first"), 4)
        assert statuses(await fleet.ask_many(40, at_once=8)) == {502: 40}
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert len(shown["paused"]) <= 2
        assert min(fleet.came()) > 0
        await nothing_reserved(redis)


async def test_the_only_worker_is_asked_as_ever_though_it_fails_now_and_then(
    one_redis_server, redis
):
    async with sick_fleet(redis, one_redis_server.url, 1) as fleet:
        fleet.fall_ill(Faults(status=500, only="poison"))
        assert statuses([await fleet.ask(user="poison") for _ in range(3)]) == {500: 3}
        assert statuses(await fleet.ask_many(24)) == {200: 24}


async def test_the_only_worker_that_is_left_gets_a_second_try(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 2) as fleet:
        fleet.fall_ill(Faults(how="reset first"))
        assert statuses(await fleet.ask_many(12, at_once=4)) == {200: 12}
        for faults in (Faults(status=500, times=1), Faults(how="empty", times=1)):
            while True:
                had_by_other = fleet.came()[0]
                fleet.engines[1].faults = faults
                answer = await fleet.ask()
                if fleet.came()[0] == had_by_other:
                    break  # else the other one's pause had ended, and it was not the only one left
            assert answer.status_code == 200
        for status in (401, 429):  # which it would answer again
            before = fleet.came()[1]
            fleet.engines[1].faults = Faults(status=status, only="again")
            while fleet.came()[1] == before:  # it may be left alone for a moment
                assert (await fleet.ask(user="again")).status_code >= 400
                await asyncio.sleep(0.05)
            assert fleet.came()[1] == before + 1


@pytest.mark.parametrize(("times", "status"), [(1, 200), (2, 500)])
async def test_a_second_try_leaves_nothing_of_its_request_to_the_garbage_collector(
    one_redis_server, redis, times, status
):
    async with sick_fleet(redis, one_redis_server.url, 1) as fleet:
        fleet.engines[0].faults = Faults(status=500, times=times)
        gc.collect()
        gc.disable()
        try:
            assert (await fleet.ask()).status_code == status
            assert not [one for one in gc.get_objects() if isinstance(one, NoWorkers)]
        finally:
            gc.enable()
        assert fleet.came() == [2]


async def test_a_second_try_is_the_last_however_it_ends(one_redis_server, redis, monkeypatch):
    async with sick_fleet(redis, one_redis_server.url, 1) as fleet:
        fleet.engines[0].faults = Faults(status=500)
        asks_again = Lifecycle.asks_again

        def asks_another_engine_again(life, worker):
            fleet.engines[0].faults = Faults(how="reset first")
            asks_again(life, worker)

        monkeypatch.setattr(Lifecycle, "asks_again", asks_another_engine_again)
        assert (await fleet.ask()).status_code == 500
        assert fleet.came() == [2]


async def test_a_worker_that_breaks_off_takes_no_second_try_from_the_one_that_is_left(
    one_redis_server, redis
):
    async with sick_fleet(redis, one_redis_server.url, 2) as fleet:
        fleet.fall_ill(Faults(how="reset first"))
        fleet.engines[1].faults = Faults(status=500, times=1)
        assert (await fleet.ask()).status_code == 200  # whichever of the two is first
        assert fleet.came() == [1, 2]


async def test_engines_that_take_no_key_of_ours_are_no_matter_of_clients(one_redis_server, redis):
    for status in (401, 403, 404):
        async with sick_fleet(redis, one_redis_server.url, 2) as fleet:
            fleet.fall_ill(Faults(status=status), 2)
            answer = await fleet.ask()
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_failed")


@pytest.mark.parametrize(("status", "code"), [(400, 400), (413, 413), (422, 400), (501, 501)])
async def test_what_a_request_is_refused_for_is_told_to_its_client_at_once(
    one_redis_server, redis, status, code
):
    async with sick_fleet(redis, one_redis_server.url, 2) as fleet:
        fleet.fall_ill(Faults(status=status), 2)
        assert (await fleet.ask()).status_code == code
        assert sum(fleet.came()) == 1
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert [worker["cause"] for worker in shown["workers"]] == [None, None]


async def test_a_worker_that_lacks_an_adapter_is_left_alone_for_that_alone(one_redis_server, redis):
    about = {"adapters": ("poems",)}
    async with sick_fleet(redis, one_redis_server.url, 3, about=about) as fleet:
        fleet.fall_ill(Faults(status=404, only="poems"))
        answers = await fleet.ask_many(60, at_once=6, model="poems")
        assert statuses(answers) == {200: 60}
        fleet.assert_few_tries(at_once=6)
        assert min(await fleet.shares(60, at_once=6)) > 0.5
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert [worker["failures"] for worker in shown["workers"]] == [0, 0, 0]


async def test_a_path_that_one_engine_lacks_is_asked_of_others(one_redis_server, redis):
    lacks = Faults(status=404, body='{"detail":"Not Found"}')
    async with sick_fleet(redis, one_redis_server.url, 3, path=MESSAGES) as fleet:
        fleet.fall_ill(lacks)
        assert statuses(await fleet.ask_many(60, at_once=6)) == {200: 60}
        fleet.assert_few_tries(at_once=6)
        fleet.fall_ill(lacks, 3)
        answer = await fleet.ask()
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )


async def test_workers_that_are_not_reached_use_up_no_tries(one_redis_server, redis):
    async with AsyncExitStack() as stack:
        for number in range(8):
            address = f"http://127.0.0.1:{free_port()}"
            await stack.enter_async_context(leased(redis, f"gone{number}", address=address))
        await stack.enter_async_context(leased(redis, "well"))
        door = await stack.enter_async_context(replica(one_redis_server.url))
        await until_serving(door, 9)
        for _ in range(3):
            answer = await door.post(COMPLETIONS, json=asked(COMPLETIONS))
            assert answer.headers["x-kvroute-worker"] == "well:0"


@pytest.mark.parametrize(
    ("path", "faults"),
    [
        (EMBEDDINGS, Faults(status=500)),
        (EMBEDDINGS, Faults(how="empty")),
        (TOKENIZE, Faults(tokenize_status=500)),
        (TOKENIZE, Faults(tokenize_status=404)),
        (TOKENIZE, Faults(tokenize_status=0)),
    ],
)
async def test_what_is_no_chat_avoids_the_sick_too(one_redis_server, redis, path, faults):
    async with sick_fleet(redis, one_redis_server.url, 3, path=path) as fleet:
        fleet.fall_ill(faults)
        assert statuses(await fleet.ask_many(60, at_once=6)) == {200: 60}
        fleet.assert_few_tries(at_once=6)
        fleet.recover()
        await back_to_even(fleet, 1, at_once=6)


@pytest.mark.slow
async def test_replicas_know_which_paths_others_were_failed(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 3, replicas=3, path=TOKENIZE) as fleet:
        fleet.fall_ill(Faults(tokenize_status=500))
        assert statuses(await fleet.ask_many(6, at_once=1)) == {200: 6}
        assert 1 <= fleet.came()[0] <= 3


async def test_a_path_that_computes_nothing_says_nothing_of_others(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 2, path=TOKENIZE) as fleet:
        fleet.fall_ill(Faults(tokenize_status=500))
        for _ in range(2):
            assert statuses(await fleet.ask_many(20, at_once=2)) == {200: 20}
        assert fleet.came()[0] >= 1
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert (shown["paused"], [one["failures"] for one in shown["workers"]]) == ([], [0, 0])
        fleet.path = COMPLETIONS
        assert min(await fleet.shares(20, at_once=2)) >= 0.5


async def test_whole_answers_that_take_long_are_held_against_nobody(one_redis_server, redis):
    async with sick_fleet(redis, one_redis_server.url, 2, whole_timeout_s=0.5) as fleet:
        fleet.fall_ill(Faults(whole_s=2.0), 2)
        answers = [await fleet.ask() for _ in range(3)]
        assert max(statuses(answers)) in (502, 504)
        shown = (await fleet.doors[0].get("/v1/workers")).json()
        assert shown["paused"] == []
        assert [worker["failures"] for worker in shown["workers"]] == [0, 0]
