from __future__ import annotations

import pytest

from app.core.types import Incarnation, WorkerKey
from app.state import leases
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


async def test_a_worker_that_drains_counts_neither_as_failing_nor_as_one_that_is_left(
    space: Namespace,
) -> None:
    everybody = await fleet(space, 3)
    await space.do(leases.drain(space.keys, WorkerKey("w2")))
    assert await space.suspend("r0") == everybody[0]
    assert await space.suspend("r1") is None
    assert await live(space) == everybody[1:2]


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


async def fail_again(space: Namespace, failing: Incarnation) -> int:
    """Have the worker, whose pause is over, fail one more request. Returns the pause in ms."""
    count, _ = (await space.get("failures", failing) or "0 0").split()
    if await space.redis.hexists(space.keys["failures"], str(failing)):
        await space.redis.hset(space.keys["failures"], str(failing), f"{count} 1000")
    assert await space.renew(failing)
    assert failing in await live(space)
    await space.reserve(failing, "again", attempt=f"{await space.now_ms()}-a")
    assert await space.suspend("again") == failing
    await space.release("again")
    [entry] = (await space.loads()).failing.values()
    _, last_ms = (await space.get("failures", failing) or "").split()
    return entry.until_ms - int(last_ms)


async def test_the_pause_doubles_with_each_failure_up_to_a_minute(space: Namespace) -> None:
    failing, _ = await fleet(space, 2)
    pauses = [await fail_again(space, failing) for _ in range(9)]
    assert pauses == [0, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000]


async def test_renewals_keep_a_paused_worker_but_do_not_revive_it(space: Namespace) -> None:
    failing, other = await fleet(space, 2)
    await fail_again(space, failing)
    assert await space.renew(failing)
    assert await live(space) == [failing, other]
    await fail_again(space, failing)
    lapsed_ms = await space.expires_ms("leases", failing)
    assert await space.renew(failing)
    assert await space.expires_ms("leases", failing) >= lapsed_ms
    snapshot = await space.loads()
    assert sorted(snapshot.loads) == [other]
    assert snapshot.paused == [failing]
    assert await space.retire_lapsed(grace_ms=60_000) == 0
    refused = await space.reserve(failing, "r2")
    assert refused is not None
    assert refused.reason == "lapsed"


async def test_answers_shrink_the_pause_until_nothing_is_left(space: Namespace) -> None:
    failing, _ = await fleet(space, 2)
    for _ in range(3):
        await fail_again(space, failing)
    await space.redis.hset(space.keys["failures"], str(failing), "3 1000")
    await space.renew(failing)
    for left in ("2 1000", "1 1000", None, None):
        await space.reserve(failing, "good", attempt="2000-a")
        await space.prefill_complete("good")
        await space.release("good", answered=True)
        assert await space.get("failures", failing) == left


async def test_an_answer_that_came_whole_makes_up_for_a_failure(space: Namespace) -> None:
    failing, _ = await fleet(space, 2)
    await space.redis.hset(space.keys["failures"], str(failing), "3 1000")
    await space.reserve(failing, "other", attempt="2000-a")
    await space.release("other", whole=True)
    assert await space.get("failures", failing) == "2 1000"


@pytest.mark.parametrize(
    ("attempt", "answered", "first_token"),
    [("500-a", True, True), ("2000-a", False, True), ("2000-a", True, False)],
    ids=["routed before the failure", "not answered", "without a first token"],
)
async def test_no_other_release_makes_up_for_a_failure(
    space: Namespace, attempt: str, answered: bool, first_token: bool
) -> None:
    failing, _ = await fleet(space, 2)
    await space.redis.hset(space.keys["failures"], str(failing), "3 1000")
    await space.reserve(failing, "other", attempt=attempt)
    if first_token:
        await space.prefill_complete("other")
    await space.release("other", answered=answered)
    assert await space.get("failures", failing) == "3 1000"


async def test_requests_of_before_the_last_failure_do_not_add_to_it(space: Namespace) -> None:
    failing, _ = await fleet(space, 2)
    await space.suspend("r0")
    await space.renew(failing)
    before = await space.get("failures", failing)
    await space.reserve(failing, "old", attempt="1000-a")
    assert await space.suspend("old") == failing
    assert await space.get("failures", failing) == before


async def test_the_last_worker_is_tried_again_however_often_it_failed(space: Namespace) -> None:
    failing, other = await fleet(space, 2)
    await fail_again(space, failing)
    await fail_again(space, failing)
    assert await space.renew(failing)
    assert await live(space) == [other]
    await space.redis.zadd(space.keys["leases"], {str(other): 1})
    for _ in range(2):
        assert await space.renew(failing)
        assert await live(space) == [failing]
    await space.renew(other)
    await space.renew(failing)
    assert await live(space) == [other]


async def test_a_paused_worker_stays_so_under_a_new_incarnation_but_not_a_new_process(
    space: Namespace,
) -> None:
    failing, other = await fleet(space, 2)
    await fail_again(space, failing)
    await fail_again(space, failing)
    again = await space.worker("w0", resync=True)
    assert await live(space) == [other]
    assert (await space.loads()).paused == [again]
    assert await space.get("failures", failing) is None
    restarted = await space.worker("w0", nonce="restarted")
    assert await live(space) == [other, restarted]
    assert await space.redis.exists(space.keys["failures"]) == 0


@pytest.mark.parametrize("text", ["", "x", "9 1", "-1 5", "5 99999999999999", "5"])
async def test_a_spoilt_count_of_failures_counts_for_nothing(space: Namespace, text: str) -> None:
    failing, other = await fleet(space, 2)
    await space.redis.hset(space.keys["failures"], mapping={str(failing): text, "junk": text})
    await space.renew(failing)
    assert await live(space) == [failing, other]
    assert await space.suspend("r0") == failing
    assert (await space.get("failures", failing) or "").startswith("1 ")


async def test_the_worker_is_found_by_the_id_of_the_reservation(space: Namespace) -> None:
    first, second, _ = await fleet(space, 3)
    await space.reserve(first, "r", attempt="1000-aa")
    await space.reserve(second, "r", attempt="1000-bb")
    assert await space.suspend("r~bb") == second
    assert await space.suspend("r~cc") is None
