"""When blocks are stored in slower tiers, and whether they are worth it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from app.core.types import Tier


class WritePolicy(Enum):
    """When a block is stored in the next slower tier."""

    BACK = "back"
    """When it is evicted."""
    THROUGH = "through"
    """As soon as it is filled."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Which blocks are worth a place in a slower tier, and worth loading from there.

    min_uses: a block is stored once this many requests have needed it.
    compute_s, load_s: seconds to compute a block, and to load it from a tier.
    """

    min_uses: int = 1
    compute_s: float = math.inf
    load_s: Mapping[Tier, float] = field(default_factory=dict)

    def stores(self, uses: int, tier: Tier) -> bool:
        return uses >= self.min_uses and self.loads(tier)

    def loads(self, tier: Tier) -> bool:
        return self.load_s.get(tier, 0.0) < self.compute_s
