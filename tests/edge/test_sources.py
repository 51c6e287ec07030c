"""Requests of which one worker computes the prompt and another decodes, over HTTP and in Redis."""

import pytest

from app.core.hashing import compute_local_hashes
from app.core.roles import Role
from tests.edge.test_decisions import kvroute
from tests.eventually import eventually
from tests.fake_worker import BLOCK_SIZE, KEYS

PROMPT = list(range(4000))


@pytest.fixture
async def pair(workers):
    """p computes prompts, d decodes."""
    await workers.register("p", role=Role.PREFILL, kv_transfer="nixl")
    await workers.register("d", role=Role.DECODE, kv_transfer="nixl", max_requests=2)
    return workers


async def load(workers, name):
    """requests, decoding, blocks, prefill tokens."""
    load = await workers.load(name)
    return load.requests, load.decoding, load.blocks, load.prefill_tokens


async def split(client, **given):
    body = {"token_ids": PROMPT, "request_id": "r1", "policy": "least_loaded"} | given
    answer = await client.post("/v1/route", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["worker_id"] == "d"
    return found


async def test_both_workers_are_reserved_and_each_is_given_back_in_its_time(client, pair):
    answer = await split(client)
    assert answer["source"] == {
        "worker_id": "p",
        "dp_rank": 0,
        "address": "http://p-0:80",
        "form": "split",
        "kv_transfer": "nixl",
    }
    assert await load(pair, "p") == (1, 0, 1000, 4000)
    assert await load(pair, "d") == (1, 0, 1000, 1)
    path = f"/v1/requests/{answer['reservation_id']}"
    for _ in range(2):
        assert (await client.post(f"{path}/source_complete")).json()["found"]
        assert await load(pair, "p") == (0, 0, 1000, 0), "its blocks wait to be fetched"
    assert (await client.post(f"{path}/prefill_complete")).json()["found"]
    assert await load(pair, "p") == (0, 0, 0, 0)
    assert await load(pair, "d") == (1, 1, 1000, 0)
    assert not (await client.post(f"{path}/source_complete")).json()["found"]
    assert (await client.delete(path)).json()["found"]
    assert await load(pair, "d") == (0, 0, 0, 0)


@pytest.mark.parametrize("computed", [False, True])
async def test_a_release_frees_both(client, pair, *, computed):
    answer = await split(client)
    path = f"/v1/requests/{answer['reservation_id']}"
    if computed:
        await client.post(f"{path}/source_complete")
    assert (await client.delete(path)).json()["found"]
    assert await load(pair, "d") == (0, 0, 0, 0)
    held = 1000 if computed else 0
    assert await load(pair, "p") == (0, 0, held, 0), "its engine keeps them for its lease"


async def test_who_asks_for_the_best_worker_alone_is_told_of_one_that_does_it_all(client, workers):
    """The answer has no place for a source."""
    await workers.register("a", kv_transfer="kvroute", max_requests=1)
    await workers.register("b", kv_transfer="kvroute")
    await workers.register("c", role=Role.PREFILL, kv_transfer="kvroute")
    await workers.publish("c", PROMPT)
    await workers.publish("b", PROMPT[:400])
    hashes = compute_local_hashes(PROMPT, BLOCK_SIZE)
    body = {"local_hashes": hashes, "num_tokens": len(PROMPT)}
    answer = (await client.post("/find_best_worker", json=body)).json()
    assert (answer["worker_id"], answer["overlap_blocks"]) == ("b", 100)


async def test_a_retry_takes_the_place_of_both(client, pair):
    await split(client)
    await split(client, retry=True)
    assert await load(pair, "p") == (1, 0, 1000, 4000)
    assert await load(pair, "d") == (1, 0, 1000, 1)


async def test_neither_is_reserved_if_one_is_full(client, pair):
    for n in range(2):
        await split(client, request_id=f"r{n}")
    refused = await client.post("/v1/route", json={"token_ids": PROMPT, "policy": "least_loaded"})
    assert refused.status_code == 429
    assert (await pair.load("p")).requests == 2


async def test_blocks_on_the_source_outlive_a_target_that_ends(client, pair):
    answer = await split(client)
    await client.post(f"/v1/requests/{answer['reservation_id']}/source_complete")
    await pair.retire("d")
    assert await load(pair, "p") == (0, 0, 1000, 0)
    await pair.register("d", role=Role.DECODE, kv_transfer="nixl")
    await split(client, retry=True)
    assert await load(pair, "p") == (1, 0, 1000, 4000), "not those of both tries"


async def test_what_waits_too_long_to_be_fetched_is_forgotten(
    one_redis_server, pair, replica, redis
):
    async with replica(one_redis_server.url, kv_lease_s=0.05) as client:
        answer = await split(client)
        await client.post(f"/v1/requests/{answer['reservation_id']}/source_complete")

        async def held():
            return (await pair.load("p")).blocks

        await eventually(held, lambda blocks: blocks == 0)
        assert await load(pair, "d") == (1, 0, 1000, 1)


async def test_a_damaged_count_of_a_source_is_found(client, pair, redis, one_redis_server):
    answer = await split(client)
    await client.post(f"/v1/requests/{answer['reservation_id']}/source_complete")
    verify = (one_redis_server.url, "inspect", "verify")
    assert (await kvroute(*verify)).exit_code == 0
    inc = await redis.hget(KEYS["current"], "p:0")
    load = (await redis.hget(KEYS["load"], inc) or b"").decode().split()
    await redis.hset(KEYS["load"], inc, " ".join([*load[:4], "999", *load[5:]]))
    damaged = await kvroute(*verify)
    assert damaged.exit_code == 1
    assert "a load that is not the sum of its requests" in damaged.output


async def test_explain_names_the_source_and_the_price_of_each_form(client, workers):
    await workers.register("a", kv_transfer="kvroute", max_requests=1)
    await workers.register("b", kv_transfer="kvroute")
    await workers.publish("a", PROMPT)
    await workers.occupy("a", "z")
    body = {"token_ids": PROMPT, "request_id": "r1", "explain": True}
    answer = (await client.post("/v1/route", json=body)).json()
    assert (answer["worker_id"], answer["source"]["worker_id"]) == ("b", "a")
    assert answer["source"]["form"] == "fetch"
    assert answer["overlap_blocks"]["device"] == 1000
    assert answer["forms"]["fetch"] < answer["forms"]["local"]
    assert (await workers.load("a")).blocks >= 1000
    assert (await workers.load("b")).prefill_tokens == 1
