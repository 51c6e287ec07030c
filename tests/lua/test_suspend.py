from __future__ import annotations

import pytest

from app.core.types import Incarnation
from tests.lua.conftest import NO_LOAD, A, Namespace


async def fleet(space: Namespace, size: int) -> list[Incarnation]:
    """That many workers; request `r<n>` is reserved on the n-th, from 0."""
    found = [await space.worker(f"w{n}") for n in range(size)]
    for n, inc in enumerate(found):
        await space.reserve(inc, f"r{n}")
    return found


async def live(space: Namespace) -> list[Incarnation]:
    return sorted((await space.loads()).loads)


@pytest.mark.oldest_too
async def test_nothing_goes_to_the_worker_of_a_failed_request_until_it_renews(
    space: Namespace,
) -> None:
    failing, other = await fleet(space, 2)
    await space.hold(failing, [A])
    assert await space.suspend("r0") == failing
    assert await live(space) == [other]
    refused = await space.reserve(failing, "r2")
    assert refused is not None
    assert refused.reason == "lapsed"
    assert await space.renew(failing)
    assert await live(space) == [failing, other]
    assert (await space.load(failing)).requests == 1
    [found] = await space.match([A])
    assert failing in found


async def test_a_suspended_worker_that_does_not_renew_is_retired(space: Namespace) -> None:
    failing, other = await fleet(space, 2)
    await space.suspend("r0")
    assert await space.retire_lapsed() == 1
    assert await space.lost() == [failing]
    assert await live(space) == [other]


async def test_a_request_without_a_reservation_suspends_nobody(space: Namespace) -> None:
    both = await fleet(space, 2)
    await space.release("r0")
    before = await space.contents()
    for request_id in ("r0", "unknown"):
        assert await space.suspend(request_id) is None
    assert await space.contents() == before
    assert await live(space) == both


async def test_a_lease_that_has_lapsed_is_left_as_it_is(space: Namespace) -> None:
    failing, *_ = await fleet(space, 2)
    await space.suspend("r0")
    lapsed_ms = await space.redis.zscore(space.keys["leases"], str(failing))
    await space.redis.zincrby(space.keys["leases"], -1, str(failing))
    assert await space.suspend("r0") is None
    assert await space.redis.zscore(space.keys["leases"], str(failing)) == lapsed_ms - 1


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (7, 1), (8, 2), (12, 3)])
async def test_a_quarter_of_the_workers_and_never_the_last_are_suspended(
    space: Namespace, size: int, most: int
) -> None:
    everybody = await fleet(space, size)
    suspended = [inc for n in range(size) if (inc := await space.suspend(f"r{n}"))]
    assert suspended == everybody[:most]
    assert await live(space) == everybody[most:]
    if most:
        await space.renew(suspended[0])
        assert await space.suspend(f"r{size - 1}") == everybody[-1]


async def test_incarnations_that_are_not_routed_to_yet_do_not_count_as_workers(
    space: Namespace,
) -> None:
    [last] = await fleet(space, 1)
    for _ in range(8):
        assert (await space.register("w0", resync=True)).predecessor_lives
    assert await space.suspend("r0") is None
    assert await live(space) == [last]
    await space.worker("w1")
    assert await space.suspend("r0") == last


async def test_a_reservation_of_a_worker_that_does_not_exist_suspends_nobody(
    space: Namespace,
) -> None:
    both = await fleet(space, 2)
    for written in ("99", "nonsense"):
        await space.redis.hset(space.keys["reservations"], "r0", written)
        assert await space.suspend("r0") is None
    assert await live(space) == both
    assert (await space.loads()).loads[both[1]] != NO_LOAD


async def test_the_worker_is_found_by_the_id_of_the_reservation(space: Namespace) -> None:
    first, second, _ = await fleet(space, 3)
    await space.reserve(first, "r", attempt="1000-aa")
    await space.reserve(second, "r", attempt="1000-bb")
    assert await space.suspend("r~bb") == second
    assert await space.suspend("r~cc") is None
