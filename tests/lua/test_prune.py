from __future__ import annotations

from app.core.predictions import PredictionSettings
from app.core.types import SequenceHash
from tests.lua.conftest import Namespace

CHAIN = [SequenceHash((i + 1) << 52) for i in range(16)]
OTHER = [SequenceHash((i + 1) << 44) for i in range(16)]
HOURS = PredictionSettings(lifetime_s=4 * 3600, max_entries=128)
"""Laid out in four buckets."""


async def test_what_is_over_is_removed_and_what_is_not_stays(space: Namespace) -> None:
    a, b = await space.worker("a"), await space.worker("b")
    await space.predict(a, CHAIN, HOURS)
    await space.grow_older(5)
    await space.predict(b, CHAIN, HOURS)
    assert await space.prune(HOURS) == 16
    assert await space.prune(HOURS) == 0
    assert await space.foresee(CHAIN, HOURS) == {b: 16}
    assert await space.predictions() == 16


async def test_what_was_routed_to_one_who_is_gone_is_removed(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.predict(inc, CHAIN, HOURS)
    await space.retire("a", inc)
    await space.sweep()
    assert await space.prune(HOURS) == 16
    assert await space.predictions() == 0
    assert await space.redis.keys(space.key("predicted:") + "*") == []


async def test_steps_are_bounded_and_go_round(space: Namespace) -> None:
    inc = await space.worker("a")
    spread = [SequenceHash(bucket << 62) for bucket in range(4)]
    await space.predict(inc, spread, HOURS)
    await space.grow_older(5)
    assert [await space.prune(HOURS, 3) for _ in range(4)] == [3, 1, 0, 0]
    await space.predict(inc, spread, HOURS)
    await space.grow_older(5)
    assert await space.prune(HOURS, 3) + await space.prune(HOURS, 3) == 4


async def test_where_nothing_was_predicted_there_is_nothing_to_prune(space: Namespace) -> None:
    assert await space.prune(HOURS) == 0
    assert await space.redis.dbsize() == 0
