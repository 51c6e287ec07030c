from __future__ import annotations

import pytest

from app.state import leases
from tests.lua.conftest import Namespace


async def test_requests_of_an_existing_incarnation_stay(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    assert await space.do(leases.drop_requests(space.keys, [str(inc)])) == 0
    assert await space.release("r1")


@pytest.mark.oldest_too
async def test_requests_and_queues_of_no_incarnation_are_removed(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    for name in ("requests:", "prefills:"):
        await space.redis.rename(space.keys[f"{name}{inc}"], space.keys[f"{name}{inc}.bak"])
    found = [str(inc), f"{inc}.bak", "77", ""]
    assert await space.do(leases.drop_requests(space.keys, found)) == 2
    assert await space.redis.keys(space.keys["requests:"] + "*") == []
    assert await space.redis.keys(space.keys["prefills:"] + "*") == []


@pytest.mark.parametrize("left", ["workers", "leases", "writers", "load"])
async def test_any_trace_of_an_incarnation_keeps_its_requests(space: Namespace, left: str) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    await space.redis.delete(
        *(space.keys[name] for name in ("workers", "leases", "writers", "load") if name != left)
    )
    assert await space.do(leases.drop_requests(space.keys, [str(inc)])) == 0
    await space.redis.delete(space.keys[left])
    assert await space.do(leases.drop_requests(space.keys, [str(inc)])) == 2
