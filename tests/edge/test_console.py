"""The console's paths over HTTP, on a real Redis with fake workers."""

import asyncio
import itertools

import pytest

from app.console import console, kept, roster, sampler
from app.console.page import POLICY
from app.core.worker_report import ForwardPassMetrics
from app.state import replicas
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers
from tests.redis_servers import stopped

API = "/console/api"
ASKED = {"x-kvroute-console": "1"}
PROMPT = list(range(8))


def objects(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


async def answer(client, path, **params):
    reply = await client.get(f"{API}/{path}", params=params)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def route(client, request_id, **more):
    body = {"token_ids": PROMPT, "request_id": request_id} | more
    reply = await client.post("/v1/route", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture
async def fleet(workers):
    """w1 holds all of PROMPT, w2 nothing."""
    for name in ("w1", "w2"):
        await workers.register(name, models=("llama",))
        measured = ForwardPassMetrics(gpu_cache_usage_perc=0.25, device_blocks=2, disk_blocks=0)
        await workers.report(name, measured)
    await workers.publish("w1", PROMPT)
    return workers


async def test_the_overview_counts_what_all_replicas_decided(one_redis_server, replica, fleet):
    async with replica(one_redis_server.url) as one, replica(one_redis_server.url) as two:
        for number in range(4):
            await route(one if number % 2 else two, f"r{number}")

        async def seen():
            return dict(await answer(one, "overview"))

        found = await eventually(seen, lambda o: sum(o["localities"].values()) == 4)
        assert found["localities"] == {"kept": 4}
        assert found["tiles"]["workers"] == 2
        assert found["tiles"]["cached_share"] is None, "no engine has answered"
        replicas = objects(found["replicas"])
        assert len(replicas) == 2
        assert [r["this"] for r in replicas].count(True) == 1
        assert found["redis"]["used_bytes"] > 0
        other = await eventually(
            lambda: answer(two, "overview"), lambda o: sum(o["localities"].values()) == 4
        )
        assert other["localities"] == found["localities"]


async def test_a_replica_that_ends_is_not_shown_any_more(one_redis_server, replica, fleet):
    async with replica(one_redis_server.url) as one:
        async with replica(one_redis_server.url):
            await eventually(
                lambda: answer(one, "overview"), lambda o: len(o["replicas"]["rows"]) == 2
            )
        await eventually(lambda: answer(one, "overview"), lambda o: len(o["replicas"]["rows"]) == 1)


async def test_workers_are_rows_and_one_that_is_gone_stays_for_a_while(client, fleet):
    await fleet.occupy("w2", "r1", prefill_s=300.0)
    rows = await eventually(
        lambda: answer(client, "workers"),
        lambda t: (
            [r["kv_used"] for r in objects(t) if r["queue_s"] > 200 or r["worker"] == "w1:0"]
            == [0.25] * 2
        ),
    )
    one, two = objects(rows)
    assert (one["worker"], two["worker"]) == ("w1:0", "w2:0")
    assert two["queue_s"] > 200
    assert one["kv_used"] == 0.25
    assert one["model"] == "llama"
    assert (one["device_blocks"], one["host_blocks"], one["disk_blocks"]) == (2, None, 0)
    await fleet.retire("w2")
    rows = await eventually(
        lambda: answer(client, "workers"), lambda t: objects(t)[1]["state"] == "gone"
    )
    assert objects(rows)[0]["state"] == "serving"


def test_a_worker_that_fails_is_in_more_trouble_than_one_that_is_paused():
    states = (*["serving"] * 3, "paused", "gone", "ill")
    rows = [{"worker": f"w{n}:0", "state": state} for n, state in enumerate(states)]
    ended = {
        "w0:0": {"ok": 90.0, "failed": 10.0, "left_before": 2.0},
        "w1:0": {"ok": 10.0, "engine": 5.0, "full": 3.0, "output": 70.0, "sources": 1.0},
        "w2:0": {"ok": 1.0, "failed": 8.0},
    }
    found = sorted(roster.with_endings(rows, ended, []), key=lambda row: -row["trouble"])
    seen = [(row["worker"], row["state"]) for row in found]
    assert seen == [
        *(("w1:0", "serving"), ("w5:0", "ill"), ("w4:0", "gone"), ("w3:0", "paused")),
        *(("w0:0", "serving"), ("w2:0", "serving")),
    ]
    counts = [found[0][name] for name in ("ok", "failed", "retried", "output", "sources")]
    assert counts == [10, 5, 3, 70, 1]


async def test_a_worker_has_its_decisions_and_the_prefixes_it_was_sent(client, fleet):
    await route(client, "r1")
    found = await eventually(
        lambda: answer(client, "workers/w1:0"), lambda w: len(w["decisions"]["rows"]) == 1
    )
    assert found["worker"]["worker"] == "w1:0"
    assert objects(found["decisions"])[0]["request_id"] == "r1"
    assert objects(found["prefixes"])[0]["num_blocks"] == 2
    assert found["reserved"] == 1
    missing = await client.get(f"{API}/workers/w9:0")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_decisions_are_followed_filtered_and_found(client, fleet):
    await route(client, "r1")
    first = await eventually(lambda: answer(client, "decisions"), lambda d: d["rows"])
    await route(client, "r2", exclude=["w1"], explain=True, tenant="t2", lora_name="ada")
    more = await eventually(
        lambda: answer(client, "decisions", after=first["last"]), lambda d: d["rows"]
    )
    [row] = objects(more)
    assert (row["request_id"], row["worker"], row["trust"]) == ("r2", "w2:0", "exact")
    assert (row["tenant"], row["model"]) == ("t2", "ada")
    assert row["explained"]
    assert not more["missed"]
    for params, expected in (
        ({"reason": "kept"}, ["r1"]),
        ({"tenant": "t2"}, ["r2"]),
        ({"model": "ada"}, ["r2"]),
        ({"worker": "w1"}, ["r1"]),
        ({"request_id": "r1"}, ["r1"]),
        ({"request_id": "r3"}, []),
        ({"limit": 1}, ["r2"]),
    ):
        found = objects(await answer(client, "decisions", **params))
        assert [row["request_id"] for row in found] == expected, params


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"limit": "many"}, "limit"),
        ({"reason": "none of them"}, "reason"),
        ({"after": "yesterday"}, "after"),
        ({"unknown": "1"}, "unknown"),
    ],
)
async def test_a_bad_question_names_its_field(client, params, field):
    reply = await client.get(f"{API}/decisions", params=params)
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, field)


async def test_an_explanation_has_every_candidates_terms(client, fleet):
    await route(client, "r1", explain=True)
    await eventually(lambda: answer(client, "decisions"), lambda d: d["rows"])
    found = await answer(client, "explain/r1")
    assert found["locality_text"] == "the worker with the longest overlap was chosen"
    assert [c["worker"] for c in found["candidates"]] == ["w1:0", "w2:0"]
    assert all(term in found["candidates"][0] for term in found["terms"])
    assert (await client.get(f"{API}/explain/r9")).status_code == 404


async def test_transfers_of_kv_that_fail_are_a_finding_while_there_are_more(client, fleet):
    names = {"KvrouteKvTransfersFail", "KvrouteKvFetchedLate"}
    counts = itertools.count(3)

    async def told():
        number = next(counts)
        said = ForwardPassMetrics(kv_transfers_failed=number, kv_fetched_late=number)
        await fleet.report("w2", said)
        found = await answer(client, "overview")
        return {f["name"]: f["detail"] for f in found["findings"] if f["name"] in names}

    found = await eventually(told, lambda found: found.keys() == names)
    assert found["KvrouteKvTransfersFail"].startswith("w2:0 failed")
    assert found["KvrouteKvFetchedLate"].startswith("KV of w2:0")


async def test_reuse_says_what_was_reached_of_the_prompts(client, fleet):
    await route(client, "r1")
    found = await eventually(lambda: answer(client, "funnel"), lambda f: f["models"])
    all_of = found["models"][""]
    assert all_of["prompt_tokens"] == 8
    assert (all_of["held"], all_of["chosen"]) == (8, 8)


async def test_events_tell_who_came_and_went(client, fleet):
    await client.post(f"{API}/drain", json={"worker": "w1"}, headers=ASKED)
    await fleet.retire("w2")
    found = await eventually(
        lambda: answer(client, "events"), lambda e: e["events"][0]["kind"] == "left"
    )
    seen = [(e["kind"], e["subject"]) for e in reversed(found["events"])]
    assert [event for event in seen if event[0] != "replica_joined"] == [
        ("joined", "w1:0"),
        ("joined", "w2:0"),
        ("drain", "w1:0"),
        ("left", "w2:0"),
    ]
    assert ("replica_joined", "info") in [(e["kind"], e["level"]) for e in found["events"]]
    assert (await answer(client, "events", after=found["last"]))["events"] == []


async def test_history_is_the_same_at_every_replica(one_redis_server, replica, fleet, monkeypatch):
    monkeypatch.setattr(replicas, "STEP_MS", 1000)
    async with replica(one_redis_server.url) as one:
        await eventually(lambda: answer(one, "history"), lambda h: h["heat"]["workers"])
        async with replica(one_redis_server.url) as two:
            both = [await answer(client, "history") for client in (two, one)]
    assert both[0]["at_s"][0] == both[1]["at_s"][0]
    assert both[0]["series"]["workers"][-1] == 2
    assert both[0]["heat"]["workers"].keys() == {"w1:0", "w2:0"}
    assert both[0]["step_s"] == 1


async def test_the_use_of_each_keys_limits_is_told(one_redis_server, replica, fleet, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice a requests=60/m\nbob b\n")
    async with replica(one_redis_server.url, api_key="own", api_key_file=str(file)) as client:
        client.headers["authorization"] = "Bearer own"
        [limit] = objects((await answer(client, "waiting"))["limits"])
    assert limit == {"key": "alice", "limit": "requests=60/m", "used": 0, "most": 10}


async def test_a_worker_is_drained_and_taken_back(client, fleet):
    reply = await client.post(f"{API}/drain", json={"worker": "w1"}, headers=ASKED)
    assert reply.json() == {"worker": "w1", "draining": True, "left": 0}
    await eventually(
        lambda: answer(client, "workers"), lambda t: objects(t)[0]["state"] == "draining"
    )
    assert (await route(client, "r1"))["worker_id"] == "w2"
    reply = await client.post(f"{API}/drain", json={"worker": "w1:0", "undo": True}, headers=ASKED)
    assert reply.json()["draining"] is False
    reply = await client.post(f"{API}/drain", json={"worker": "w9"}, headers=ASKED)
    assert reply.status_code == 404


@pytest.mark.parametrize("settings", [{}, {"api_key": "k"}, {"cors_origin": "*"}])
async def test_a_page_of_another_site_drains_nothing(one_redis_server, replica, fleet, settings):
    json_type, key = {"content-type": "application/json"}, {"authorization": "Bearer k"}
    async with replica(one_redis_server.url, **settings) as client:
        for headers, status in (
            (ASKED | {"content-type": "text/plain"}, 415),
            (ASKED | {"content-type": "application/x-www-form-urlencoded"}, 415),
            (ASKED | {"content-type": ""}, 415),
            (json_type, 403),
            (ASKED | json_type | {"origin": "https://evil.example"}, 403),
            (ASKED | json_type | {"origin": "null"}, 403),
            (ASKED | json_type | {"origin": "http://[router"}, 403),
            (
                ASKED | json_type | {"origin": "http://localhost", "sec-fetch-site": "cross-site"},
                403,
            ),
            (
                ASKED | json_type | {"origin": "http://localhost", "sec-fetch-site": "same-site"},
                403,
            ),
        ):
            content = b'{"worker": "w1"}'
            reply = await client.post(f"{API}/drain", content=content, headers=headers | key)
            assert reply.status_code == status, headers
            assert "access-control-allow-origin" not in reply.headers
        assert await fleet.redis.hget(KEYS["verdicts"], "w1:0") is None
        own = ASKED | key | {"origin": "http://localhost"}
        reply = await client.post(f"{API}/drain", json={"worker": "w1"}, headers=own)
        assert reply.status_code == 200


async def test_only_pages_of_its_own_origin_see_what_the_console_shows(one_redis_server, replica):
    async with replica(one_redis_server.url, cors_origin="*") as client:
        paths = [f"{API}/overview", f"{API}/decisions", f"{API}/waiting", "/console/"]
        for path in (*paths, "/metrics", "/readiness", "/nowhere"):
            for method in ("GET", "POST"):
                asked = {"access-control-request-method": method, "origin": "https://evil.example"}
                options = await client.options(path, headers=asked)
                reply = await client.request(method, path, headers={"origin": asked["origin"]})
                for each in (options, reply):
                    assert not [name for name in each.headers if name.startswith("access-control")]
                    assert not path.startswith(API) or each.status_code == 403
        for headers in (
            {"origin": "http://localhost"},
            {"origin": "http://other", "sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "none"},
            {},
        ):
            reply = await client.get(f"{API}/waiting", headers=headers)
            assert reply.status_code == 200
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("settings", [{}, {"api_key": "k"}, {"no_auth": True}])
async def test_a_name_that_somebody_has_lead_here_is_no_origin_of_a_router_without_keys(
    one_redis_server, replica, settings
):
    names = [
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::",
        "10.0.0.1",
    ]
    async with replica(one_redis_server.url, **settings) as client:
        for name in (*names, "localhost:8080", "LOCALHOST", "127.0.0.1", "[::1]:8080"):
            own = {"host": name, "sec-fetch-site": "same-origin", "authorization": "Bearer k"}
            drain = client.post(f"{API}/drain", json={"worker": "w9"}, headers=ASKED | own)
            for reply in (await client.get(f"{API}/waiting", headers=own), await drain):
                is_refused = not settings and name in names
                assert (reply.status_code == 403) == is_refused, (name, reply.text)


async def test_an_answer_that_has_not_changed_is_not_sent_again(client):
    first = await client.get(f"{API}/waiting")
    again = await client.get(f"{API}/waiting", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-store"
    assert int(again.headers["x-kvroute-at-ms"]) >= int(first.headers["x-kvroute-at-ms"])


async def test_any_number_of_viewers_ask_redis_once(client, fleet):
    async def commands():
        stats = await fleet.redis.info("commandstats")
        return int(stats.get("cmdstat_xrevrange", {}).get("calls", 0))

    await answer(client, "workers")
    before = await commands()
    for _ in range(50):
        await answer(client, "workers")
    assert await commands() - before < 25


async def test_where_keys_are_on_only_an_operators_key_opens_the_console(
    one_redis_server, replica, tmp_path
):
    file = tmp_path / "keys"
    file.write_text("client c\nscraper m metrics\nalice o operator\n")
    async with replica(one_redis_server.url, api_key="own", api_key_file=str(file)) as client:
        seen = {}
        for key in ("own", "o", "c", "m", "wrong"):
            reply = await client.get(f"{API}/waiting", headers={"authorization": f"Bearer {key}"})
            seen[key] = reply.status_code
        assert seen == {"own": 200, "o": 200, "c": 401, "m": 401, "wrong": 401}
        assert (await client.get(f"{API}/waiting")).status_code == 401
        headers = {"authorization": "Bearer o"}
        assert (await client.get("/v1/workers", headers=headers)).status_code == 200
        assert (await client.get("/console/")).status_code == 200
        assert (await client.get("/console/static/main.js")).status_code == 200


async def test_the_page_is_served_with_a_strict_policy(client):
    reply = await client.get("/console")
    assert (reply.status_code, reply.headers["location"]) == (307, "console/")
    reply = await client.get("/console/")
    assert reply.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    script = await client.get("/console/static/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = await client.get(
        "/console/static/main.js", headers={"if-none-match": script.headers["etag"]}
    )
    assert again.status_code == 304
    for path in ("../console.py", "vendor/README.md", "%2e%2e/console.py", "none.js"):
        assert (await client.get(f"/console/static/{path}")).status_code == 404, path


async def test_a_console_that_is_off_is_not_there(one_redis_server, replica):
    async with replica(one_redis_server.url, console=False) as client:
        for path in ("/console/", "/console/static/main.js", f"{API}/overview"):
            assert (await client.get(path)).status_code == 404


async def test_while_redis_is_away_the_last_answer_is_given_and_said_to_be_old(
    own_redis_server, replica, monkeypatch
):
    monkeypatch.setattr(kept, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(sampler, "TIMEOUT_S", 0.2)
    monkeypatch.setattr("app.state.events.TIMEOUT_S", 0.2)
    monkeypatch.setattr(sampler, "BEAT_S", 0.1)
    monkeypatch.setattr(console, "LATE_MS", 500)
    async with (
        connect(own_redis_server.url) as redis,
        replica(own_redis_server.url, redis_timeout_ms=100) as client,
    ):
        await FakeWorkers(redis).register("w1")
        first = await eventually(lambda: client.get(f"{API}/workers"), lambda r: r.json()["rows"])
        assert "x-kvroute-stale" not in first.headers
        assert own_redis_server.pid is not None
        with stopped(own_redis_server.pid):
            later = await eventually(
                lambda: client.get(f"{API}/workers"), lambda r: "x-kvroute-stale" in r.headers
            )
            assert later.status_code == 200
            assert later.json()["rows"][0][0] == "w1:0"
            # What nobody had asked before has no last answer.
            reply = await client.get(f"{API}/waiting", timeout=20)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "redis_unavailable")
        await eventually(
            lambda: client.get(f"{API}/workers"), lambda r: "x-kvroute-stale" not in r.headers
        )
        told = await eventually(
            lambda: answer(client, "events"), lambda e: e["events"][0]["kind"] == "redis_away"
        )
        assert told["events"][0]["level"] == "bad"


async def test_with_hundreds_of_workers_an_answer_stays_small(client, redis):
    fleet = FakeWorkers(redis)
    for at in range(0, 300, 10):  # fewer than there are connections
        names = [f"worker-{number:04}" for number in range(at, at + 10)]
        await asyncio.gather(*(fleet.register(name, models=("llama",)) for name in names))
    size = 60_000
    await eventually(lambda: answer(client, "workers"), lambda t: len(t["rows"]) == 300)
    for question in ("overview", "workers", "decisions", "events", "waiting"):
        assert len((await client.get(f"{API}/{question}")).content) < size, question


async def test_keys_of_other_types_end_no_replica_and_are_no_internal_error(
    one_redis_server, replica, fleet, monkeypatch, caplog
):
    monkeypatch.setattr(sampler, "BEAT_S", 0.05)
    monkeypatch.setattr(replicas, "STEP_MS", 100)
    spoilt = ("replicas", "history", "history_minutes", "events", "decisions", "planner")
    for name in spoilt:
        await fleet.redis.set(KEYS[name], "spoilt")
    async with replica(one_redis_server.url) as client:
        for question in ("overview", "workers", "decisions", "history", "events", "funnel"):
            reply = await client.get(f"{API}/{question}")
            assert reply.status_code in (200, 503), question
        await route(client, "r1")
        for name in spoilt:
            await fleet.redis.delete(KEYS[name])
        await eventually(lambda: client.get(f"{API}/overview"), lambda r: r.status_code == 200)
        await eventually(lambda: answer(client, "history"), lambda h: h["at_s"])
    assert "a beat failed" not in caplog.text
