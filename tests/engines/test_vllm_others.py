"""Requests of others, and our own, as a real vLLM counts them: see `make test-vllm`."""

import asyncio

import pytest

from tests.door.test_foreign_load import others
from tests.engines.vllm_server import ANSWER_S, MODEL, behind_a_door
from tests.eventually import eventually

AT_ONCE, TURNS = 12, 6
"""vLLM runs eight at a time."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


async def ask(client, number, num_tokens):
    prompt = [5 + (7 * number + place) % 400 for place in range(200)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_real_engine_counts_others_requests_and_none_of_ours_twice(
    one_redis_server, tmp_path
):
    async with behind_a_door(one_redis_server.url, tmp_path) as (door, direct):
        door.timeout = ANSWER_S
        seen = []

        async def look():
            while True:
                seen.extend(await others(door))
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        for turn in range(TURNS):
            await asyncio.gather(
                *(ask(door, turn * AT_ONCE + number, 20) for number in range(AT_ONCE))
            )
        looking.cancel()
        await asyncio.wait([looking])
        assert len(seen) > TURNS
        assert max(seen) == 0

        asking = [asyncio.create_task(ask(direct, number, 3500)) for number in range(30)]
        # One too many is forgiven.
        await eventually(lambda: others(door), lambda found: found == [29], within_s=ANSWER_S)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await eventually(lambda: others(door), lambda found: found == [0], within_s=ANSWER_S)
