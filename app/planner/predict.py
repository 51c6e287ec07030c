"""What a fleet of another size would have made of the recorded decisions."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

from app.core.keys import Keyspace
from app.planner.observe import Observer, mean_speed
from app.planner.rules.replay import Replay
from app.planner.rules.state import FleetState, Phase, Prediction, Rules
from app.planner.rules.victims import victim
from app.router.fleet import Fleet
from app.simulation.setting import Setting
from app.state.client import RedisClient
from app.state.scripts import ScriptRunner

TIMEOUT_S = 2.0
POLL_S = 0.1


def predict(
    observer: Observer,
    state: FleetState,
    size: int,
    rules: Rules,
    routing_policy: str,
    leaves: str | None,
) -> Prediction:
    """leaves: who would, if the fleet were smaller. Of no workers, nothing is known."""
    if size == 0 or observer.block_size is None:
        return Prediction(size, 0, 1.0, 0.0, 0.0)
    replay = Replay(
        state,
        rules,
        routing_policy,
        Setting(block_size=observer.block_size),
        mean_speed(seen.speed for seen in observer.workers_seen.values()),
    )
    return replay.predict(size, leaves if size < state.size else None)


async def whatif(
    redis: RedisClient, keyspace: Keyspace, sizes: list[int], policy: str
) -> list[Prediction]:
    """For fleets of `sizes`, by the decisions of late. Raises RedisUnavailable."""
    fleet = Fleet(redis, keyspace, TIMEOUT_S)
    observer = Observer(fleet, redis, ScriptRunner(redis, TIMEOUT_S), keyspace)
    following = asyncio.create_task(fleet.follow())
    try:
        with suppress(TimeoutError):  # those whose speed is not known count as usual
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    await observer.sample()
                    if all(seen.loads for seen in observer.workers_seen.values()):
                        break
                    await asyncio.sleep(POLL_S)
    finally:
        following.cancel()
        await asyncio.wait([following])
    rules = Rules()
    recent = await observer.recent(rules)
    values = observer.values(recent, rules)
    state = FleetState(observer.now_s, observer.workers(values), recent)
    leaves = None
    if state.those(Phase.LIVE):
        leaves = victim("unique_value", state, np.random.default_rng(0))
    return [
        await asyncio.to_thread(predict, observer, state, size, rules, policy, leaves)
        for size in sizes
    ]
