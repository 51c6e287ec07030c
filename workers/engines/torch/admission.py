"""Times of loading KV and of computing it, which say whether loading is worth it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container
from dataclasses import replace

from app.core.types import Tier
from app.simulation.speed import SpeedLearner
from app.simulation.steps import EngineStep
from workers.kv.manager import BlockManager
from workers.kv.moves import AdmissionPolicy

FORGET = 0.99
"""Weight of a chunk's speed relative to the next one's."""
LOAD_FORGET = 0.7
"""Weight of a load relative to the next one: a disk that has become slow is left after a few."""
REVISED_S = 1.0
TIER_RETRIED_S = 60.0
"""Seconds after which a tier is tried again from which loading took longer than computing."""


class AdaptiveAdmission:
    """An admission policy that learns from the loads and steps of an engine."""

    def __init__(self, chunk_tokens: int, block_size: int) -> None:
        self._block_size = block_size
        self.learner = SpeedLearner(chunk_tokens)
        self._loaded_at: dict[Tier, float] = {}
        self._loads: dict[Tier, tuple[float, float]] = {}
        """Seconds and blocks of the last loads from each tier; older ones count less."""
        self._prefill_s = self._prefill_tokens = 0.0
        """Seconds and tokens of the last chunks; older ones count less."""

    def observe(self, step: EngineStep, for_others: Container[str]) -> None:
        """Learns from a step whose `duration_s` is wall time. for_others: see SpeedLearner."""
        if step.prefill_tokens:
            self._prefill_s = FORGET * self._prefill_s + step.duration_s
            self._prefill_tokens = FORGET * self._prefill_tokens + step.prefill_tokens
        self.learner.observe(step, step.duration_s, for_others)

    def observe_load(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        self.learner.observe_load(tier, num_blocks * self._block_size, seconds)
        self._loaded_at[tier] = time.monotonic()
        past_s, past_blocks = self._loads.get(tier, (0.0, 0.0))
        self._loads[tier] = LOAD_FORGET * past_s + seconds, LOAD_FORGET * past_blocks + num_blocks

    def compute_s(self, num_tokens: int) -> float:
        """Returns the seconds that a chunk of so many tokens takes; 0 until one was computed."""
        return num_tokens * self._prefill_s / max(1.0, self._prefill_tokens)

    async def revise_forever(self, manager: BlockManager) -> None:
        """Ensures that blocks are loaded, and so stored, only if that is faster than computing."""
        while True:
            await asyncio.sleep(REVISED_S)
            manager.admission = self.revised(manager.admission)

    def revised(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        """Returns `policy` with the present times; unchanged until a chunk was computed."""
        if not self._prefill_tokens:
            return policy
        now = time.monotonic()
        for tier in [t for t, at in self._loaded_at.items() if now - at >= TIER_RETRIED_S]:
            # What it was like long ago must not keep it from being tried again.
            self.learner.discount_loads(tier)
            del self._loaded_at[tier], self._loads[tier]
        return replace(
            policy,
            compute_s=self._prefill_s / self._prefill_tokens * self._block_size,
            load_s={tier: load_s / blocks for tier, (load_s, blocks) in self._loads.items()},
        )
