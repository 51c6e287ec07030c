import math
from dataclasses import replace

import pytest

from app.core.failures import REPORTED, SOON_S, Counts
from app.core.types import Incarnation, WorkerKey
from app.core.verdicts import CALLER, LACKS, State
from app.state import leases
from tests.eventually import eventually
from tests.lua.conftest import BROKEN, NO_LOAD, A


async def fleet(space, size):
    """That many workers; request `r<n>` is reserved on the n-th, from 0."""
    found = [await space.worker(f"w{n}") for n in range(size)]
    for n, inc in enumerate(found):
        await space.reserve(inc, f"r{n}")
    return found


@pytest.fixture
async def both(space):
    return await fleet(space, 2)


@pytest.fixture
def failing(both):
    return both[0]


@pytest.fixture
def other(both):
    return both[1]


async def live(space):
    return sorted((await space.loads()).loads)


@pytest.mark.oldest_too
async def test_nothing_goes_to_the_worker_of_a_failed_request_until_it_renews(
    space, failing, other
):
    await space.hold(failing, [A])
    assert await space.suspend("r0") == failing
    assert await live(space) == [other]
    assert (await space.reserve(failing, "r2")).reason == "lapsed"
    assert await space.renew(failing)
    assert await live(space) == [failing, other]
    assert (await space.load(failing)).requests == 1
    [found] = await space.match([A])
    assert failing in found


async def test_a_suspended_worker_that_does_not_renew_is_retired(space, failing, other):
    await space.suspend("r0")
    assert await space.retire_lapsed() == 1
    assert await space.lost() == [failing]
    assert await live(space) == [other]


async def test_a_request_without_a_reservation_suspends_nobody(space, both):
    await space.release("r0")
    before = await space.contents()
    for request_id in ("r0", "unknown"):
        assert await space.suspend(request_id) is None
    assert await space.contents() == before
    assert await live(space) == both


async def test_a_lease_that_has_lapsed_is_left_as_it_is(space):
    failing, *_ = await fleet(space, 2)
    await space.suspend("r0")
    lapsed_ms = await space.redis.zscore(space.keys["leases"], str(failing))
    await space.redis.zincrby(space.keys["leases"], -1, str(failing))
    assert await space.suspend("r0") is None
    assert await space.redis.zscore(space.keys["leases"], str(failing)) == lapsed_ms - 1


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (3, 1), (7, 3), (8, 4), (12, 6)])
async def test_half_of_the_workers_and_never_the_last_are_suspended(space, size, most):
    everybody = await fleet(space, size)
    suspended = [inc for n in range(size) if (inc := await space.suspend(f"r{n}"))]
    assert suspended == everybody[:most]
    assert await live(space) == everybody[most:]
    if most:
        await space.renew(suspended[0])
        assert await space.suspend(f"r{size - 1}") == everybody[-1]


async def test_a_worker_that_drains_counts_neither_as_failing_nor_as_one_that_is_left(space):
    everybody = await fleet(space, 3)
    await space.do(leases.drain(space.keys, WorkerKey("w2")))
    assert await space.suspend("r0") == everybody[0]
    assert await space.suspend("r1") is None
    assert await live(space) == everybody[1:2]


async def test_incarnations_that_are_not_routed_to_yet_do_not_count_as_workers(space):
    [last] = await fleet(space, 1)
    for _ in range(8):
        assert (await space.register("w0", resync=True)).predecessor_lives
    assert await space.suspend("r0") is None
    assert await live(space) == [last]
    await space.worker("w1")
    assert await space.suspend("r0") == last


async def test_a_reservation_of_a_worker_that_does_not_exist_suspends_nobody(space, both):
    for written in ("99", "nonsense"):
        await space.redis.hset(space.keys["reservations"], "r0", written)
        assert await space.suspend("r0") is None
    assert await live(space) == both
    assert (await space.loads()).loads[both[1]] != NO_LOAD


def failed(count, *, share=300, until_ms=0):
    """What is kept of a worker that failed so many in a row, the last one long ago."""
    return {"count": count, "last_ms": 1000, "until_ms": until_ms, "share": share, "at_ms": 1000}


async def known(space, inc):
    return (await space.loads()).marks[inc].failed


async def is_on_trial(space, inc):
    return (await space.verdict(inc)).state is State.TRIAL


async def fail_again(space, failing, failure=BROKEN):
    """Have the worker `w0`, whose pause is over, fail one more request."""
    count = (await known(space, failing)).count
    if count:
        await space.mark("w0", failed=failed(count))
    assert await space.renew(failing)
    assert failing in await live(space)
    await space.reserve(failing, "again", attempt=f"{await space.now_ms()}-a")
    suspended = await space.suspend("again", failure)
    await space.release("again")
    return suspended


async def pause_ms(space, failing):
    mark = await known(space, failing)
    return max(0, mark.until_ms - mark.last_ms)


async def test_the_pause_doubles_with_each_failure_up_to_a_minute(space, failing):
    pauses = []
    for _ in range(9):
        assert await fail_again(space, failing) == failing
        pauses.append(await pause_ms(space, failing))
    assert pauses == [0, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000]


async def test_renewals_keep_a_paused_worker_but_do_not_revive_it(space, failing, other):
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
    assert (await space.reserve(failing, "r2")).reason == "lapsed"


async def test_a_worker_that_refuses_at_once_is_soon_tried_again(space, failing):
    for _ in range(7):
        await fail_again(space, failing, replace(BROKEN, most_s=SOON_S))
    assert await pause_ms(space, failing) == 1000 * SOON_S < 10_000


async def test_a_worker_that_cannot_be_left_alone_is_not_for_longer_when_it_can(
    space, failing, other
):
    await space.do(leases.drain(space.keys, WorkerKey("w1")))
    for _ in range(7):
        assert await fail_again(space, failing) is None
    assert not await is_on_trial(space, failing)
    await space.do(leases.drain(space.keys, WorkerKey("w1"), undo=True))
    await space.renew(other)
    assert await fail_again(space, failing) == failing
    assert await pause_ms(space, failing) == 2000


async def test_an_answer_ends_a_row_of_failures_and_the_trial(space, failing):
    await space.mark("w0", failed=failed(3, share=1000, until_ms=1000))
    assert await is_on_trial(space, failing)
    await space.reserve(failing, "good", attempt="2000-a")
    await space.prefill_complete("good")
    assert not await is_on_trial(space, failing)
    assert (await known(space, failing)).count == 3
    await space.release("good", answered=True)
    assert not (await space.loads()).marks


async def test_only_one_that_was_left_alone_is_on_trial(space, failing):
    trials = []
    for _ in range(2):
        await fail_again(space, failing, replace(BROKEN, in_a_row=2))
        await space.redis.zadd(space.keys["leases"], {str(failing): 1e15})
        trials.append(await is_on_trial(space, failing))
    assert trials == [False, True]


async def test_first_tokens_of_before_the_pause_are_none_of_the_trial(space):
    await fleet(space, 2)
    await space.mark("w0", failed=failed(3, until_ms=await space.now_ms() + 60_000))
    before = await space.get("verdicts", "w0:0")
    await space.prefill_complete("r0")
    assert await space.get("verdicts", "w0:0") == before


async def test_a_first_token_ends_a_trial_however_long_its_request_had_waited(space, failing):
    await space.mark("w0", failed=failed(3, share=1000, until_ms=1000))
    await space.reserve(failing, "waited", attempt="500-a")
    await space.prefill_complete("waited")
    found = await known(space, failing)
    assert (found.count, found.share, await is_on_trial(space, failing)) == (3, 0, False)


async def test_an_answer_that_came_whole_ends_a_row_of_failures(space, failing):
    await space.mark("w0", failed=failed(3, until_ms=1000))
    await space.reserve(failing, "other", attempt="2000-a")
    await space.release("other", whole=True)
    assert not (await space.loads()).marks


@pytest.mark.parametrize(
    ("attempt", "answered", "first_token"),
    [("500-a", True, True), ("2000-a", False, True), ("2000-a", True, False)],
    ids=["routed before the failure", "not answered", "without a first token"],
)
async def test_no_other_release_ends_it(space, failing, attempt, answered, first_token):
    await space.mark("w0", failed=failed(3))
    await space.reserve(failing, "other", attempt=attempt)
    if first_token:
        await space.prefill_complete("other")
    await space.release("other", answered=answered)
    assert (await known(space, failing)).count == 3


async def test_failed_tries_are_a_share_that_grows_with_failures_and_fades(space, failing):
    shares = []
    for number in range(3):
        now_ms = await space.now_ms()
        attempt = f"{now_ms + number + 1}-a"
        await eventually(space.now_ms, lambda now, least=now_ms: now > least + 5)
        await space.reserve(failing, "again", attempt=attempt)
        await space.suspend("again", replace(BROKEN, in_a_row=9))
        await space.release("again")
        shares.append((await known(space, failing)).share / 1000)
    assert shares == pytest.approx([0.3, 0.51, 0.66], abs=0.02)
    now = await known(space, failing)
    assert now.share_at(now.at_ms + 4000) == pytest.approx(now.share / 1000 / math.e)
    assert now.share_at(now.at_ms + 60_000) == 0.0
    assert failing in await live(space)


async def test_one_failure_of_a_kind_that_needs_two_in_a_row_suspends_nobody(space, failing):
    refuses = replace(BROKEN, in_a_row=2)
    assert await fail_again(space, failing, refuses) is None
    assert await fail_again(space, failing, refuses) == failing


async def test_a_worker_that_takes_no_more_is_left_alone_for_as_long_as_it_asks(space):
    full, other = await fleet(space, 2)
    failure = replace(BROKEN, weight=0.0, in_a_row=0, pause_s=7.0)
    before_ms = await space.now_ms()
    assert await space.suspend("r0", failure) == full
    assert await space.renew(full)
    assert await live(space) == [other]
    found = await known(space, full)
    assert (found.count, found.share) == (0, 0)
    assert before_ms + 7000 <= found.until_ms <= await space.now_ms() + 7000


async def test_a_failure_is_counted_against_a_worker_whose_reservation_has_ended(space, failing):
    await space.release("r0")
    assert await space.suspend("r0", incarnation=failing, sent_ms=1000) == failing
    assert (await known(space, failing)).count == 1
    assert await space.suspend("r0", incarnation=Incarnation(99), sent_ms=1000) is None


async def test_requests_of_before_the_last_failure_do_not_add_to_it(space, failing):
    await space.suspend("r0")
    await space.renew(failing)
    before = await known(space, failing)
    await space.reserve(failing, "old", attempt="1000-a")
    assert await space.suspend("old") == failing
    after = await known(space, failing)
    assert (after.count, after.last_ms) == (before.count, before.last_ms)


async def test_what_counts_is_when_a_request_was_sent_and_not_how_long_it_had_waited(
    space, failing
):
    await space.mark("w0", failed=failed(1))
    await space.reserve(failing, "waited", attempt="500-a")
    assert await space.suspend("waited", sent_ms=1001) == failing
    assert (await known(space, failing)).count == 2


POEMS = replace(BROKEN, cause="not_found", in_a_row=2, most_s=SOON_S, mark=f"{LACKS}poems")


async def test_a_worker_is_left_alone_for_what_it_lacks_alone(space, both):
    assert await space.suspend("r0", POEMS, sent_ms=1000) is None
    snapshot = await space.loads()
    assert sorted(snapshot.loads) == both
    assert list(snapshot.marks[both[0]]) == [POEMS.mark]


async def test_a_worker_that_lacks_many_things_fails(space, failing, other):
    for number in range(6):
        await later(space)
        one = replace(POEMS, mark=f"{LACKS}{number}")
        await space.suspend("r0", one, sent_ms=await space.now_ms())
    assert await live(space) == [other]
    marks = (await space.loads()).marks[failing]
    assert sorted(marks) == ["failed", *(f"{LACKS}{number}" for number in range(4))]
    assert marks.failed.cause == "not_found"


async def test_what_a_worker_lacked_long_ago_is_forgotten(space, failing):
    await space.mark("w0", **{f"{LACKS}{number}": failed(3) for number in range(4)})
    await space.suspend("r0", POEMS, sent_ms=1000)
    assert list((await space.loads()).marks[failing]) == [POEMS.mark]
    assert await space.retire("w0", failing)
    assert await space.redis.exists(space.keys["verdicts"]) == 0


async def later(space):
    """Return once the Redis clock shows another time."""
    now_ms = await space.now_ms()
    await eventually(space.now_ms, lambda now: now > now_ms)


WITNESSED = replace(BROKEN, counts=Counts.WITNESSED)


async def fail_for(space, *callers, failure=WITNESSED):
    """Have `r0` fail for one caller after another; who is suspended each time."""
    found = []
    for caller in callers:
        await later(space)
        sent_ms = await space.now_ms()
        found.append(await space.suspend("r0", failure, caller=caller, sent_ms=sent_ms))
    return found


async def test_a_failure_that_one_caller_has_seen_is_its_own_until_another_has(space, both):
    assert await fail_for(space, *"aaaa") == [None] * 4
    assert await live(space) == both
    marks = (await space.loads()).marks[both[0]]
    assert (list(marks), marks["caller a"].count) == ([f"{CALLER}a"], 4)
    assert await fail_for(space, "b") == [both[0]]
    verdict = await space.verdict(both[0])
    assert (verdict.state, verdict.cause) == (State.PAUSED, "broken")
    assert sorted(verdict.witnesses) == ["a", "b"]


@pytest.mark.parametrize("failure", [REPORTED, replace(WITNESSED, counts=Counts.CALLER)])
async def test_what_is_a_caller_s_own_is_no_witness(space, both, failure):
    assert await fail_for(space, *"abcabc", failure=failure) == [None] * 6
    if failure is REPORTED:
        assert await fail_for(space, "d") == [None]
    assert await live(space) == both


async def test_what_was_seen_long_ago_is_no_witness(space):
    first, _ = await fleet(space, 2)
    await space.mark("w0", **{f"{CALLER}a": failed(1, until_ms=await space.now_ms())})
    assert await fail_for(space, "b") == [None]
    assert sorted((await space.loads()).marks[first]) == [f"{CALLER}a", f"{CALLER}b"]


async def test_of_many_callers_the_latest_are_known(space):
    first, _ = await fleet(space, 2)
    await fail_for(space, *"abcdefghijklmn", failure=REPORTED)
    assert sorted((await space.loads()).marks[first]) == [f"{CALLER}{one}" for one in "ghijklmn"]


async def test_the_last_worker_is_tried_again_however_often_it_failed(space, failing, other):
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
    space, failing, other
):
    await fail_again(space, failing)
    await fail_again(space, failing)
    again = await space.worker("w0", resync=True)
    assert await live(space) == [other]
    assert (await space.loads()).paused == [again]
    restarted = await space.worker("w0", nonce="restarted")
    assert await live(space) == [other, restarted]
    assert await space.redis.exists(space.keys["verdicts"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "[]", "7", '{"failed":7}', '{"failed":{"count":"9","until_ms":[]}}'),
        '{"failed":{"count":9,"until_ms":99999999999999,"last_ms":99999999999999,"share":-1}}',
    ],
)
async def test_a_spoilt_record_counts_for_nothing(space, failing, other, text):
    await space.redis.hset(space.keys["verdicts"], mapping={"w0:0": text, "junk": text})
    await space.renew(failing)
    assert await live(space) == [failing, other]
    assert await space.suspend("r0") == failing
    assert (await known(space, failing)).count == 1


async def test_the_worker_is_found_by_the_id_of_the_reservation(space):
    first, second, _ = await fleet(space, 3)
    await space.reserve(first, "r", attempt="1000-aa")
    await space.reserve(second, "r", attempt="1000-bb")
    assert await space.suspend("r~bb") == second
    assert await space.suspend("r~cc") is None
