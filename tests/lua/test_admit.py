import asyncio

import pytest

from app.core.key_rules import parse_rules
from app.state import admission
from app.state.admission import LOOKS, admit, row_of
from tests.eventually import eventually

LEASE_MS = 10_000


def rules(*words):
    return parse_rules("ann", list(words), ())


async def ask(space, key, *, replica="r", number=1, held=0, times=1, lease_ms=LEASE_MS, **more):
    chosen = {"asks": True, "requests": 1} | more
    rows = [row_of(key, held, **chosen) for _ in range(times)]
    return await space.do(admit(space.keys, replica, number, rows, lease_ms=lease_ms))


@pytest.mark.oldest_too
async def test_a_burst_is_let_in_and_then_what_the_rate_allows(space):
    key = rules("requests=600/m")
    answers = await ask(space, key, times=102)
    assert [one.refused for one in answers] == [""] * 100 + ["requests"] * 2
    assert [one.requests for one in answers[:3]] == [99, 98, 97]
    assert 0 < answers[-1].number <= 100, "one comes each 100 ms"

    async def asked():
        return (await ask(space, key))[0]

    assert (await eventually(asked, lambda one: not one.refused, within_s=1.0)).requests == 0


async def test_all_replicas_take_from_one_bucket(space):
    key = rules("requests=60/h")
    calls = [ask(space, key, replica=f"r{n % 4}", number=n, times=2) for n in range(1, 13)]
    answers = [one for some in await asyncio.gather(*calls) for one in some]
    assert sum(not one.refused for one in answers) == 10
    for n in range(4):
        [one] = await ask(space, key, replica=f"r{n}", number=99, asks=LOOKS, requests=0)
        assert one.replicas == n + 1


async def test_tokens_beyond_the_estimate_are_waited_for_and_others_given_back(space):
    key = rules("tokens=6000/h")  # 1000 at once
    assert [one.refused for one in await ask(space, key, tokens=900)] == [""]
    assert [one.refused for one in await ask(space, key, tokens=900)] == ["tokens"]
    settle = {"asks": False, "requests": 0}
    await ask(space, key, number=2, **settle, tokens=-800)
    [one] = await ask(space, key, number=3, tokens=900)
    assert (one.refused, one.tokens) == ("", 0)
    await ask(space, key, number=4, **settle, tokens=1000)
    [one] = await ask(space, key, number=5, tokens=1)
    assert one.refused == "tokens"
    assert one.number == pytest.approx(1001 / 6000 * 3_600_000, rel=0.01)


async def test_a_request_larger_than_a_full_bucket_is_let_in_if_that_is_full(space):
    key = rules("tokens=600/h")
    assert [one.refused for one in await ask(space, key, tokens=5000, times=2)] == ["", "tokens"]


async def test_of_what_is_to_be_computed_the_share_cached_lately_is_left_out(space):
    key = rules("uncached=60M/h")
    [one] = await ask(space, key, uncached=1000)
    assert one.number == 1000
    for number in range(2, 42):
        used = {"prompt_tokens": 1000, "cached_tokens": 900}
        await ask(space, key, number=number, asks=False, requests=0, **used)
    [one] = await ask(space, key, number=50, uncached=1000)
    assert one.number == pytest.approx(110, abs=10)


async def test_places_are_counted_over_replicas_and_come_back_from_one_that_is_gone(space):
    key = rules("concurrent=3")
    first = await ask(space, key, times=2, lease_ms=200)
    second = await ask(space, key, replica="s", times=2)
    assert [one.refused for one in (*first, *second)] == ["", "", "", "concurrent"]
    [one] = await ask(space, key, replica="s", number=2, held=1)
    assert one.refused == "concurrent"

    async def asked():
        return (await ask(space, key, replica="s", number=3, held=1))[0].refused

    assert await eventually(asked, lambda refused: not refused, within_s=5.0) == ""


async def test_what_a_later_call_has_said_counts_and_not_what_an_earlier_one_says(space):
    key = rules("concurrent=3")
    assert (await ask(space, key, number=5, held=2))[0].refused == ""
    assert (await ask(space, key, number=4, held=0))[0].refused == "concurrent"
    assert (await ask(space, key, number=6, held=0))[0].refused == ""


@pytest.mark.parametrize("text", ["", "x", "1e9 0", "nan", "inf", "-5", "1e18"])
async def test_what_somebody_wrote_there_stops_nobody(space, text):
    name = f"{space.keys['limits:']}ann"
    fields = (
        "requests_until",
        "tokens_until",
        "uncached_until",
        "cached_share",
        "held r",
        "held other",
    )
    await space.redis.hset(name, mapping=dict.fromkeys(fields, text))
    key = rules("requests=10/m", "tokens=1k/m", "uncached=1k/m", "concurrent=1")
    assert [one.refused for one in await ask(space, key)] == [""]
    await ask(space, key, asks=LOOKS, requests=0)
    assert 0 < await space.redis.pttl(name) <= admission.KEPT_MS
