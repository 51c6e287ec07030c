import pytest

from app.core.types import Tier

# 128 tokens are 32 blocks of four; the caller has hashed the first two of them.
BLOCKS = [1, 2, 3, 4, 5, 6, 7, 8]
LOCAL = [14643705804678351452, 16777012769546811212]
BODY = {"local_hashes": LOCAL, "num_tokens": 128}


@pytest.fixture
async def two(workers):
    """w1 holds the first block of BLOCKS, rank 3 of w2 both, the second in host memory."""
    await workers.register("w1")
    await workers.register("w2:3")
    await workers.publish("w1", BLOCKS[:4])
    await workers.publish("w2:3", BLOCKS, Tier.HOST)
    await workers.publish("w2:3", BLOCKS[:4], Tier.DEVICE)
    return workers


async def test_the_answer_names_the_worker_and_counts_its_blocks_of_all_tiers(client, two):
    response = await client.post("/find_best_worker", json=BODY)
    assert response.status_code == 200
    assert response.json() == {
        "worker_id": "w2",
        "dp_rank": 3,
        "address": "http://w2-3:80",
        "overlap_blocks": 2,
        "isl_blocks": 32,
        "policy": "latency",
        "degraded": False,
        "trust": "exact",
    }


@pytest.mark.parametrize(
    "hashes",
    [[LOCAL[0] - 2**64, LOCAL[1] - 2**64], ["cb38e4d7fb2dca5c", "e8d3ec39b907b74c"]],
    ids=["signed", "hex"],
)
async def test_hashes_may_be_signed_or_hex(client, two, hashes):
    body = {"local_hashes": hashes, "num_tokens": 128}
    answer = (await client.post("/find_best_worker", json=body)).json()
    assert (answer["worker_id"], answer["overlap_blocks"]) == ("w2", 2)


async def test_a_prompt_without_a_full_block_has_no_overlap(client, two):
    body = {"local_hashes": [], "num_tokens": 3}
    answer = (await client.post("/find_best_worker", json=body)).json()
    assert (answer["overlap_blocks"], answer["isl_blocks"]) == (0, 1)


async def test_find_best_worker_reserves_nothing(client, two):
    for _ in range(3):
        await client.post("/find_best_worker", json=BODY)
    assert await two.reserved() == {}
    assert (await two.load("w2:3")).total == 0


async def test_a_full_fleet_has_no_best_worker(client, workers):
    await workers.register("w1", max_requests=1)
    await workers.occupy("w1", "a")
    response = await client.post("/find_best_worker", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "all_workers_busy"


async def test_an_empty_fleet_has_no_best_worker(client):
    response = await client.post("/find_best_worker", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_workers"
