import pytest

from loadtest.bench_replicas import play
from loadtest.traces import DEMO_TRACE, read_trace
from tests.redis_servers import default_kind, require_redis


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_short_replay_is_measured_for_each_number_of_replicas(replicas):
    require_redis(default_kind())
    trace = read_trace(DEMO_TRACE).cut(requests=30)
    figures = play(trace, replicas, 2, num_workers=2, load=3.0, speedup=30.0, seed=0)
    assert (figures["failed"], figures["degraded"]) == (0, 0)
    assert figures["ttft_mean_s"]
    assert 0 < figures["machine"] <= 1
    # With a single replica, nobody else reserves.
    assert replicas == 2 or figures["conflicts"] == figures["retries"] == 0
