"""Clients of the fleet, of each API, and how each request of theirs ended."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import orjson

GIVES_UP_S = 60.0
SYSTEM = "You are of the fleet that never fails, and say so in eight words. " * 4
RATE = 12.0
"""Requests a second: some ten are in flight, of which each engine could take them all."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request. Times are monotonic seconds. failure: "" if it was answered to its end."""

    began_s: float
    ended_s: float
    failure: str = ""

    @property
    def took_s(self):
        return self.ended_s - self.began_s


async def play(http, urls, ended):
    """Send requests, until cancelled; then wait for no answer. urls: of the replicas."""
    asked = _bodies(random.Random(1))
    async with asyncio.TaskGroup() as tasks:
        for turn in itertools.count():
            path, body = next(asked)
            tasks.create_task(_ask(http, urls, turn, path, body, ended))
            await asyncio.sleep(1 / RATE)


def _bodies(rng):
    """Path and body of one request after another; three of four are streamed."""
    for number in itertools.count():
        said = f"{number} " + "".join(rng.choices("abcdefgh ", k=rng.randrange(100, 800)))
        messages = [{"role": "user", "content": f"{SYSTEM}{said}"}]
        kinds = [
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": list(f"{SYSTEM}{said}".encode())}),
            ("/v1/messages", {"messages": messages}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": f"{SYSTEM}{said}"}),
        ]
        path, body = kinds[number % len(kinds)]
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        yield path, {"model": "m", limit: 8, "stream": number % 4 != 3, **body}


async def _ask(http, urls, turn, path, body, ended):
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(GIVES_UP_S):
            status, text = await _answer(http, urls, turn, path, body)
        failure = _failure(status, text, path, streams=body["stream"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        failure = type(error).__name__
    ended.append(Ended(began_s, time.monotonic(), failure))


async def _answer(http, urls, turn, path, body):
    """Asks the replica whose turn it is, or the next one if that no longer listens."""
    there = urls()
    for place in range(len(there)):
        url = there[(turn + place) % len(there)]
        with suppress(aiohttp.ClientConnectorError):
            async with http.post(f"{url}{path}", json=body) as answer:
                return answer.status, await answer.read()
    raise ConnectionRefusedError


def _failure(status, text, path, *, streams):
    if status != 200:
        return f"{status}"
    if not streams:
        try:
            said = orjson.loads(text)
        except ValueError:
            return "broken body"
        return "error in a 200" if said.get("error") else ""
    if b'"error"' in text or b"event: error" in text or b"response.failed" in text:
        return "error event"
    return "" if _ENDS[path] in text else "no end"


_ENDS = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/completions": b"data: [DONE]",
    "/v1/messages": b"event: message_stop",
    "/v1/responses": b"event: response.completed",
}
