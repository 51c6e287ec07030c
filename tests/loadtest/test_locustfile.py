"""The locustfile, run by locust in its own process because it patches the standard library."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.door.conftest import replica, until_serving, worker
from tests.eventually import eventually
from tests.loadtest.conftest import SENDS_AN_ERROR

ROOT = Path(__file__).parents[2]
ROWS = ("route", "ttft", "cached", "completion", "prefill_complete", "release")


async def locust(url, *arguments):
    """Exit code, output and log of a one-second run of two users."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")),
        *("--headless", "--only-summary", "-u", "2", "-r", "2", "-t", "1s", "--stop-timeout", "5s"),
        *("--host", url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_locust_drives_the_cluster_and_reports_hit_rate_and_ttft(cluster):
    cluster.cached_tokens = 100
    code, out, err = await locust(cluster.url, "Routed", "--policy", "random")
    assert code == 0, err
    for row in ROWS:
        assert re.search(rf"^\w+ +{row} +[1-9]\d* +0\(", out + err, re.MULTILINE), row
    assert cluster.queries[0]["policy"] == "random"


@pytest.mark.slow
@pytest.mark.parametrize("user", ["Routed", "Chat"])
async def test_locust_shows_a_key_where_routers_ask_for_one(one_redis_server, user, monkeypatch):
    url = one_redis_server.url
    with worker(url, "a", speedup=1000):
        async with replica(url, api_key="a-key-that-is-long-enough") as door:
            await until_serving(door, 1)
            base, options = str(door.base_url).rstrip("/"), (user, "-t", "2s")
            code, *_ = await locust(base, *options)
            assert code == 1
            code, out, err = await locust(base, *options, "--api-key", "a-key-that-is-long-enough")
            assert code == 0, out + err
            monkeypatch.setenv("KVROUTE_API_KEY", "a-key-that-is-long-enough")
            code, out, err = await locust(base, *options)
            assert code == 0, out + err


@pytest.mark.slow
async def test_locust_repeats_what_a_router_refuses_for_a_while_and_ends_with_0(cluster):
    cluster.route_script.extend([503, 429, 502])
    code, out, err = await locust(cluster.url, "Routed", "-u", "1", "-t", "6s")
    assert code == 0, err
    assert re.search(r"^POST +route, to be repeated +3 +0\(", out + err, re.MULTILINE)
    tries = [query for query in cluster.queries if "max_tokens" not in query][:4]
    assert len({query["request_id"] for query in tries}) == 1
    assert [query.get("retry") for query in tries] == [None, "true", "true", "true"]


async def test_locust_releases_what_it_holds_when_it_is_stopped_in_mid_answer(cluster):
    cluster.hold.clear()
    code, out, err = await locust(
        cluster.url, "Routed", "-u", "9", "-r", "9", "--stop-timeout", "0"
    )
    assert code == 0, out + err
    routed = cluster.calls.count("POST /v1/route")
    released = [call for call in cluster.calls if call.startswith("DELETE /v1/requests/")]
    assert routed == len(set(released)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("user", ["Routed", "Chat"])
async def test_a_real_cluster_has_nothing_reserved_after_locust_was_stopped(one_redis_server, user):
    url = one_redis_server.url
    with worker(url, "a"):
        async with replica(url) as door:
            await until_serving(door, 1)
            # All of them are in mid-answer, or about to be routed, when the time is over.
            options = (user, "-u", "24", "-r", "24", "-t", "3s", "--stop-timeout", "0")
            code, out, err = await locust(str(door.base_url).rstrip("/"), *options)
            assert code == 0, out + err

            async def reserved():
                workers = (await door.get("/v1/workers")).json()["workers"]
                return sum(worker["active_requests"] for worker in workers)

            await eventually(reserved, lambda requests: requests == 0)


@pytest.mark.slow
async def test_locust_fails_when_the_cluster_refuses(cluster):
    cluster.route_script.extend([503] * 100)
    code, _, _ = await locust(cluster.url, "Routed")
    assert code == 1


@pytest.mark.slow
async def test_an_answer_that_begins_with_an_error_has_no_first_token(cluster):
    cluster.worker_script.extend([SENDS_AN_ERROR] * 100)
    code, out, err = await locust(cluster.url, "Routed")
    assert code == 1
    assert "out of memory" in out + err
    assert "Traceback" not in out + err
    assert re.search(r"^\w+ +ttft ", out + err, re.MULTILINE) is None


@pytest.mark.slow
async def test_chats_are_sent_as_an_openai_client_does(one_redis_server):
    url = one_redis_server.url
    with worker(url, "a", speedup=1000):
        async with replica(url) as door:
            await until_serving(door, 1)
            options = ("Chat", "--output-tokens", "5", "-t", "3s")
            code, out, err = await locust(str(door.base_url).rstrip("/"), *options)
            assert code == 0, out + err
            for row in ("chat", "ttft", "cached"):
                assert re.search(rf"^\w+ +{row} +[1-9]\d* +0\(", out + err, re.MULTILINE), row
