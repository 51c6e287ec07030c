"""Prompts whose tokens nobody knows go where their session or their text went before."""

import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from tests.door.conftest import completing, replica, until_serving
from tests.eventually import eventually
from tests.fake_worker import KEYS

WORDS = random.Random(3)


@asynccontextmanager
async def blind_fleet(redis, url, path="/v1/chat/completions"):
    """Four workers that tokenize nothing."""

    async def complete(_):
        return web.json_response(
            {"choices": [{"message": {"content": "x"}}], "content": [], "output": []}
        )

    async with AsyncExitStack() as stack:
        for name in "abcd":
            await stack.enter_async_context(completing(redis, name, complete, path=path))
        door = await stack.enter_async_context(replica(url))
        await until_serving(door, 4)
        yield door


def said(characters):
    return "".join(WORDS.choices("abcdefghij ", k=characters))


async def worker_of(door, redis, path, body, **headers):
    """Which one answers, once that was written down."""
    before = await redis.hgetall(KEYS["sessions"])
    answer = await door.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvroute-trust"] == "blind"

    async def written():
        return await redis.hgetall(KEYS["sessions"])

    await eventually(written, lambda now: now != before)
    return answer.headers["x-kvroute-worker"]


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "more"),
    [
        ({"x-session-id": "s1"}, {}),
        ({"x-claude-code-session-id": "s1"}, {}),
        ({"x-session-affinity": "s1"}, {}),
        ({"session-id": "s1"}, {}),
        ({"session_id": "a session"}, {}),
        ({}, {"session_id": "s1"}),
        ({}, {"prompt_cache_key": "any text"}),
        ({}, {"metadata": {"user_id": "user_1_account__session_0a1b2c3d-0000-4000-8000-1"}}),
        ({}, {"metadata": {"user_id": '{"session_id": "0a1b2c3d-0000-4000"}'}}),
    ],
    ids=str,
)
async def test_a_blind_prompt_follows_its_session(one_redis_server, redis, headers, more):
    async with blind_fleet(redis, one_redis_server.url) as door:
        seen = set()
        for _ in range(6):
            body = {"model": "m", "messages": [{"role": "user", "content": said(30)}], **more}
            seen.add(await worker_of(door, redis, CHAT, body, **headers))
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("path", "member", "shape"),
    [
        (CHAT, "messages", {"role": "user", "content": ""}),
        (CHAT, "messages", {"role": "oracle", "of": {"deep": ["shape"]}, "content": ""}),
        ("/v1/messages", "messages", {"role": "user", "mood": "new", "content": ""}),
        ("/v1/responses", "input", {"type": "dream_call", "content": ""}),
    ],
    ids=str,
)
async def test_without_a_session_it_follows_what_its_text_begins_like(
    one_redis_server, redis, path, member, shape
):
    """Also where what is unlike anything known in it changes at its end, as cache marks do."""
    async with blind_fleet(redis, one_redis_server.url, path) as door:
        conversations = {n: [] for n in range(4)}
        seen = {n: set() for n in conversations}
        for _ in range(4):
            for number, turns in conversations.items():
                turns.append(shape | {"content": said(3000)})
                marked = [*turns[:-1], turns[-1] | {"cache_control": {"type": "ephemeral"}}]
                body = {"model": "m", "max_tokens": 9, member: marked}
                seen[number].add(await worker_of(door, redis, path, body))
        assert [len(workers) for workers in seen.values()] == [1, 1, 1, 1]
