import pytest

from app.core.types import WorkerKey
from app.state import leases


async def answers_again(space, names):
    return await space.do(leases.answers_again(space.keys, WorkerKey("a"), names))


@pytest.mark.oldest_too
async def test_a_worker_that_answers_again_is_left_alone_for_that_no_more(space, inc):
    until_ms = await space.now_ms() + 60_000
    names = ("lacks /tokenize", "lacks poems", "caller b")
    await space.mark("a", **{name: {"until_ms": until_ms} for name in names})
    assert await answers_again(space, ("lacks /tokenize", "caller b", "lacks prose")) == 2
    assert list((await space.loads()).marks[inc]) == ["lacks poems"]
    assert await answers_again(space, ("lacks poems",)) == 1
    assert await answers_again(space, ("lacks poems",)) == 0
    assert await space.redis.exists(space.keys["verdicts"]) == 0
