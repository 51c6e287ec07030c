"""Simulated engines as fast as workers have been found to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from app.core.worker_report import DEFAULT_SPEED, Speed
from app.virtual.setting import Setting
from app.virtual.worker import Machine, MakeMachine
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.profiles import PROFILES, Profile
from workers.engines.speed import SpeedLearner

USUAL = PROFILES["70b-4xh100"]
"""Of it DEFAULT_SPEED is the speed."""


def profile_of(speed: Speed, kv_pool_tokens: int) -> Profile:
    """What speeds do not say, such as a step's fixed share, is scaled as prefills are."""
    scale = speed.prefill_s_per_token / DEFAULT_SPEED.prefill_s_per_token
    return replace(
        USUAL,
        over_s=USUAL.over_s * scale,
        a0_s=USUAL.a0_s * scale,
        b0_s=USUAL.b0_s * scale,
        a1_s=USUAL.a1_s * scale,
        b1_s=USUAL.b1_s * scale,
        q_s=speed.prefill_s_per_token2,
        c_s=speed.decode_s_per_kv_token,
        host_s_per_token=speed.host_s_per_token,
        kv_pool_tokens=kv_pool_tokens,
    )


def learned_machines(workers: Mapping[str, tuple[Speed, int]]) -> MakeMachine:
    """For profiles that are named like workers. workers: speed and tokens of KV of each."""
    profiles = {name: profile_of(speed, tokens) for name, (speed, tokens) in workers.items()}

    def make(name: str, setting: Setting, now: Callable[[], float]) -> Machine:
        profile = profiles[name]
        engine = SimEngine(
            profile,
            block_size=setting.block_size,
            host_pool_tokens=setting.host_pool_tokens,
            now=now,
        )
        return Machine(engine, SpeedLearner(profile.max_batch_tokens))

    return make
