from __future__ import annotations

import pytest

from app.core.types import Incarnation
from app.state import leases
from tests.lua.conftest import Namespace


async def absent(space: Namespace, *incarnations: int) -> list[int]:
    found = await space.do(leases.absent(space.keys, map(Incarnation, incarnations)))
    return list(found)


@pytest.mark.oldest_too
async def test_an_incarnation_that_is_no_writer_is_absent(space: Namespace) -> None:
    a, b = await space.worker("a"), await space.worker("b")
    assert await absent(space, a, b, 77) == [77]
    await space.retire("a", a)
    assert await absent(space, a, b, 77) == [a, 77]


async def test_a_staged_incarnation_is_not_absent(space: Namespace) -> None:
    await space.worker("a")
    staged = await space.worker("a", resync=True)
    assert await absent(space, staged) == []


async def test_an_empty_call_finds_none_absent(space: Namespace) -> None:
    assert await absent(space) == []


async def test_every_incarnation_is_absent_from_an_emptied_redis(space: Namespace) -> None:
    assert await absent(space, *range(1, 3001)) == list(range(1, 3001))
