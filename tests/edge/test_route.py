import asyncio
import re
import struct
import time
from contextlib import asynccontextmanager

import pytest

from app.core.types import Tier
from app.core.worker_report import ForwardPassMetrics
from app.state.connect import connect
from tests.fake_worker import KEYS, FakeWorkers

# Ten tokens: two full blocks of four, and a partial third.
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
OTHER = [11, 12, 13, 14, 15, 16, 17, 18]
LOCAL = [14643705804678351452, 16777012769546811212]
"""The local hashes of the full blocks of PROMPT."""

RAW = {"content-type": "application/octet-stream"}


async def routed(client, **body):
    response = await client.post("/v1/route", json={"token_ids": PROMPT} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
async def two(workers):
    """w1 holds PROMPT, w2 holds OTHER."""
    await workers.register("w1")
    await workers.register("w2")
    await workers.publish("w1", PROMPT)
    await workers.publish("w2", OTHER)
    return workers


async def test_a_prompt_goes_to_the_worker_that_holds_its_prefix(client, two):
    answer = await routed(client, request_id="r1")
    assert re.fullmatch("r1~[0-9a-f]{16}", answer.pop("reservation_id"))
    assert answer == {
        "request_id": "r1",
        "worker_id": "w1",
        "dp_rank": 0,
        "address": "http://w1-0:80",
        "overlap_blocks": {"device": 2, "host": 0, "disk": 0},
        "isl_tokens": 10,
        "isl_blocks": 3,
        "policy": "latency",
        "degraded": False,
        "trust": "exact",
        "reserved": True,
    }
    assert (await routed(client, token_ids=OTHER))["worker_id"] == "w2"


async def test_overlap_is_reported_by_the_tier_it_would_be_read_from(client, workers):
    await workers.register("w1")
    await workers.publish("w1", PROMPT, Tier.HOST)
    await workers.publish("w1", PROMPT[:4], Tier.DEVICE)
    assert (await routed(client))["overlap_blocks"] == {"device": 1, "host": 1, "disk": 0}


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": PROMPT},
        {"local_hashes": LOCAL, "num_tokens": 10},
        {"local_hashes": [LOCAL[0] - 2**64, LOCAL[1] - 2**64], "num_tokens": 10},
        {"local_hashes": ["cb38e4d7fb2dca5c", "E8D3EC39B907B74C"], "num_tokens": 10},
        {"local_hashes": [LOCAL[0], "e8d3ec39b907b74c"], "num_tokens": 10},
    ],
    ids=["tokens", "unsigned", "signed", "hex", "mixed"],
)
async def test_tokens_and_hashes_of_any_form_route_alike(client, two, prompt):
    answer = (await client.post("/v1/route", json=prompt)).json()
    assert answer["worker_id"] == "w1"
    assert answer["overlap_blocks"]["device"] == 2
    assert (answer["isl_tokens"], answer["isl_blocks"]) == (10, 3)


async def test_raw_tokens_route_like_a_list_and_take_options_from_the_query(client, workers):
    for name in ("w1", "w2", "w3"):
        await workers.register(name)
    await workers.publish("w1", PROMPT, lora_name="sql")
    await workers.publish("w2", PROMPT)
    raw = struct.pack("<10I", *PROMPT)
    plain = (await client.post("/v1/route", content=raw, headers=RAW)).json()
    assert (plain["worker_id"], plain["overlap_blocks"]["device"]) == ("w2", 2)
    query = (
        "request_id=r1&lora_name=sql&policy=logit&reserve=false&explain=true&exclude=w2&exclude=w3"
    )
    answer = (await client.post(f"/v1/route?{query}", content=raw, headers=RAW)).json()
    assert (answer["worker_id"], answer["overlap_blocks"]["device"]) == ("w1", 2)
    assert (answer["request_id"], answer["policy"], answer["reserved"]) == ("r1", "logit", False)
    assert {c["worker_id"]: c["eligible"] for c in answer["candidates"]} == {
        "w1": True,
        "w2": False,
        "w3": False,
    }
    assert "r1" not in await workers.reserved()


async def test_the_raw_content_type_is_recognised_in_any_case_and_with_parameters(client, two):
    raw = struct.pack("<8I", *OTHER)
    headers = {"content-type": "Application/Octet-Stream; v=1"}
    response = await client.post("/v1/route", content=raw, headers=headers)
    assert (response.status_code, response.json()["worker_id"]) == (200, "w2")


@pytest.mark.parametrize("options", [{"lora_name": "sql"}, {"cache_namespace": "tenant-7"}])
async def test_a_lora_or_cache_namespace_shares_no_blocks_with_the_plain_prompt(
    client, two, options
):
    assert (await routed(client, **options))["overlap_blocks"]["device"] == 0
    empty = dict.fromkeys(options, "")
    assert (await routed(client, **empty))["overlap_blocks"]["device"] == 2


async def test_a_lora_finds_the_blocks_computed_with_it(client, two):
    await two.publish("w2", PROMPT, lora_name="sql")
    assert (await routed(client, lora_name="sql"))["worker_id"] == "w2"


async def test_a_prompt_with_another_image_shares_no_blocks_from_the_image_on(client, two):
    image, other = "00000000000000ff", 2**63 + 1
    await two.publish("w2", PROMPT, mm_hashes=[[], [0xFF]])
    found = await routed(client, mm_hashes=[[], [image]])
    assert (found["worker_id"], found["overlap_blocks"]["device"]) == ("w2", 2)
    found = await routed(client, mm_hashes=[[], [other]], exclude=["w1"])
    assert found["overlap_blocks"]["device"] == 1


async def test_a_prompt_shorter_than_a_block_is_routed_without_overlap(client, two):
    answer = await routed(client, token_ids=[1, 2, 3])
    assert answer["overlap_blocks"] == {"device": 0, "host": 0, "disk": 0}
    assert (answer["isl_tokens"], answer["isl_blocks"]) == (3, 1)


@pytest.mark.parametrize(
    ("exclude", "chosen"),
    [([], "w1:0"), (["w1:0", "w2"], "w1:1"), (["w1"], "w2:0"), (["w2:0", "w1:0", "w9"], "w1:1")],
)
async def test_workers_are_excluded_by_id_or_by_key(client, workers, exclude, chosen):
    for name, held in (("w1:0", PROMPT), ("w1:1", PROMPT[:4]), ("w2:0", OTHER)):
        await workers.register(name)
        await workers.publish(name, held)
    answer = await routed(client, exclude=exclude)
    assert f"{answer['worker_id']}:{answer['dp_rank']}" == chosen


async def test_without_reserve_nothing_is_left_in_redis(client, two, redis):
    answer = await routed(client, request_id="r1", reserve=False)
    assert (answer["worker_id"], answer["reserved"]) == ("w1", False)
    assert await two.reserved() == {}
    assert await redis.zcard(KEYS["expiry"]) == 0
    assert (await two.load("w1")).total == 0


async def test_a_reservation_counts_in_the_next_decision_of_every_replica(
    client, one_redis_server, replica, two
):
    async with replica(one_redis_server.url) as second:
        assert (await routed(client, request_id="r1"))["worker_id"] == "w1"
        assert await two.reserved() == {"r1": "w1:0"}
        seen = (await second.get("/v1/workers")).json()["workers"][0]
        assert (seen["worker_id"], seen["active_requests"], seen["active_blocks"]) == ("w1", 1, 3)
        # Ten tokens, eight of them cached.
        assert seen["prefill_tokens"] == 2
        assert (await routed(second, policy="least_loaded"))["worker_id"] == "w2"
        assert (await routed(client, policy="least_loaded", reserve=False, explain=True))[
            "candidates"
        ][1]["active_requests"] == 1


async def test_requests_with_one_id_are_each_confirmed_and_released_by_their_reservation(
    client, two
):
    longest = 128 * "r"
    answers = [await routed(client, request_id=longest, exclude=["w2"]) for _ in range(2)]
    assert (await two.load("w1")).requests == 2
    for answer in answers:
        path = f"/v1/requests/{answer['reservation_id']}"
        assert (await client.post(f"{path}/prefill_complete")).json()["found"]
        assert (await two.load("w1")).decoding == 1
        assert (await client.delete(path)).json()["found"]
        assert not (await client.delete(path)).json()["found"]
    assert await two.reserved() == {}


async def test_only_a_reserved_answer_has_the_id_of_a_reservation(client, two):
    assert "reservation_id" not in await routed(client, reserve=False)


async def test_a_request_that_its_balancer_sends_again_keeps_one_reservation(client, two):
    for excluded in ("w2", "w1"):
        answer = await client.post(
            "/v1/route",
            json={"token_ids": PROMPT, "request_id": "r1", "exclude": [excluded]},
            headers={"x-balancer-id": "b1"},
        )
        assert answer.status_code == 200
    assert await two.reserved() == {"r1": "w2:0"}
    assert "b1" not in answer.text


@pytest.mark.parametrize("sent", ["t={ms}", "{ms}", "t={s:.3f}", "{ms}456"])
async def test_a_try_that_was_sent_before_a_later_one_does_not_take_its_place(client, two, sent):
    """As when the first lay in the socket of a frozen replica."""
    body = {"token_ids": PROMPT, "request_id": "r1", "retry": True}
    late_ms = 1000 * int(time.time()) - 60_000
    late = {"x-request-start": sent.format(ms=late_ms, s=late_ms / 1000)}
    for headers, status in (({}, 200), (late, 409), ({}, 200)):
        answer = await client.post("/v1/route", json=body, headers=headers)
        assert answer.status_code == status
    assert (await two.load("w1")).requests + (await two.load("w2")).requests == 1


async def test_a_clock_that_is_ahead_orders_tries_by_when_they_came(client, two):
    body = {"token_ids": PROMPT, "request_id": "r1", "retry": True}
    for ahead_ms in (600_000, 60_000):
        sent = {"x-request-start": f"t={1000 * int(time.time()) + ahead_ms}"}
        assert (await client.post("/v1/route", json=body, headers=sent)).status_code == 200
    assert (await client.delete("/v1/requests/r1")).json()["found"]


async def test_what_a_balancer_sent_again_is_told_apart_from_what_it_sent_first(client, two, redis):
    headers = {"x-balancer-id": "b1", "x-request-start": "t=1700000000123"}
    attempts = set()
    for _ in range(2):
        body = {"token_ids": PROMPT, "request_id": "r1", "exclude": ["w2"]}
        assert (await client.post("/v1/route", json=body, headers=headers)).status_code == 200
        (record,) = await redis.hvals(KEYS["requests:1"])
        attempts.add(record.split()[-1])
    assert len(attempts) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"x-request-start": "yesterday"},
        {"x-request-id": "x" * 300},
        {"x-request-id": "a b"},
        {"x-tenant-id": "Team A"},
        {"x-tenant-id": "ä".encode()},
        {"x-session-id": "one two"},
        {"x-priority": "5"},
        {"x-priority": "URGENT"},
    ],
    ids=str,
)
async def test_what_a_header_says_refuses_nobody(client, two, headers):
    answer = await client.post("/v1/route", json={"token_ids": PROMPT}, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_ids_in_headers_that_do_not_fit_are_told_apart_all_the_same(client, two):
    async def id_of(given):
        body = {"token_ids": PROMPT, "reserve": False}
        answer = await client.post("/v1/route", json=body, headers={"x-request-id": given})
        return str(answer.json()["request_id"])

    long = "x" * 200
    assert await id_of(long) == await id_of(long)
    assert len({await id_of(given) for given in (long, long + "y", "a b", "a  b")}) == 4


async def test_the_request_id_comes_from_the_body_or_else_the_header_or_else_is_generated(
    client, two
):
    header = {"x-request-id": "balancer-1"}
    both = await client.post(
        "/v1/route", json={"token_ids": PROMPT, "request_id": "body-1"}, headers=header
    )
    assert both.json()["request_id"] == "body-1"
    one = await client.post("/v1/route", json={"token_ids": PROMPT}, headers=header)
    assert one.json()["request_id"] == "balancer-1"
    empty = await client.post("/v1/route", json={"token_ids": PROMPT}, headers={"x-request-id": ""})
    assert empty.json()["request_id"].startswith("req-")
    neither = [(await routed(client))["request_id"] for _ in range(2)]
    assert neither[0] != neither[1]
    generated = {*neither, empty.json()["request_id"]}
    assert set(await two.reserved()) == {"body-1", "balancer-1", *generated}


async def test_a_request_may_name_its_policy(client, two):
    # w1 holds the prompt and is busy, w2 is idle.
    await two.occupy("w1", "a", "b", "c")
    for policy, chosen in (("logit", "w1"), ("least_loaded", "w2"), ("power_of_two", "w2")):
        answer = await routed(client, policy=policy, reserve=False)
        assert (policy, answer["policy"], answer["worker_id"]) == (policy, policy, chosen)
    turns = [(await routed(client, policy="round_robin"))["worker_id"] for _ in range(4)]
    assert sorted(turns[:2]) == ["w1", "w2"]
    assert turns[:2] == turns[2:]


async def test_a_request_that_names_no_policy_is_routed_by_the_replicas(
    one_redis_server, replica, two
):
    await two.occupy("w1", "a")
    async with replica(one_redis_server.url, policy="least_loaded") as client:
        answer = await routed(client)
        assert (answer["policy"], answer["worker_id"]) == ("least_loaded", "w2")


@pytest.mark.parametrize("policy", ["latency", "blocks", "balance", "logit", "least_loaded"])
async def test_explain_shows_every_candidate_with_terms_that_add_up(client, two, policy):
    await two.register("w3")
    await two.occupy("w2", "a", "b")
    answer = await routed(client, policy=policy, explain=True, exclude=["w3"])
    candidates = answer["candidates"]
    assert [(c["worker_id"], c["eligible"]) for c in candidates] == [
        ("w1", True),
        ("w2", True),
        ("w3", False),
    ]
    for c in candidates:
        assert sum(c["terms"].values()) == pytest.approx(c["cost"])
    eligible = [c for c in candidates if c["eligible"]]
    assert min(eligible, key=lambda c: c["cost"])["worker_id"] == answer["worker_id"]


async def test_explain_shows_the_loads_from_before_the_decision_reserved(client, two):
    await two.occupy("w2", "a", blocks=5)
    answer = await routed(client, policy="blocks", explain=True)
    assert (answer["tied"], answer["tries"]) == (False, 1)
    w1, w2 = answer["candidates"]
    # 10 / 4 - 2 cached blocks to prefill, and 3 blocks in use: 0.5 + 3.
    assert (w1["active_requests"], w1["active_blocks"], w1["prefill_tokens"]) == (0, 0, 0)
    assert w1["overlap_blocks"] == {"device": 2, "host": 0, "disk": 0}
    assert w1["terms"] == {"prefill_blocks": 0.5, "decode_blocks": 3.0}
    assert w1["cost"] == 3.5
    # (4 + 10) / 4 to prefill, and 5 + 3 blocks in use.
    assert (w2["active_requests"], w2["active_blocks"], w2["prefill_tokens"]) == (1, 5, 4)
    assert w2["terms"] == {"prefill_blocks": 3.5, "decode_blocks": 8.0}
    assert (w2["decoding_requests"], w2["cost"]) == (0, 11.5)
    assert 0.0 <= w2["queue_s"] <= 0.001


async def test_a_worker_that_the_policy_rules_out_has_no_cost(client, two):
    full = ForwardPassMetrics(kv_active_blocks=100, kv_total_blocks=100)
    await two.report("w1", full)
    # The replica reads metrics in the background: route until they have arrived.
    while True:
        answer = await routed(client, policy="balance", explain=True)
        if answer["candidates"][0]["cost"] is None:
            break
    assert answer["candidates"][0]["terms"]["full"] is None
    assert answer["worker_id"] == "w2"


async def test_a_prompt_too_large_for_every_worker_is_refused(client, workers):
    await workers.register("w1", kv_total_blocks=1)
    response = await client.post("/v1/route", json={"token_ids": PROMPT})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "prompt_too_large"
    await workers.register("w2", kv_total_blocks=1000)
    assert (await routed(client))["worker_id"] == "w2"


async def test_options_in_the_query_of_a_json_request_are_not_ignored(client, workers):
    await workers.register("w1")
    response = await client.post("/v1/route?reserve=false", json={"token_ids": PROMPT})
    assert response.status_code == 422
    assert "got 'reserve=false'" in response.json()["error"]["message"]
    assert await workers.reserved() == {}


async def test_a_full_fleet_asks_callers_to_retry_later(client, workers):
    await workers.register("w1", max_requests=1)
    await workers.register("w2", max_requests=2)
    for n in range(3):
        await routed(client, request_id=f"r{n}")
    response = await client.post("/v1/route", json={"token_ids": PROMPT, "request_id": "r3"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "all_workers_busy"
    assert set(await workers.reserved()) == {"r0", "r1", "r2"}
    # A request that ends makes room for another.
    await client.delete("/v1/requests/r1")
    assert (await routed(client, request_id="r3"))["reserved"]


async def test_a_full_fleets_retry_after_is_its_shortest_queue_but_at_most_a_minute(
    client, workers
):
    await workers.register("w1", max_requests=1)
    await workers.register("w2", max_requests=1)
    await workers.occupy("w1", "x", prefill_s=500.0)

    async def retry_after():
        response = await client.post("/v1/route", json={"token_ids": PROMPT})
        assert response.status_code == 429
        return int(response.headers["retry-after"])

    await workers.occupy("w2", "y", prefill_s=40.0)
    assert 20 < await retry_after() <= 40
    await workers.occupy("w2", "y", prefill_s=400.0)
    assert await retry_after() == 60


async def test_a_request_without_a_live_worker_is_refused(client, workers):
    async def refusal(**body):
        response = await client.post("/v1/route", json={"token_ids": PROMPT} | body)
        assert response.headers["retry-after"] == "1"
        return response.status_code, response.json()["error"]["code"]

    assert await refusal() == (503, "no_workers")
    await workers.register("w1")
    assert await refusal(exclude=["w1"]) == (503, "no_workers")
    assert (await routed(client))["worker_id"] == "w1"
    await workers.retire("w1")
    assert await refusal() == (503, "no_workers")


def restart(server):
    server.kill()
    server.start()


@asynccontextmanager
async def beside(server, replica):
    """Workers and a client of a replica."""
    async with connect(server.url) as redis, replica(server.url) as client:
        yield FakeWorkers(redis), client


class TestWithoutRedis:
    async def test_requests_are_placed_by_the_last_loads_seen(self, own_redis_server, replica):
        async with beside(own_redis_server, replica) as (workers, client):
            await workers.register("w1")
            await workers.register("w2")
            await workers.publish("w1", PROMPT)
            await workers.occupy("w1", "a", "b")
            await routed(client, reserve=False)
            own_redis_server.kill()
            answer = await routed(client, request_id="r1")
            assert answer == {
                "request_id": "r1",
                "worker_id": "w2",
                "dp_rank": 0,
                "address": "http://w2-0:80",
                "overlap_blocks": {"device": 0, "host": 0, "disk": 0},
                "isl_tokens": 10,
                "isl_blocks": 3,
                "policy": "least_loaded",
                "degraded": True,
                "trust": "degraded",
                "reserved": False,
            }
            # w1 had two requests. r1 and the first of these make two on w2; then they alternate.
            chosen = [(await routed(client))["worker_id"] for _ in range(5)]
            assert chosen[0] == "w2"
            assert sorted(chosen[1:3]) == sorted(chosen[3:5]) == ["w1", "w2"]
            by_hash = {"local_hashes": LOCAL, "num_tokens": 10}
            best = (await client.post("/find_best_worker", json=by_hash)).json()
            assert (best["degraded"], best["overlap_blocks"]) == (True, 0)

    async def test_exclusions_still_hold(self, own_redis_server, replica):
        async with beside(own_redis_server, replica) as (workers, client):
            await workers.register("w1")
            await workers.register("w2")
            await routed(client, reserve=False)
            own_redis_server.kill()
            answers = [await routed(client, exclude=["w2"]) for _ in range(3)]
            assert [a["worker_id"] for a in answers] == ["w1", "w1", "w1"]
            body = {"token_ids": PROMPT, "exclude": ["w1", "w2"]}
            response = await client.post("/v1/route", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_workers")

    async def test_a_router_that_never_saw_a_worker_reports_redis_as_unavailable(
        self, own_redis_server, replica
    ):
        own_redis_server.kill()
        async with replica(own_redis_server.url) as client:
            response = await client.post("/v1/route", json={"token_ids": PROMPT})
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "redis_unavailable"

    async def test_a_redis_that_came_back_empty_counts_as_unavailable_until_workers_register(
        self, own_redis_server, replica
    ):
        async with beside(own_redis_server, replica) as (workers, client):
            await workers.register("w1")
            await workers.publish("w1", PROMPT)
            assert not (await routed(client))["degraded"]
            await asyncio.to_thread(restart, own_redis_server)
            answer = await routed(client)
            assert (answer["worker_id"], answer["degraded"], answer["reserved"]) == (
                "w1",
                True,
                False,
            )
            await workers.register("w1")
            answer = await routed(client)
            assert (answer["worker_id"], answer["degraded"], answer["reserved"]) == (
                "w1",
                False,
                True,
            )
            assert answer["overlap_blocks"]["device"] == 0

    async def test_after_an_empty_restart_a_reused_incarnation_is_not_taken_for_the_old_worker(
        self, own_redis_server, replica
    ):
        async with beside(own_redis_server, replica) as (workers, client):
            assert await workers.register("w1") == 1
            assert await workers.register("w2") == 2
            await routed(client)
            await asyncio.to_thread(restart, own_redis_server)
            assert await workers.register("w2") == 1
            answer = await routed(client)
            assert (answer["worker_id"], answer["address"]) == ("w2", "http://w2-0:80")
