import pytest

from app.state import replicas


@pytest.mark.oldest_too
async def test_a_replica_is_known_until_it_ends(space):
    at_ms = await space.do(replicas.beat(space.keys, "one", {"waiting": 3}))
    await space.do(replicas.beat(space.keys, "two", {}))
    now_ms, said = await replicas.read(space.redis, space.keys)
    assert at_ms <= now_ms
    assert said["one"] == (at_ms, {"waiting": 3})
    await space.do(replicas.beat(space.keys, "two", None))
    _, said = await replicas.read(space.redis, space.keys)
    assert said.keys() == {"one"}


@pytest.mark.parametrize("text", ["1 {}", "99999999999999 {}", "no time", ""])
async def test_one_that_has_not_spoken_lately_is_forgotten_when_another_does(space, text):
    await space.redis.hset(space.keys["replicas"], "old", text)
    await space.do(replicas.beat(space.keys, "new", {}))
    _, said = await replicas.read(space.redis, space.keys)
    assert said.keys() == {"new"}


async def test_what_cannot_be_read_is_left_out(space):
    now_ms = await space.do(replicas.beat(space.keys, "one", {}))
    await space.redis.hset(space.keys["replicas"], "bad", f"{now_ms} [")
    _, said = await replicas.read(space.redis, space.keys)
    assert said.keys() == {"one"}
