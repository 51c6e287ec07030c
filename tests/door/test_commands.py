"""How often a request speaks to Redis, and with how many commands."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from app.router import history, reports
from app.state.exchange import Node
from app.state.scripts import Call, ScriptRunner
from tests.door.conftest import completing, replica, until_serving
from tests.eventually import eventually
from tests.fake_worker import KEYS

OF_REQUESTS = {"match", "loads", "reserve", "prefill_complete", "release", "record"}
PROMPT = list(range(64))
USAGE = {"prompt_tokens": 64, "completion_tokens": 2, "total_tokens": 66}
CHUNK = b'data: {"choices":[{"index":0,"text":" word"}]}\n\n'
SEEN: dict[str, asyncio.Event] = {}
"""By user: whether the first token of its stream has come."""
LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The round trips that requests take from now on, each the names of its commands."""
    sent: list[list[str]] = []
    send = ScriptRunner._send

    async def noting(runner: ScriptRunner, node: Node, calls: list[Call[Any]]) -> list[Any]:
        names = [one.name for one in calls]
        # Maintenance asks for loads, too.
        if OF_REQUESTS.intersection(names) and names[0] != "expire":
            sent.append(names)
        return await send(runner, node, calls)

    monkeypatch.setattr(ScriptRunner, "_send", noting)
    return sent


async def by_client(client: httpx.AsyncClient) -> None:
    """A client decides here, carries the request itself, and says what came of it."""
    made = (await client.post("/v1/route", json={"token_ids": PROMPT})).json()
    of_request = f"/v1/requests/{made['reservation_id']}"
    assert (await client.post(f"{of_request}/prefill_complete")).json()["found"]
    assert (await client.delete(f"{of_request}?output_tokens=2&ttft_ms=1")).json()["found"]


async def whole(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": PROMPT})
    assert answer.status_code == 200


async def streamed(client: httpx.AsyncClient) -> None:
    """The end comes once the client has seen the first token."""
    user = f"u{len(SEEN)}"
    SEEN[user] = asyncio.Event()
    asked = {"model": "m", "prompt": PROMPT, "stream": True, "user": user}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        SEEN[user].set()
        async for piece in pieces:
            text += piece
    assert text.endswith("[DONE]\n\n")


async def complete(request: web.Request) -> Any:
    """As an engine does."""
    asked = await request.json()
    if not asked.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": "a word"}], "usage": USAGE})
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(CHUNK)
    await SEEN[asked["user"]].wait()
    await answer.write(LAST)
    return answer


@pytest.mark.parametrize(
    ("ask", "at_once", "most"),
    [
        (by_client, 1, (4.5, 7)),
        (whole, 1, (2.5, 6)),
        (streamed, 1, (2.5, 6)),
        (by_client, 32, (2.5, 5)),
        (whole, 32, (1, 3.5)),
        (streamed, 32, (1, 4)),
    ],
)
async def test_a_request_costs_redis_no_more(
    one_redis_server: EmbeddedRedis,
    redis: Redis,
    trips: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[httpx.AsyncClient], Awaitable[None]],
    at_once: int,
    most: tuple[float, float],
) -> None:
    """most: round trips and commands for each."""
    # However slow the machine is.
    monkeypatch.setattr(reports, "SOON_S", 0.5)
    monkeypatch.setattr(history, "RECORD_PAUSE_S", 0.5)
    many = max(16, 2 * at_once)
    async with completing(redis, "a", complete), replica(one_redis_server.url) as client:

        async def one_after_another(number: int) -> None:
            for _ in range(number):
                await ask(client)

        async def recorded() -> int:
            return int(await redis.xlen(KEYS["endings"]))

        await until_serving(client, 1)
        await ask(client)
        await eventually(recorded, lambda number: number == 1)
        trips.clear()
        await asyncio.gather(*(one_after_another(many // at_once) for _ in range(at_once)))
        await eventually(recorded, lambda number: number == 1 + many)
    commands = Counter(name for names in trips for name in names)
    made = (len(trips) / many, commands.total() / many)
    assert made[0] <= most[0], commands
    assert made[1] <= most[1], commands
