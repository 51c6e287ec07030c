from urllib.parse import quote

import pytest

from app.core.errors import shown
from app.core.settings.router import RouterSettings
from app.edge.app import create_app
from app.http.protocol import ON_GONE
from tests.endings import all_endings
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture
async def one(client, workers):
    """w1, on which the 10 tokens (3 blocks) of r1 are reserved."""
    await workers.register("w1")
    await route(client, "r1")
    return workers


async def route(client, request_id):
    body = {"token_ids": PROMPT, "request_id": request_id}
    assert (await client.post("/v1/route", json=body)).json()["reserved"]


async def test_prefill_complete_releases_the_prefill_but_not_the_blocks(client, one):
    before = await one.load("w1")
    assert (before.prefill_tokens, before.blocks) == (10, 3)
    assert (before.requests, before.decoding) == (1, 0)
    assert before.prefill_us > 0
    response = await client.post("/v1/requests/r1/prefill_complete")
    assert (response.status_code, response.json()) == (200, {"request_id": "r1", "found": True})
    after = await one.load("w1")
    assert (after.prefill_tokens, after.prefill_us, after.blocks) == (0, 0, 3)
    assert (after.requests, after.decoding) == (1, 1)


async def test_release_frees_everything(client, one, redis):
    response = await client.delete("/v1/requests/r1")
    assert (response.status_code, response.json()) == (200, {"request_id": "r1", "found": True})
    load = await one.load("w1")
    assert (load.prefill_tokens, load.blocks, load.requests, load.decoding) == (0, 0, 0, 0)
    assert await one.reserved() == {}
    assert await redis.zcard(KEYS["expiry"]) == 0


async def test_a_worker_that_failed_a_request_is_left_alone_by_its_caller(client, one, redis):
    await one.register("w2")
    await redis.script_flush()
    await client.delete("/v1/requests/other")  # now Redis has one of the scripts, but not all
    response = await client.delete("/v1/requests/r1?worker_failed=true")
    assert (response.status_code, response.json()) == (200, {"request_id": "r1", "found": True})
    assert await one.reserved() == {}
    listed = (await client.get("/v1/workers")).json()["workers"]
    assert [worker["witnesses"] for worker in listed] == [["127.0.0.1"], []]
    for _ in range(4):
        routed = (await client.post("/v1/route", json={"token_ids": [1] * 8})).json()
        assert routed["worker_id"] == "w2"
    assert "kvroute_worker_suspensions_total 0.0" in (await client.get("/metrics")).text
    again = await client.delete("/v1/requests/r1?worker_failed=true")
    assert again.json()["found"] is False


@pytest.mark.parametrize(
    ("query", "field", "shown"),
    [("worker_failed=maybe", "worker_failed", "maybe"), ("workerfailed=true", "workerfailed", "")],
    ids=["neither yes nor no", "misspelt"],
)
async def test_a_release_with_a_bad_query_releases_nothing(client, one, query, field, shown):
    response = await client.delete(f"/v1/requests/r1?{query}")
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert shown in error["message"]
    assert (await one.load("w1")).requests == 1


async def test_prefill_complete_and_release_may_be_repeated(client, one):
    await route(client, "r2")
    for _ in range(2):
        answer = await client.post("/v1/requests/r1/prefill_complete")
        assert answer.json()["found"]
    load = await one.load("w1")
    assert (load.prefill_tokens, load.requests, load.decoding) == (10, 2, 1)
    assert [(await client.delete("/v1/requests/r1")).json()["found"] for _ in range(2)] == [
        True,
        False,
    ]
    load = await one.load("w1")
    assert (load.prefill_tokens, load.blocks, load.requests, load.decoding) == (10, 3, 1, 0)


async def test_an_unknown_request_is_reported_as_not_found_but_is_no_error(client, one):
    for response in (
        await client.post("/v1/requests/r9/prefill_complete"),
        await client.delete("/v1/requests/r9"),
    ):
        assert (response.status_code, response.json()) == (
            200,
            {"request_id": "r9", "found": False},
        )
    assert (await one.load("w1")).requests == 1


@pytest.mark.parametrize(
    ("in_path", "request_id"),
    [("", ""), ("a%20b", "a b"), ("a%0A", "a\n"), ("a%0Ab", "a\nb"), ("x" * 129, "x" * 129)],
)
async def test_an_id_that_no_request_can_have_is_refused(client, one, in_path, request_id):
    for response in (
        await client.post(f"/v1/requests/{in_path}/prefill_complete"),
        await client.delete(f"/v1/requests/{in_path}"),
    ):
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["code"], error["field"]) == ("invalid_request", "request_id")
        assert error["message"].endswith(f"got {shown(request_id)}")


async def test_prefill_complete_after_the_release_finds_nothing(client, one):
    await client.delete("/v1/requests/r1")
    answer = await client.post("/v1/requests/r1/prefill_complete")
    assert answer.json()["found"] is False
    assert (await one.load("w1")).decoding == 0


async def test_any_replica_accepts_prefill_complete_and_release(
    client, one_redis_server, replica, one
):
    async with replica(one_redis_server.url) as second:
        assert (await second.post("/v1/requests/r1/prefill_complete")).json()["found"]
        assert (await second.delete("/v1/requests/r1")).json()["found"]
    assert await one.reserved() == {}


@pytest.mark.parametrize("request_id", ["chat/7", "a?b#c", "50%", "a:b|c", "prefill_complete"])
async def test_every_request_id_that_can_be_routed_can_be_released(client, one, request_id):
    await route(client, request_id)
    path = f"/v1/requests/{quote(request_id, safe='')}"
    answer = await client.post(f"{path}/prefill_complete")
    assert answer.json() == {"request_id": request_id, "found": True}
    answer = await client.delete(path)
    assert answer.json() == {"request_id": request_id, "found": True}
    assert set(await one.reserved()) == {"r1"}


async def test_without_redis_the_caller_is_told_to_retry(own_redis_server, replica):
    own_redis_server.kill()
    async with replica(own_redis_server.url) as client:
        for response in (
            await client.post("/v1/requests/r1/prefill_complete"),
            await client.delete("/v1/requests/r1"),
        ):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "redis_unavailable"


class TestHangingUp:
    """The application receives `events`, then http.disconnect, and learns that the caller is gone
    as servers tell it."""

    @pytest.fixture
    async def app(self, one_redis_server, workers):
        await workers.register("w1")
        settings = RouterSettings(
            redis_url=one_redis_server.url, namespace=NAMESPACE, redis_timeout_ms=5000
        )
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            yield app

    async def ask(self, app, *events, watch=lambda _: None):
        """The messages that the application sends in answer."""
        left = iter(events)
        sent = []

        async def receive():
            return next(left, {"type": "http.disconnect"})

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/route",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            ON_GONE: watch,
        }
        await app(scope, receive, send)
        return sent

    async def test_the_reservation_of_a_caller_that_hung_up_is_released(self, app, workers):
        watched = []
        app.replica.router._decider._note_decision = lambda *_: watched[0]()
        asked = {"type": "http.request", "body": b'{"token_ids": [1, 2, 3]}'}
        assert await self.ask(app, asked, watch=watched.append) == []
        assert (await workers.load("w1")).total == 1
        await eventually(workers.reserved, lambda reserved: reserved == {})

    async def test_nothing_is_reserved_for_a_caller_that_hung_up_before_its_decision(
        self, app, workers
    ):
        def gone(callback):
            if callback is not None:
                callback()

        asked = {"type": "http.request", "body": b'{"token_ids": [1, 2, 3]}'}
        assert await self.ask(app, asked, watch=gone) == []
        assert (await workers.load("w1")).total == 0

    async def test_a_caller_that_hangs_up_in_mid_body_gets_no_answer(self, app, workers):
        begin = {"type": "http.request", "body": b'{"token_ids": [1,', "more_body": True}
        assert await self.ask(app, begin) == []
        assert (await workers.load("w1")).total == 0


async def test_what_came_of_a_request_is_recorded_if_its_release_says_so(client, one, redis):
    await route(client, "r2")
    await route(client, "r3")
    for path in (
        "r1?output_tokens=7&ttft_ms=120",
        "r2?output_tokens=3",
        "r3",
        "r4?output_tokens=1",
    ):
        assert (await client.delete(f"/v1/requests/{path}")).status_code == 200

    async def recorded():
        found = await all_endings(redis, KEYS)
        assert all(ending.ended_ms for ending in found.values())
        return {name: (ending.output_tokens, ending.ttft_ms) for name, ending in found.items()}

    await eventually(recorded, lambda found: found == {"r1": (7, 120), "r2": (3, None)})


@pytest.mark.parametrize(
    "query",
    [
        "output_tokens=-1",
        "ttft_ms=x",
        "ttft_ms=1000000000000",
        "output_tokens=1e30",
        "output_tokens=500000",  # more than the worker holds
    ],
)
async def test_what_cannot_have_come_of_a_request_is_refused(client, one, query):
    answer = await client.delete(f"/v1/requests/r1?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == query.partition("=")[0]
    assert len(await one.reserved()) == 1
