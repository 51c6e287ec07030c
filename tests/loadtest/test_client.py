"""One request against a cluster: its calls, its times, and how failures are handled."""

import asyncio

import pytest

from app.core.settings.router import RouterSettings
from loadtest.client import (
    ROUTE_TIMEOUT_S,
    ClusterClient,
    FailureKind,
    Request,
    RequestError,
    clock,
)
from tests.loadtest.conftest import BREAKS_AFTER_FIRST_TOKEN, SENDS_AN_ERROR, SILENT

ROUTE = "POST /v1/route"
COMPLETE = "POST /worker/v1/completions"
CONFIRM = "POST /v1/requests/r1/prefill_complete"
RELEASE = "DELETE /v1/requests/r1"
BLAME = f"{RELEASE}?worker_failed=true"
TOLD = f"{RELEASE}?output_tokens=340&ttft_ms"
PROMPT = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])


@pytest.fixture
async def client(cluster):
    async with ClusterClient(cluster.url, deadline_s=20, max_in_flight=8) as client:
        yield client


async def send(client, request_id="r1", arrival=None):
    return await client.send(
        request_id, lambda: PROMPT, output_tokens=340, policy="latency", arrival=arrival
    )


async def test_a_request_is_routed_completed_confirmed_and_released(cluster, client):
    cluster.cached_tokens = 2
    outcome = await send(client)
    assert cluster.calls == [ROUTE, COMPLETE, CONFIRM, TOLD]
    assert cluster.prompts == [PROMPT]
    assert (outcome.failure, outcome.attempts, outcome.worker) == (None, 1, "w1:0")
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (3, 2, 340)


async def test_an_answer_is_requested_in_about_five_chunks(cluster, client):
    await send(client)
    route, complete = cluster.queries
    assert route == {"request_id": "r1", "policy": "latency"}
    assert complete == {
        "request_id": "r1",
        "max_tokens": "340",
        "stream": "true",
        "stream_interval": "68",
    }


async def test_a_request_arrives_when_it_is_due_not_when_it_is_sent(client):
    due = clock() - 3
    outcome = await send(client, arrival=due)
    assert outcome.arrival_s == due
    assert outcome.first_token_s is not None
    assert outcome.end_s is not None
    assert outcome.decision_s is not None
    assert outcome.end_s >= outcome.first_token_s >= outcome.sent_s >= due + 3
    assert outcome.first_token_s - outcome.sent_s >= outcome.decision_s > 0


async def test_the_time_to_make_the_prompt_counts_as_the_clients_own_delay(client):
    made = []

    def make_prompt():
        made.append(clock())
        return PROMPT

    outcome = await client.send("r1", make_prompt, output_tokens=340)
    assert outcome.sent_s >= made[0]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_route_call_that_may_succeed_later_is_retried_under_the_same_id(
    cluster, client, status
):
    cluster.route_script.append(status)
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (None, 2)
    assert [query["request_id"] for query in cluster.queries] == ["r1"] * 3
    assert cluster.calls == [ROUTE, ROUTE, COMPLETE, CONFIRM, TOLD]


def test_a_request_may_wait_for_as_long_as_routers_let_it_by_default():
    assert RouterSettings().wait_timeout_s < ROUTE_TIMEOUT_S


async def test_a_refused_request_is_not_retried(cluster, client):
    cluster.route_script.append(422)
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (FailureKind.REFUSED, 1)
    assert outcome.error is not None
    assert "422" in outcome.error
    assert cluster.calls == [ROUTE]


@pytest.mark.parametrize(
    ("failure", "release"), [(429, RELEASE), (500, BLAME), (SENDS_AN_ERROR, BLAME)]
)
async def test_a_request_whose_worker_fails_is_released_and_routed_again(
    cluster, client, failure, release
):
    cluster.worker_script.append(failure)
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (None, 2)
    assert cluster.calls == [ROUTE, COMPLETE, release, ROUTE, COMPLETE, CONFIRM, TOLD]
    assert [query.get("exclude") for query in cluster.queries] == [None, None, "w1:0", None]


async def test_a_worker_that_failed_is_tried_again_if_there_is_no_other(cluster, client):
    cluster.worker_script.append(500)
    cluster.route_script.extend([200, 503])
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (None, 3)
    excluded = [query.get("exclude") for query in cluster.queries if "policy" in query]
    assert excluded == [None, "w1:0", None]


async def test_the_live_workers_are_listed_by_name(client):
    assert await client.workers() == ["w1:0", "w2:0"]


async def test_a_request_whose_answer_breaks_off_fails_and_is_released(cluster, client):
    cluster.worker_script.append(BREAKS_AFTER_FIRST_TOKEN)
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (FailureKind.BROKEN_STREAM, 1)
    assert outcome.first_token_s is None
    assert cluster.calls == [ROUTE, COMPLETE, CONFIRM, BLAME]


async def test_a_request_ends_at_its_deadline_and_is_released(cluster):
    cluster.worker_script.append(SILENT)
    async with ClusterClient(cluster.url, deadline_s=0.3) as client:
        outcome = await send(client)
    assert outcome.failure is FailureKind.DEADLINE
    assert outcome.error == "no answer within 0.3 s"
    assert cluster.calls == [ROUTE, COMPLETE, RELEASE]


async def test_answers_are_read_to_their_end_so_that_no_connection_is_cut_off(cluster, client):
    cluster.body_delay_s = 0.05
    assert (await send(client)).failure is None
    assert cluster.calls == [ROUTE, COMPLETE, CONFIRM, TOLD]
    assert cluster.num_late_bodies == 2


async def test_a_request_still_being_routed_at_its_deadline_is_released(cluster):
    cluster.route_script.append(SILENT)
    async with ClusterClient(cluster.url, deadline_s=0.3) as client:
        outcome = await send(client)
    assert outcome.failure is FailureKind.DEADLINE
    assert cluster.calls == [ROUTE, RELEASE]


async def test_a_missed_deadline_reports_the_last_error(cluster):
    cluster.route_script.extend([503] * 100)
    async with ClusterClient(cluster.url, deadline_s=0.3) as client:
        outcome = await send(client)
    assert outcome.failure is FailureKind.DEADLINE
    assert outcome.error is not None
    assert outcome.error.startswith("no answer within 0.3 s, last error: ")
    assert "503" in outcome.error


async def test_a_malformed_router_answer_counts_as_a_refusal(cluster, client):
    cluster.speaks_nonsense = True
    outcome = await send(client)
    assert (outcome.failure, outcome.attempts) == (FailureKind.REFUSED, 1)
    with pytest.raises(RequestError, match="not a router's answer"):
        await client.workers()


async def test_an_unreachable_cluster_is_a_failure_not_an_exception(unused_tcp_port):
    async with ClusterClient(f"http://127.0.0.1:{unused_tcp_port}", deadline_s=0.3) as client:
        outcome = await send(client)
    assert outcome.failure is FailureKind.DEADLINE
    assert outcome.error is not None
    assert "Cannot connect" in outcome.error


@pytest.mark.parametrize(
    ("error", "wait"),
    [
        (RequestError(FailureKind.FULL, "", retry_after_s=7.0), 7.0),
        (RequestError(FailureKind.UNAVAILABLE, ""), True),
        (RequestError(FailureKind.WORKER, ""), True),
        (RequestError(FailureKind.REFUSED, ""), False),
        (RequestError(FailureKind.BROKEN_STREAM, ""), False),
        (KeyError("a bug"), False),
    ],
)
def test_a_retry_waits_as_long_as_the_router_says_or_backs_off(error, wait):
    decided = Request("r", 1, None, 0.0, 0.0).wait_before_retry(error)
    assert (type(decided), decided) == (type(wait), wait)


async def test_requests_beyond_the_limit_wait_and_are_counted(cluster):
    cluster.hold.clear()
    async with ClusterClient(cluster.url, deadline_s=20, max_in_flight=1) as client:
        first, second = (asyncio.ensure_future(send(client, name)) for name in ("r1", "r2"))
        await cluster.completing.wait()
        assert client.num_held_back == 1
        assert cluster.calls.count(ROUTE) == 1
        cluster.hold.set()
        outcomes = await asyncio.gather(first, second)
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert outcomes[1].sent_s >= (outcomes[0].end_s or 0)


async def test_lost_confirmations_and_releases_are_counted_and_do_not_fail_the_request(
    cluster, client
):
    cluster.refuses_calls = True
    outcome = await send(client)
    assert outcome.failure is None
    assert client.num_lost_calls == 2
