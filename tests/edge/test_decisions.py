"""Recorded decisions: the stream that they are kept in, and the commands that read it."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from app.cli import main
from app.core.chains import positions
from app.policy import record
from app.policy.locality import Locality
from app.policy.record import decode, encode
from app.state import decisions
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import BLOCK_SIZE, KEYS, NAMESPACE, FakeWorkers
from tests.router.test_router import request, running

PROMPT = list(range(1, 42))
"""Ten full blocks of four tokens, and a partial one."""
SHORT = PROMPT[:9]
OTHER = list(range(100, 141))


@pytest.fixture
async def two(workers):
    """w1 holds PROMPT, w2 its first two blocks."""
    await workers.register("w1", max_requests=2)
    await workers.register("w2")
    await workers.publish("w1", PROMPT)
    await workers.publish("w2", SHORT)
    return workers


async def route(client, request_id, **body):
    answer = await client.post(
        "/v1/route", json={"token_ids": PROMPT, "request_id": request_id} | body
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def recorded(url, request_id):
    async with connect(url) as redis:

        async def look():
            async for record in decisions.read(redis, KEYS):
                if record.request_id == request_id:
                    return record
            return None

        found = await eventually(look)
    assert found is not None
    return found


async def kvroute(url, *arguments):
    where = ["--redis-url", url, "--namespace", NAMESPACE]
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *where])


async def as_json(url, *arguments):
    result = await kvroute(url, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


async def test_a_record_names_the_chosen_worker_and_the_one_with_the_longest_overlap(
    client, two, one_redis_server
):
    await route(client, "r1", exclude=["w1"])
    found = await recorded(one_redis_server.url, "r1")
    assert (found.worker, found.policy, found.locality) == ("w2:0", "latency", "excluded")
    assert (found.isl_tokens, found.full_blocks, found.overlap.total) == (41, 10, 2)
    assert (found.best, found.tries) == (("w1:0", 10), 1)
    assert len(found.blocks) == 10
    assert time.time() - 60 < found.at_ms / 1000 < time.time() + 60
    assert found.seen is not None
    assert found.seen.workers == ["w1:0", "w2:0"]
    assert found.seen.eligible == [False, True]
    assert found.seen.candidates.overlap_device.tolist() == [10, 2]


async def locality(client, url, request_id, **body):
    """The locality of a request, on which its answer, record and counter must agree."""

    async def counted():
        text = (await client.get("/metrics")).text
        return {
            reason: float(line.split()[1])
            for reason in Locality
            for line in text.splitlines()
            if line.startswith(f'kvroute_locality_total{{reason="{reason}"}}')
        }

    before = await counted()
    answer = await route(client, request_id, explain=True, **body)
    found = await recorded(url, request_id)
    assert answer["locality"] == found.locality
    assert answer["best_overlap"] == found.best._asdict()
    assert (found.best.worker == "") is (found.best.blocks == 0)
    after = await counted()
    assert after == before | {found.locality: before.get(found.locality, 0) + 1}
    return found.locality


async def test_locality_is_reported_as_kept_or_with_the_reason_for_its_loss(
    client, two, one_redis_server, redis
):
    url = one_redis_server.url
    assert await locality(client, url, "kept") == "kept"
    assert await locality(client, url, "none", token_ids=OTHER) == "none"
    assert await locality(client, url, "excluded", exclude=["w1"]) == "excluded"
    for request_id in ("kept", "none", "excluded"):
        await client.delete(f"/v1/requests/{request_id}")
    random = {
        await locality(client, url, f"random-{n}", policy="random", reserve=True)
        for n in range(8)
        if not (await client.delete(f"/v1/requests/random-{n - 1}")).is_error
    }
    assert random == {"kept", "tie"}
    await client.delete("/v1/requests/random-7")

    # While w1 is busy with a long prefill, w2 can start sooner.
    await route(client, "long", token_ids=list(range(1000, 60_000)), exclude=["w2"])
    assert await locality(client, url, "load") == "load"
    await route(client, "second", exclude=["w2"])
    assert await locality(client, url, "full") == "full"

    await redis.zadd(KEYS["leases"], {"1": 1})
    assert await locality(client, url, "lease") == "lease"
    assert (await recorded(url, "lease")).best.worker == "#1"


async def test_a_degraded_decision_has_degraded_locality(own_redis_server, replica):
    async with replica(own_redis_server.url, redis_timeout_ms=2000) as client:
        async with connect(own_redis_server.url) as redis:
            workers = FakeWorkers(redis)
            await workers.register("w1")
            await route(client, "r1")
        own_redis_server.kill()
        answer = await route(client, "r2", explain=True)
        assert (answer["degraded"], answer["locality"]) == (True, "degraded")
        text = (await client.get("/metrics")).text
        assert 'kvroute_locality_total{reason="degraded"} 1.0' in text


async def test_recording_and_its_details_can_be_switched_off(one_redis_server, replica, two, redis):
    async with replica(one_redis_server.url, decisions_kept=0) as client:
        await route(client, "r1")
    async with replica(one_redis_server.url, details_per_s=0) as client:
        await route(client, "r2")
        await route(client, "r3", explain=True)
        assert (await recorded(one_redis_server.url, "r3")).seen is not None
    assert (await recorded(one_redis_server.url, "r2")).seen is None
    assert await redis.xlen(KEYS["decisions"]) == 2


async def test_the_more_workers_there_are_the_fewer_decisions_are_kept_in_detail(
    one_redis_server, replica, two, monkeypatch
):
    monkeypatch.setattr(record, "DETAILED_WORKERS", 0.001)
    async with replica(one_redis_server.url, details_per_s=20) as client:
        await route(client, "r1")
        await asyncio.sleep(0.1)
        await route(client, "r2")
    assert (await recorded(one_redis_server.url, "r1")).seen is not None
    assert (await recorded(one_redis_server.url, "r2")).seen is None


async def test_few_workers_have_no_more_decisions_kept_in_detail_than_the_setting_says(
    one_redis_server, replica, two, monkeypatch
):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("app.router.history.time", clock)
    async with replica(one_redis_server.url, details_per_s=4) as client:
        kept = []
        for n in range(5):
            await route(client, f"r{n}")
            kept.append((await recorded(one_redis_server.url, f"r{n}")).seen is not None)
            clock.now += 0.125
    assert kept == [True, False, True, False, True]


async def test_a_long_prompt_decided_on_the_second_try_is_recorded_as_that_with_some_blocks(
    one_redis_server, two
):
    prompt = list(range(40 * BLOCK_SIZE))
    async with running(one_redis_server.url) as replica:

        async def overtake():
            for name in ("w1", "w2"):
                await two.occupy(name, f"rival of {name}")

        replica.meanwhile(overtake)
        chain = request("r1", prompt=prompt).chain
        assert (await replica.route(request("r1", prompt=prompt))).tries == 2
        found = await recorded(one_redis_server.url, "r1")
    assert found.tries == 2
    assert found.blocks == [chain[at - 1] for at in positions(40)]
    assert len(found.blocks) < 40


async def test_the_stream_of_decisions_is_trimmed(one_redis_server, replica, two, redis):
    async with replica(one_redis_server.url, decisions_kept=20) as client:
        for n in range(120):
            await route(client, f"r{n}")
            await client.delete(f"/v1/requests/r{n}")
        await recorded(one_redis_server.url, "r119")
    # Redis trims a stream by whole nodes of about 4 kB.
    assert 20 <= await redis.xlen(KEYS["decisions"]) < 60


async def test_a_malformed_entry_does_not_hide_the_others(client, two, one_redis_server, redis):
    await route(client, "r2")
    assert (await recorded(one_redis_server.url, "r2")).worker
    await redis.xadd(KEYS["decisions"], {"request_id": "r9"})
    assert (await recorded(one_redis_server.url, "r2")).worker


@pytest.fixture
async def decided(client, two, one_redis_server):
    """URL of a Redis with decisions about three requests with one prefix and one with another."""
    for n in range(3):
        await route(client, f"r{n}", explain=True, exclude=["w1"] if n == 2 else [])
        await client.delete(f"/v1/requests/r{n}")
    await route(client, "r3", explain=True, token_ids=OTHER)
    await recorded(one_redis_server.url, "r3")
    return one_redis_server.url


async def test_explain_shows_every_candidate_and_the_reason_for_the_choice(decided):
    text = (await kvroute(decided, "explain", "r2")).output
    assert "r2: 41 tokens to w2:0 by latency; the worker held 2 of 10 full blocks" in text
    assert (
        "excluded the worker with the longest overlap; w1:0 held the most, 10; decided on try 1"
        in text
    )
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [
        ["w1:0", "False"],
        ["w2:0", "True"],
    ]
    found = await as_json(decided, "explain", "r2")
    assert (found["locality"], found["best"], found["best_overlap"]) == ("excluded", "w1:0", 10)
    cheapest = found["candidates"][0]
    assert cheapest["worker"] == "w1:0"
    waits, own = ("queue_s", "memory_wait_s"), ("prefill_s", "blocking_s", "eviction_s")
    terms = (*waits, *own, "decode_s", "interference_s", "spread_s")
    assert sum(cheapest[term] for term in terms) == pytest.approx(cheapest["cost"])


async def test_explain_fails_for_a_decision_that_is_not_kept(decided):
    result = await kvroute(decided, "explain", "r77")
    assert result.exit_code == 1
    assert "no decision about 'r77' is kept (yet, or any longer)" in result.output


async def test_usage_counts_prefixes_over_a_window(decided):
    found = await as_json(decided, "inspect", "usage")
    assert found["decisions"] == 4
    assert [(p["num_blocks"], p["requests"]) for p in found["prefixes"]] == [(10, 3), (10, 1)]
    text = (await kvroute(decided, "inspect", "usage")).output
    assert text.splitlines()[-2].split() == [found["prefixes"][0]["block"], "10", "3"]
    async with connect(decided) as redis:
        entries = await redis.xrange(KEYS["decisions"])
        await redis.delete(KEYS["decisions"])
        for ahead_s, (_, fields) in zip((0, 0, 0, 5), entries, strict=True):
            record = decode(fields[decisions.FIELD])
            record.at_ms += 1000 * ahead_s
            await redis.xadd(KEYS["decisions"], {decisions.FIELD: encode(record)})
    assert (await as_json(decided, "inspect", "usage", "--window-s", "4"))["decisions"] == 1
    assert (await as_json(decided, "inspect", "usage", "--window-s", "6"))["decisions"] == 4


async def test_explain_applies_session_affinity_as_the_decision_did(
    workers, one_redis_server, replica, redis
):
    for name in ("w1", "w2"):
        await workers.register(name)
    url = one_redis_server.url
    async with replica(url, session_affinity=0.5) as client:
        answer = await client.post(
            "/v1/route", json={"token_ids": PROMPT}, headers={"x-session-id": "s"}
        )
        first = answer.json()["worker_id"]
        # Its prefill would make the queue longer than affinity allows for, until it has drained.
        await client.delete(f"/v1/requests/{answer.json()['request_id']}")
        await eventually(lambda: redis.hexists(KEYS["sessions"], "s"))
        again = await route(client, "r1", session_id="s", explain=True)
        await recorded(url, "r1")
    assert again["worker_id"] == first
    answered = {c["worker_id"] + ":0": c for c in again["candidates"]}
    assert answered[f"{first}:0"]["terms"]["affinity"] < 0
    explained = {c["worker"]: c for c in (await as_json(url, "explain", "r1"))["candidates"]}
    for name, candidate in answered.items():
        assert explained[name]["affinity"] == pytest.approx(candidate["terms"]["affinity"], 1e-5)
        assert explained[name]["cost"] == pytest.approx(candidate["cost"], 1e-5)


@pytest.mark.parametrize("session", ["a b", "x" * 129])
async def test_a_bad_session_id_is_refused(workers, one_redis_server, replica, session):
    await workers.register("w1")
    async with replica(one_redis_server.url, session_affinity=0.5) as client:
        body = {"token_ids": PROMPT, "session_id": session}
        answer = await client.post("/v1/route", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["field"] == "session_id"
