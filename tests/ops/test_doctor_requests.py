"""Whether `kvroute doctor` and the console say that requests fail, and why."""

import asyncio
import json

from click.testing import CliRunner

from app.ops import checks
from app.ops.doctor import doctor
from app.state.events import NamespaceEvent
from tests.door.conftest import replica, sick_worker, until_serving
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE
from tests.fakes.faults import Faults

OOM = "CUDA out of memory"
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}


async def test_engines_that_answer_500_to_all_are_found_by_all(one_redis_server, redis):
    async with (
        sick_worker(redis, "a") as one,
        sick_worker(redis, "b") as other,
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 2)
        one.faults = other.faults = Faults(
            status=500, body=json.dumps({"error": {"message": OOM, "code": 500}})
        )
        for _ in range(12):
            await door.post("/v1/completions", json=BODY)

        async def overview():
            return (await door.get("/console/api/overview")).json()

        def names(found):
            return {one["name"] for one in found["findings"] if one["level"] in ("bad", "warn")}

        found = await eventually(overview, lambda o: "KvrouteRequestsFail" in names(o))
        assert "KvrouteWorkerFailsRequests" in names(found)
        assert found["tiles"]["failed_share"] > 0.8
        assert found["tiles"]["in_time_share"] == 0.0
        found = await eventually(overview, lambda o: o["errors"]["rows"])
        assert {one["words"] for one in as_dicts(found["errors"])} == {OOM}
        workers = as_dicts((await door.get("/console/api/workers")).json())
        assert {row["last_error"] for row in workers} <= {OOM, None}
        assert any(row["failed"] for row in workers)
        command = ["--redis-url", one_redis_server.url, "--namespace", NAMESPACE]
        done = await asyncio.to_thread(CliRunner().invoke, doctor, command)
        assert done.exit_code == 1
        assert "✗ KvrouteRequestsFail: " in done.output


def as_dicts(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_a_replica_that_was_lost_is_told_until_it_is_back_or_long_gone():
    now_ms = 1_000_000
    lost = NamespaceEvent("1-0", now_ms - 40_000, "replica_lost", "r1", "")
    left = NamespaceEvent("1-1", now_ms - 40_000, "replica_left", "r2", "")
    check = checks.lost_replicas(["r3"], [left, lost], now_ms)
    assert (check.ok, check.found) == (False, "r1 was lost 40 s ago")
    assert checks.lost_replicas(["r1", "r3"], [left, lost], now_ms).ok
    assert checks.lost_replicas(["r3"], [lost], now_ms + checks.LOST_MS).ok


def test_traffic_that_is_gone_is_told_and_a_quiet_hour_is_not():
    busy, quiet = [2.0] * 15, [0.0] * checks.QUIET
    gone = checks.gone_traffic([*busy, None, *quiet])
    assert (gone.ok, gone.found) == (False, "no request for 2 minutes, after 2.0 a second")
    assert checks.gone_traffic([*busy, *quiet[1:]]).ok
    assert checks.gone_traffic([*quiet, *quiet]).ok
    assert checks.gone_traffic(quiet).ok
    assert checks.gone_traffic([]).ok
