import pytest

from loadtest.bench_failover import killed, killed_master
from tests.redis_servers import SentinelServers, default_kind


@pytest.mark.slow
async def test_a_failover_is_timed_from_the_kill_until_overlap_is_complete():
    with SentinelServers(default_kind()) as servers:
        found = await killed(servers.url, killed_master(servers).kill)
    assert 0 < found["degraded_s"] <= found["whole_after_s"] < 30
    assert 0 < found["slowest_s"] < found["whole_after_s"]
    assert 0 < found["degraded"] < found["decisions"]
