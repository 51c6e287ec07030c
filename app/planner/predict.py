"""Predictions of what fleets of other sizes would have made of the recorded decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from app.core.keys import Keyspace
from app.core.roles import Role
from app.planner.observe import Observer, mean_speed
from app.planner.rules.policies import Predict, least_valued
from app.planner.rules.replay import Replay
from app.planner.rules.state import FleetState, Pools, Prediction, Rules
from app.router.fleet import Fleet
from app.simulation.profiles import USUAL, Link
from app.simulation.setting import Setting
from app.state.client import RedisClient
from app.state.scripts import ScriptRunner

TIMEOUT_S = 2.0
POLL_S = 0.1
LEAST_S = 1e-12
"""Seconds for KV of one token to travel."""


def replay_of(
    observer: Observer,
    state: FleetState,
    rules: Rules,
    policy: str = "",
    *,
    is_over: Callable[[], bool] = lambda: False,
    grows: float = 1.0,
) -> Replay:
    """Returns the Replay of one state. policy: of its decisions; "": that of the recorded ones."""
    speed = mean_speed(worker.speed for worker in observer.workers_seen.values())
    setting = Setting(host_pool_tokens=observer.host_pool_tokens)
    if state.has_roles:
        bytes_per_s = USUAL.kv_bytes_per_token / max(speed.transfer_s_per_token, LEAST_S)
        link, protocol = Link(bytes_per_s, speed.transfer_s), observer.kv_transfer
        setting = replace(setting, link=link, kv_transfer=protocol)
    return Replay(state, rules, policy or observer.policy, setting, speed, is_over, grows)


def predictor(replay: Replay, state: FleetState) -> Predict:
    live = {role: state.live_in(role) for role in (Role.PREFILL, Role.DECODE)}
    leaves = {
        role: least_valued(replace(state, workers=workers))
        for role, workers in live.items()
        if workers
    }
    return partial(replay.predict, victims=leaves)


async def whatif(
    redis: RedisClient, keyspace: Keyspace, sizes: list[int], policy: str
) -> list[Prediction]:
    """Returns predictions for fleets of `sizes`, in which as many prefill as now. Raises
    RedisUnavailable."""
    fleet = Fleet(redis, keyspace, TIMEOUT_S)
    observer = Observer(fleet, redis, ScriptRunner(redis, TIMEOUT_S), keyspace)
    following = asyncio.create_task(fleet.measurements.follow())
    try:
        with suppress(TimeoutError):  # those whose speed is not known count as usual
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    await observer.sample()
                    if all(worker.loads for worker in observer.workers_seen.values()):
                        break
                    await asyncio.sleep(POLL_S)
    finally:
        following.cancel()
        await asyncio.wait([following])
    rules = Rules()
    state = await observer.state(rules)
    predict = predictor(replay_of(observer, state, rules, policy), state)
    prefill = state.pools.prefill
    return [
        await asyncio.to_thread(
            predict, Pools(min(prefill, size - 1), size - min(prefill, size - 1))
        )
        for size in sizes
    ]
