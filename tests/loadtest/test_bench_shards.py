from __future__ import annotations

from loadtest.bench_shards import measure_on
from tests.redis_servers import ClusterServers, default_kind


async def test_lookups_go_where_configured_and_those_of_a_common_prefix_to_one_server() -> None:
    with ClusterServers(default_kind()) as servers:
        found = await measure_on(servers, queries=60, changes=3)
    of_master, of_replica = found["look_ups"]["master"], found["look_ups"]["replica"]
    for kind in ("own", "same"):
        assert of_master[kind]["masters_us"] > 0
        assert of_master[kind]["replicas_us"] == 0
        assert of_replica[kind]["replicas_us"] > 0
        assert of_replica[kind]["masters_us"] == 0
    assert of_master["same"]["busiest"] == of_replica["same"]["busiest"] == 1
    assert of_master["own"]["busiest"] < 1
    for behind in found["behind_ms"].values():
        assert 0 < behind["p50"] <= behind["p99"]
