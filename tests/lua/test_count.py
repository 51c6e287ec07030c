import pytest

from app.core.usage import UsageSums, Who
from app.state import usage

ANN, TEAM = Who("ann", "acme", "a model"), Who("", "", "m")
ONE = UsageSums(requests=1, prompt_tokens=100, cached_tokens=60, output_tokens=7, waited_ms=5)
DAY_MS = 86_400_000


async def count(space, number, used, hour=7):
    return await space.do(usage.count(space.keys, hour, "r", number, used, kept_ms=DAY_MS))


async def read(space, hour=7):
    return dict((await usage.read(space.runner, space.keys, [hour]))[hour])


@pytest.mark.oldest_too
async def test_what_requests_used_is_added_up_by_who_sent_them(space):
    assert await count(space, 1, {ANN: ONE, TEAM: ONE})
    assert await count(space, 2, {ANN: ONE})
    assert await read(space) == {ANN: ONE.plus(ONE), TEAM: ONE}
    assert await read(space, 8) == {}
    assert 0 < await space.redis.pttl(f"{space.keys['usage:']}7") <= DAY_MS


async def test_what_is_sent_again_counts_once_and_so_does_what_came_before_it(space):
    assert await count(space, 2, {ANN: ONE})
    assert not await count(space, 2, {ANN: ONE})
    assert not await count(space, 1, {ANN: ONE})
    assert await read(space) == {ANN: ONE}


async def test_past_its_bound_an_hour_tells_new_names_no_more_apart(space, monkeypatch):
    monkeypatch.setattr(usage, "MAX_FIELDS", 2)
    await count(space, 1, {ANN: ONE})  # and the number of the call
    await count(space, 2, {ANN: ONE, TEAM: ONE, Who("", "new", "m"): ONE})
    others = Who("other", "other", "m")
    assert await read(space) == {ANN: ONE.plus(ONE), others: ONE.plus(ONE)}


@pytest.mark.parametrize("text", ["", "1 2 3", "a b c d e f g h", "-1 0 0 0 0 0 0 0"])
async def test_what_cannot_be_read_is_left_out_and_written_anew(space, text):
    await space.redis.hset(f"{space.keys['usage:']}7", "ann acme a model", text)
    assert await read(space) == {}
    await count(space, 1, {TEAM: ONE})
    assert await read(space) == {TEAM: ONE}
