"""First tokens that come late: lua/lib/late.lua, by the two scripts that hear of them."""

import pytest

from app.core.verdicts import LATE, parse_marks
from app.state import reservations
from app.state.reservations import PrefillComplete, Release
from tests.lua.conftest import LONG_MS


async def late_ms(space):
    """How late first tokens of `a:0` come, as its record has it; None: it has none."""
    text = await space.redis.hget(space.keys["verdicts"], "a:0")
    mark = parse_marks(text).get(LATE) if text else None
    return None if mark is None else mark.late_ms


async def told(space, request_id, late_ms):
    one = PrefillComplete(request_id, LONG_MS, late_ms=late_ms)
    await space.do(reservations.prefill_complete(space.keys, [one]))


async def test_how_late_first_tokens_come_is_a_mean_that_those_in_time_end(space, inc):
    seen = []
    for number, late in enumerate((0, None, 8000, 8000, None, 0, 0, 0, 0, 0, 0)):
        await space.reserve(inc, f"r{number}")
        await told(space, f"r{number}", late)
        seen.append(await late_ms(space))
    assert seen[:2] == [None, None]
    # It fades by a few thousandths meanwhile.
    assert seen[2:7] == [pytest.approx(ms, rel=0.2) for ms in (4000, 6000, 6000, 3000, 1500)]
    assert seen[-1] is None


async def test_one_told_with_the_end_counts_once(space, inc):
    await space.reserve(inc, "r1")
    await told(space, "r1", 1000)
    assert await late_ms(space) == 500
    await space.release_all(Release("r1", late_ms=9000))  # its first token was out
    assert await late_ms(space) == 500
    await space.reserve(inc, "r2")
    await space.release_all(Release("r2", late_ms=9000))
    assert await late_ms(space) == pytest.approx(4750, rel=0.1)
