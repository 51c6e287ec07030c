"""What keys have used is what the access log says, whatever becomes of requests and replicas."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from contextlib import contextmanager, suppress

import httpx
import orjson
import pytest

from app.ops.usage import answer
from app.state.connect import connect
from tests.door.conftest import replica, sick_worker, until_serving
from tests.e2e.engines import Process
from tests.edge.test_metrics import scrape
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE
from tests.fakes.faults import Faults
from tests.redis_servers import stopped

REQUESTS = int(os.environ.get("USAGE_REQUESTS", "300"))
AT_ONCE = 24
PATH = "/v1/completions"
FIELDS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "by_router")
KEY_FILE = "ann a\nbob b\nops o operator\n"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def body(tokens, **more):
    return {"model": "m", "prompt": [*range(1, tokens + 1)], "max_tokens": 8} | more


async def by_key(redis):
    rows = (await answer(redis, KEYS, "key", 2))["rows"]
    return {row["name"]: {name: row[name] for name in FIELDS} for row in rows}


def logged(*files):
    """The sums of all lines with a key, but of paths about models; and how many lines were left
    out, whoever's they were."""
    sums, left_out = {}, 0
    for line in (orjson.loads(text) for file in files for text in file.read_text().splitlines()):
        if not line["key"] or line["path"].startswith("/v1/models"):
            continue
        of_key = sums.setdefault(line["key"], Counter(dict.fromkeys(FIELDS, 0)))
        of_key["requests"] += 1
        left_out += line.get("left_out", 0)
        if line["counted_by"]:
            for name in FIELDS[1:-1]:
                of_key[name] += line[name] or 0
        of_key["by_router"] += line["counted_by"] == "router"
    return {key: dict(counts) for key, counts in sums.items()}, left_out


@contextmanager
def router(server, folder, name):
    """A replica as a process, and the file of its access log."""
    lines, keys = folder / name, folder / "keys"
    keys.write_text(KEY_FILE)
    shell = ("sh", "-c", f'exec {sys.executable} -m app.cli "$@" > {lines}', "sh")
    flags = (f"--redis-url={server.url}", f"--namespace={NAMESPACE}", "--port=0", "--access-log")
    process = Process("router", *flags, f"--api-key-file={keys}", command=shell)
    with process.ending():
        yield process, lines


async def begun(*engines):
    async def running():
        return sum(engine.running for engine in engines)

    await eventually(running)


async def ask(urls, client, chance, *, stays=False):
    """One request: whole, streamed, or given up in its midst, to one of the replicas."""
    kind, key = chance.random() * (0.7 if stays else 1.0), chance.choice("ab")
    asked = body(chance.randrange(1, 400), stream=kind > 0.3)
    url = chance.choice(urls) + PATH
    with suppress(httpx.TransportError):
        if kind <= 0.7:
            await client.post(url, json=asked, headers=bearer(key))
            return
        async with client.stream("POST", url, json=asked, headers=bearer(key)) as reply:
            async for _ in reply.aiter_bytes():
                if chance.random() < 0.3:
                    return


@pytest.mark.timeout(300 + REQUESTS / 5)
async def test_usage_is_the_sum_of_the_log_with_hang_ups_retries_and_a_killed_replica(
    one_redis_server, redis, tmp_path
):
    chance = random.Random(7)

    def falls_ill(_):
        return Faults(status=500) if chance.random() < 0.05 else Faults(token_s=0.004)

    async with (
        sick_worker(redis, "a") as a,
        sick_worker(redis, "b") as b,
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client,
    ):
        a.choose = b.choose = falls_ill
        with (
            router(one_redis_server, tmp_path, "one") as (one, first),
            router(one_redis_server, tmp_path, "two") as (two, second),
        ):
            urls, left = [one.url, two.url], REQUESTS
            for url in urls:
                async with httpx.AsyncClient(base_url=url, headers=bearer("o")) as operator:
                    await until_serving(operator, 2)
            while left > 0:
                await asyncio.gather(*(ask(urls, client, chance) for _ in range(AT_ONCE)))
                left -= AT_ONCE
                if left < REQUESTS / 2 and len(urls) == 2:
                    await asyncio.sleep(0.1)  # what is ended is told within 5 ms
                    a.choose = b.choose = lambda _: Faults(token_s=5.0)
                    asks = [ask(urls[1:], client, chance, stays=True) for _ in range(9)]
                    dying = [asyncio.create_task(one) for one in asks]
                    await begun(a, b)
                    two.end(signal.SIGKILL)
                    await asyncio.gather(*dying)
                    a.choose = b.choose = falls_ill
                    del urls[1]
            await asyncio.sleep(0.1)
        sums, left_out = logged(first, second)
        async with connect(one_redis_server.url) as own:
            used = await by_key(own)
        requests = [sum(one.pop("requests") for one in of.values()) for of in (used, sums)]
        assert used == sums
        assert requests[0] == requests[1] + left_out >= REQUESTS - AT_ONCE
        assert all(one["by_router"] for one in sums.values()), "clients hung up"
        text = first.read_text()
        assert '"tries":2' in text, "requests were taken from engines"


async def test_what_redis_did_not_answer_is_told_again_and_counts_once(own_redis_server):
    url = own_redis_server.url
    async with (
        connect(url) as redis,
        sick_worker(redis, "a"),
        replica(url, redis_timeout_ms=100) as door,
    ):
        await until_serving(door, 1)
        for _ in range(3):
            with stopped(own_redis_server.pid):
                answers = [door.post(PATH, json=body(9)) for _ in range(4)]
                assert {one.status_code for one in await asyncio.gather(*answers)} == {200}
                await asyncio.sleep(0.3)

        async def requests():
            return (await by_key(redis)).get("anonymous", {}).get("requests", 0)

        assert await eventually(requests, lambda number: number >= 12) == 12


async def test_an_operator_sees_who_used_what_and_others_do_not(
    one_redis_server, redis, tmp_path, monkeypatch
):
    file = tmp_path / "keys"
    file.write_text(KEY_FILE)
    monkeypatch.setattr("app.door.told.metrics.MAX_KEYS", 1)
    async with (
        sick_worker(redis, "a"),
        replica(one_redis_server.url, api_key_file=str(file)) as door,
    ):
        door.headers.update(bearer("o"))
        await until_serving(door, 1)
        for key, count in (("a", 2), ("b", 1)):
            for _ in range(count):
                await door.post(PATH, json=body(50), headers=bearer(key))
        assert (await door.post(PATH, json=body(1), headers=bearer("?"))).status_code == 401
        lost = body(1, model="?")
        assert (await door.post(PATH, json=lost, headers=bearer("b"))).status_code == 404

        async def shown(**asked):
            reply = await door.get("/v1/usage", params=asked)
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

        found = await eventually(shown, lambda all_of: all_of["total"]["requests"] == 4)
        rows = [(row["name"], row["requests"], row["refused"]) for row in found["rows"]]
        assert rows == [("ann", 2, 0), ("bob", 2, 1)]
        assert [row["name"] for row in (await shown(by="model", since="1h"))["rows"]] == [
            "m",
            "unknown",
        ]
        table = (await door.get("/console/api/usage")).json()
        assert [row[:2] for row in table["rows"]] == [["ann", 2], ["bob", 2]]
        for asked in ({"by": "?"}, {"since": "0d"}, {"since": "9999d"}, {"more": "1"}):
            assert (await door.get("/v1/usage", params=asked)).status_code == 422
        for key in "ab":
            reply = await door.get("/v1/usage", headers=bearer(key))
            assert reply.status_code == 401
        metrics = await scrape(door)
    counted = [("ann", "ok", 2), ("other", "ok", 1), ("other", "refused", 1)]
    for key, ended, number in counted:
        assert metrics("key_requests_total", key=key, ended=ended) == number
