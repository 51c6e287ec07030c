import io

import pytest
from rich.console import Console

from loadtest.bench_replicas import compare, replay_each, show
from loadtest.traces import DEMO_TRACE, read_trace
from tests.redis_servers import default_kind, require_redis

pytestmark = pytest.mark.slow


def test_a_short_replay_is_measured_for_each_number_of_replicas_and_compared():
    require_redis(default_kind())
    trace = read_trace(DEMO_TRACE).cut(requests=30)
    made = replay_each(trace, (1, 2), rounds=1, num_workers=2, load=3.0, speedup=30.0)
    assert list(made) == [1, 2]
    for [one] in made.values():
        assert (one.summary.failed, one.degraded) == (0, 0)
        assert one.summary.ttft_mean_s
        assert 0 < one.routers_cpu < one.cluster_cpu <= 1
        assert 0 < one.machine_cpu <= 1
    # With a single replica, nobody else reserves.
    assert made[1][0].conflicts == made[1][0].retries == 0
    compared = compare(made)
    assert (compared["base"], compared["noise"]) == (1, {"least": 1.0, "most": 1.0})
    assert compared["against"]["2"]["ttft_mean"]["median"] > 0
    show({"rounds": made, **compared}, Console(file=io.StringIO()))
