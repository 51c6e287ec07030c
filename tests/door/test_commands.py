"""How often a request speaks to Redis, and with how many commands."""

import asyncio
from collections import Counter
from functools import partial

import pytest
from aiohttp import web

from app.edge.app import Application
from app.router import history, reports
from app.state.scripts import ScriptRunner
from tests.door.conftest import completing, replica, until_serving
from tests.endings import all_endings
from tests.fake_worker import KEYS

OF_REQUESTS = {"match", "loads", "reserve", "prefill_complete", "release", "record"}
PROMPT = list(range(64))
USAGE = {"prompt_tokens": 64, "completion_tokens": 2, "total_tokens": 66}
CHUNK = b'data: {"choices":[{"index":0,"text":" word"}]}\n\n'
SEEN = {}
"""By user: whether the first token of its stream has come."""
LAST = (
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


class Trips:
    """Those to Redis that requests take from now on, each the names of its commands.

    clients: none leaves before so many requests are in the router. On a busy machine they would
    come one by one, and nothing would go together.
    """

    def __init__(self, monkeypatch):
        self.made = []
        self.clients = 0
        self._num_requests = 0
        self._changed = asyncio.Condition()
        send, answer = ScriptRunner._send, Application._answer

        async def sending(runner, node, calls, until_s):
            names = [one.name for one in calls]
            # Maintenance asks for loads, too.
            if OF_REQUESTS.intersection(names) and names[0] != "expire":
                async with self._changed:
                    await self._changed.wait_for(lambda: self._num_requests >= self.clients)
                self.made.append(names)
            return await send(runner, node, calls, until_s)

        async def answering(app, *request):
            await self._count(requests=1)
            try:
                await answer(app, *request)
            finally:
                await self._count(requests=-1)

        monkeypatch.setattr(ScriptRunner, "_send", sending)
        monkeypatch.setattr(Application, "_answer", answering)

    async def _count(self, *, requests=0, clients=0):
        async with self._changed:
            self._num_requests += requests
            self.clients += clients
            self._changed.notify_all()

    async def client(self, ask, number):
        """Ask so many times, one after another."""
        for _ in range(number):
            await ask()
        await self._count(clients=-1)


@pytest.fixture
def trips(monkeypatch):
    return Trips(monkeypatch)


async def by_client(client):
    """A client decides here, carries the request itself, and says what came of it."""
    made = (await client.post("/v1/route", json={"token_ids": PROMPT})).json()
    of_request = f"/v1/requests/{made['reservation_id']}"
    assert (await client.post(f"{of_request}/prefill_complete")).json()["found"]
    assert (await client.delete(f"{of_request}?output_tokens=2&ttft_ms=1")).json()["found"]


async def whole(client):
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": PROMPT})
    assert answer.status_code == 200


async def streamed(client):
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


async def complete(request):
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
        (by_client, 1, (4.1, 6)),
        (whole, 1, (2.1, 6)),
        (streamed, 1, (2.1, 6)),
        (by_client, 32, (0.7, 2)),
        (whole, 32, (0.5, 2)),
        (streamed, 32, (0.5, 2)),
    ],
)
async def test_a_request_costs_redis_no_more(
    one_redis_server, redis, trips, monkeypatch, ask, at_once, most
):
    """most: round trips and commands for each, of what one before has left over as well."""
    # What waits for others goes with them, or at the end, however slow the machine is.
    for module, pause in ((reports, "SOON_S"), (reports, "LOOK_S"), (history, "RECORD_PAUSE_S")):
        monkeypatch.setattr(module, pause, 3600.0)
    many = max(16, 2 * at_once)
    patient = {"redis_timeout_ms": 60_000}
    async with completing(redis, "a", complete), replica(one_redis_server.url, **patient) as client:
        await until_serving(client, 1)
        await ask(client)
        trips.made.clear()
        trips.clients = at_once
        asking = partial(trips.client, partial(ask, client), many // at_once)
        await asyncio.gather(*(asking() for _ in range(at_once)))
    assert len(await all_endings(redis, KEYS)) == 1 + many
    assert not await redis.exists(KEYS["endings"])  # their decisions' entries have them
    commands = Counter(name for names in trips.made for name in names)
    made = (len(trips.made) / (many + 1), commands.total() / (many + 1))
    assert made[0] <= most[0], commands
    assert made[1] <= most[1], commands
