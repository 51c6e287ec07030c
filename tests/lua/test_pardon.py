from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.failures import Failure
from app.core.types import Incarnation
from app.state import leases
from tests.lua.conftest import Namespace

REFUSED = Failure("status_500", in_a_row=2)


async def fail(space: Namespace, inc: Incarnation, sent_ms: int) -> Incarnation | None:
    return await space.suspend("", REFUSED, incarnation=inc, sent_ms=sent_ms)


async def pardon(space: Namespace, inc: Incarnation) -> bool:
    return await space.do(leases.pardon(space.keys, inc, REFUSED))


async def test_a_worker_that_answers_again_lacks_that_no_more(space: Namespace) -> None:
    inc = await space.worker("a")
    for subject in ("/tokenize", "poems"):
        lacks = replace(REFUSED, subject=subject)
        await space.suspend("", lacks, incarnation=inc, sent_ms=1000)
    assert await space.do(leases.answers_again(space.keys, inc, "/tokenize"))
    assert not await space.do(leases.answers_again(space.keys, inc, "/tokenize"))
    assert list((await space.loads()).lacking) == ["poems"]


@pytest.mark.oldest_too
async def test_nothing_is_left_of_a_failure_that_is_taken_back(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.worker("b")
    await fail(space, inc, 1000)
    assert await pardon(space, inc)
    assert await space.get("failures", inc) is None
    assert not await pardon(space, inc)


async def test_other_failures_still_count(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.worker("b")
    await space.redis.hset(space.keys["failures"], str(inc), "4 1000 0 900 1000 1 status_500")
    await fail(space, inc, 2000)
    assert await pardon(space, inc)
    left = (await space.loads()).failing[inc]
    assert (left.failures, left.is_on_trial) == (4, True)


async def test_a_pause_for_what_is_taken_back_ends_with_the_next_renewal(space: Namespace) -> None:
    inc = await space.worker("a")
    other = await space.worker("b")
    await space.redis.hset(space.keys["failures"], str(inc), "1 1000 0 300 1000 0 status_500")
    assert await fail(space, inc, 2000) == inc
    await space.renew(inc)
    assert list((await space.loads()).loads) == [other]
    await pardon(space, inc)
    await space.renew(inc)
    snapshot = await space.loads()
    assert sorted(snapshot.loads) == [inc, other]
    assert not snapshot.failing[inc].is_on_trial


async def test_what_no_worker_has_is_lacked_by_none(space: Namespace) -> None:
    inc = await space.worker("a")
    lacks = replace(REFUSED, subject="poems")
    await space.suspend("", lacks, incarnation=inc, sent_ms=1000)
    assert await space.do(leases.pardon(space.keys, inc, lacks))
    assert (await space.loads()).lacking == {}
