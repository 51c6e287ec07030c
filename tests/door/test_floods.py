"""One client of many sends what engines fail: no other client loses an engine by it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from app.core.failures import REPORTED, Counts
from tests.door.sick_fleet import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    asked,
    few_quick,
    sick_fleet,
    statuses,
)
from tests.eventually import eventually
from tests.fakes.faults import Faults

NUM_ENGINES = 6
OTHERS = ("ann", "bob", "cat", "dan")
"""Whose requests are like anybody's."""
REFUSED_AS_TOO_LONG = '{"error":{"message":"longer than the context length","code":400}}'


@dataclass(frozen=True, slots=True)
class Flood:
    """faults: that each engine has for the client's requests alone. carries: the client asks where
    to go, and says that the worker failed. settings: of the router."""

    faults: Faults = field(default_factory=Faults)
    path: str = COMPLETIONS
    stream: bool = False
    carries: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


AN_HOUR = {"retry-after": "3600"}
FLOODS = {
    "429": Flood(Faults(status=429, headers={"retry-after": "60"})),
    "worker_failed": Flood(carries=True),
    "ends the connection": Flood(Faults(how="reset first")),
    "ends a stream": Flood(Faults(how="reset within"), stream=True),
    "an error event": Flood(Faults(how="error first"), CHAT, stream=True),
    "an error event within": Flood(Faults(how="error within"), CHAT, stream=True),
    "500": Flood(Faults(status=500)),
    "502": Flood(Faults(status=502)),
    "503": Flood(Faults(status=503, headers=AN_HOUR)),
    "404": Flood(Faults(status=404), CHAT),
    "an empty answer": Flood(Faults(how="empty")),
    "half an answer": Flood(Faults(how="unfinished"), stream=True),
    "too long": Flood(Faults(status=400, body=REFUSED_AS_TOO_LONG)),
    "never answered": Flood(Faults(how="silent"), stream=True, settings={"answer_timeout_s": 0.5}),
    "embeddings": Flood(Faults(status=500), EMBEDDINGS),
}


class Clients:
    """Of one router: the one that floods it, and others."""

    def __init__(self, fleet, flood):
        self.fleet, self.flood = fleet, flood
        [self.door] = fleet.doors
        self.answers = []
        """To others."""

    def _headers(self, name):
        return {"authorization": f"Bearer key-of-{name}"}

    async def post(self, name, path, body):
        return await self.door.post(path, json=body, headers=self._headers(name))

    async def poison(self, number):
        """A request of the flood."""
        if self.flood.carries:
            headers, asks = self._headers("flood"), {"token_ids": [number] * 8}
            place = (await self.post("flood", "/v1/route", asks)).json()
            if "reservation_id" in place:
                end = f"/v1/requests/{place['reservation_id']}?worker_failed=true"
                await self.door.delete(end, headers=headers)
            return
        more = {"stream": True} if self.flood.stream else {}
        body = asked(self.flood.path, f"{number}", user="flood", **more)
        with suppress(httpx.HTTPError):
            await self.post("flood", self.flood.path, body)

    async def others(self):
        """Ask one after another, until cancelled."""
        number = 0
        while True:
            name, number = OTHERS[number % len(OTHERS)], number + 1
            answer = await self.post(name, COMPLETIONS, asked(COMPLETIONS, f"{number}"))
            self.answers.append(answer)

    async def look(self):
        """How many engines are routed to."""
        shown = await self.door.get("/v1/workers", headers=self._headers("ann"))
        return len(shown.json()["workers"])

    async def looks(self, seen):
        while True:
            seen.append(await self.look())
            await asyncio.sleep(0.05)

    async def shares(self):
        """What each engine gets of what the others ask; 1.0: as much as if all got the same."""
        before = len(self.answers)
        await eventually(lambda: _many(self.answers, before + 90))
        by = [answer.headers["x-kvroute-worker"] for answer in self.answers[before:]]
        names = [f"e{number}:0" for number in range(NUM_ENGINES)]
        return [by.count(name) * NUM_ENGINES / len(by) for name in names]


async def _many(answers, least):
    return len(answers) >= least


@asynccontextmanager
async def clients_of(redis, url, flood, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} key-of-{name}\n" for name in ("flood", *OTHERS)))
    given = {"api_key_file": str(keys), "api_key": "key-of-all"}
    async with sick_fleet(redis, url, NUM_ENGINES, **given, **flood.settings) as fleet:
        for engine in fleet.engines:
            engine.faults = replace(flood.faults, only="flood")
        yield Clients(fleet, flood)


async def fewest(clients, rate, poisons):
    """The fewest engines that any look finds during the flood, and the shares of others then."""
    seen = []
    async with asyncio.TaskGroup() as tasks:
        going = [tasks.create_task(clients.others()) for _ in OTHERS]
        going.append(tasks.create_task(clients.looks(seen)))
        for number in range(poisons):
            tasks.create_task(clients.poison(number))
            await asyncio.sleep(1 / rate)
        shares = await clients.shares()
        for one in going:
            one.cancel()
    return min(seen), shares


@pytest.mark.parametrize("name", few_quick(FLOODS, "429", "an error event within"))
@pytest.mark.parametrize("rate", [pytest.param(1, marks=pytest.mark.slow), 17])
async def test_one_client_takes_no_engine_from_others(
    one_redis_server, redis, tmp_path, name, rate
):
    async with clients_of(redis, one_redis_server.url, FLOODS[name], tmp_path) as clients:
        least, shares = await fewest(clients, rate, poisons=60 if rate > 1 else 8)
        assert least >= NUM_ENGINES - 1
        assert statuses(clients.answers).keys() == {200}
        assert min(shares) >= 0.4, shares


TAKING = ("worker_failed", "ends the connection", "an error event within", "429", "500")


def for_all(failure, *_):
    return Counts.ALL


@pytest.mark.parametrize("name", few_quick(TAKING, "worker_failed"))
async def test_without_witnesses_the_same_flood_takes_them(
    one_redis_server, redis, tmp_path, monkeypatch, name
):
    monkeypatch.setattr("app.door.evidence.counts_for", for_all)
    word = replace(REPORTED, weight=0.3, counts=Counts.ALL)
    monkeypatch.setattr("app.edge.route.REPORTED", word)
    async with clients_of(redis, one_redis_server.url, FLOODS[name], tmp_path) as clients:
        least, _ = await fewest(clients, 17, poisons=60)
        assert least < NUM_ENGINES - 1


@pytest.mark.parametrize("name", few_quick(TAKING[2:], "an error event within"))
async def test_what_two_callers_meet_is_the_engine_s(one_redis_server, redis, tmp_path, name):
    """One engine has the fault for everybody."""
    flood = FLOODS[name]
    more = {"stream": True} if flood.stream else {}
    async with clients_of(redis, one_redis_server.url, flood, tmp_path) as clients:
        for number, engine in enumerate(clients.fleet.engines):
            engine.faults = Faults() if number else flood.faults
        clients.fleet.path = flood.path

        async def share():
            before = clients.fleet.came()
            async with asyncio.TaskGroup() as tasks:
                for number in range(48):
                    name, body = (
                        OTHERS[number % len(OTHERS)],
                        asked(flood.path, f"{number}", **more),
                    )
                    tasks.create_task(clients.post(name, flood.path, body))
                    await asyncio.sleep(0.01)
            got = [now - then for now, then in zip(clients.fleet.came(), before, strict=True)]
            return got[0] * NUM_ENGINES / sum(got)

        await share()
        assert await share() <= 0.5
