"""Answers that are kept for a moment."""

import asyncio
import time

import pytest

from app.console import kept
from app.console.kept import CachedAnswer, KeptAnswers
from app.core.errors import RedisUnavailable


async def test_however_many_ask_the_answer_is_made_once():
    made = 0
    may_end = asyncio.Event()

    async def make():
        nonlocal made
        made += 1
        await may_end.wait()
        return b"%d" % made

    answers = KeptAnswers(lambda: 7)
    asking = [asyncio.ensure_future(answers.of("q", make)) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()  # who asked first hangs up
    await asyncio.gather(asking[0], return_exceptions=True)
    asking.append(asyncio.ensure_future(answers.of("q", make)))
    await asyncio.sleep(0)
    may_end.set()
    found = await asyncio.gather(*asking[1:])
    assert {(answer.body, answer.at_ms) for answer in found} == {(b"1", 7)}
    assert (await answers.of("q", make)).body == b"1"
    assert (await answers.of("q", make, kept_s=0.0)).body == b"2"


async def test_what_redis_cannot_answer_is_answered_as_before_and_is_said_to_be(monkeypatch):
    async def fails():
        raise RedisUnavailable("it is away")

    async def works():
        return b"1"

    answers = KeptAnswers(lambda: None)
    with pytest.raises(RedisUnavailable):
        await answers.of("q", fails)
    assert (await answers.of("q", works)).stale == ""
    again = await answers.of("q", fails, kept_s=0.0)
    assert (again.body, again.stale) == (b"1", "it is away")
    assert (await answers.of("q", works, kept_s=0.0)).stale == ""
    an_hour_later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: an_hour_later)
    assert (await answers.of("q", fails)).stale == "it is away"


async def test_an_answer_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(kept, "TIMEOUT_S", 0.01)
    with pytest.raises(RedisUnavailable, match=r"within 0\.01 s"):
        await KeptAnswers(lambda: None).of("q", asyncio.Event().wait)


async def test_only_so_many_answers_are_kept(monkeypatch):
    monkeypatch.setattr(kept, "MAX_KEPT", 2)
    made = []

    async def ask(question):
        async def make():
            made.append(question)
            return question.encode()

        await answers.of(question, make, kept_s=60.0)

    answers = KeptAnswers(lambda: None)
    for question in ("a", "b", "c", "c", "b", "a"):
        await ask(question)
    assert made == ["a", "b", "c", "a"]


async def test_an_error_is_not_kept():
    results = iter((RedisUnavailable("away"), 1))

    async def make():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    value = CachedAnswer(make, 60.0)
    with pytest.raises(RedisUnavailable):
        await value.now()
    assert [await value.now(), await value.now()] == [1, 1]
