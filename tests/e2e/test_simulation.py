"""The simulation in virtual time agrees with a cluster of real processes."""

from dataclasses import asdict
from pathlib import Path

import pytest

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from app.simulation.setting import Setting
from loadtest.replay import replay_policy
from loadtest.report import summarise
from loadtest.scenario import Scenario, simulate
from loadtest.traces import read_trace
from tests.redis_servers import default_kind, require_redis

SLICE = Path(__file__).parents[1] / "data" / "agentic-slice.jsonl"
WORKERS = 4
REPLICAS = 2
BLOCK_SIZE = 64
SPEEDUP = 12.0
POLICIES = ["latency", "blocks", "least_loaded"]
HITS_AGREE_WITHIN = 0.02
"""Allowed difference for `latency`. Where the prefix does not decide, ties do: on a slice of 12
sessions, seeds of the simulation alone change the hit rates of `blocks` and `least_loaded` by up to
13 points, and that of `latency` by one. They do not change the order of the three."""


async def live(trace, policy):
    with Cluster(
        num_workers=WORKERS,
        num_replicas=REPLICAS,
        router=RouterSettings(log_level="error"),
        worker=WorkerSettings(speedup=SPEEDUP, block_size=BLOCK_SIZE, log_level="error"),
    ) as cluster:
        played = await replay_policy(trace, cluster.balancer_url, policy, speedup=SPEEDUP)
        return asdict(summarise(played))


@pytest.mark.slow
async def test_a_replay_and_its_simulation_agree_on_hit_rate_and_the_order_of_policies():
    require_redis(default_kind())
    trace = read_trace(SLICE)
    scenario = Scenario(
        trace, Setting(num_workers=WORKERS, replicas=REPLICAS, block_size=BLOCK_SIZE)
    )
    replayed = {policy: await live(trace, policy) for policy in POLICIES}
    simulated = {policy: simulate(scenario, policy, 1.0) for policy in POLICIES}
    for policy in POLICIES:
        assert replayed[policy]["failed"] == simulated[policy]["failed"] == 0
    assert replayed["latency"]["hit_rate"] == pytest.approx(
        simulated["latency"]["hit_rate"], abs=HITS_AGREE_WITHIN
    )

    def by_hit_rate(summaries):
        return sorted(summaries, key=lambda policy: summaries[policy]["hit_rate"], reverse=True)

    def by_ttft(summaries):
        return sorted(summaries, key=lambda policy: summaries[policy]["ttft_mean_s"])

    assert by_hit_rate(replayed) == by_hit_rate(simulated) == POLICIES
    assert by_ttft(replayed) == by_ttft(simulated) == POLICIES
