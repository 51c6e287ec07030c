"""By how much the load will have grown when a worker that is asked for now is live."""

from __future__ import annotations

import math
from statistics import fmean

from app.planner.rules.state import FleetState, Rules

MOST_GROWTH = 2.0


def growth(state: FleetState, rules: Rules) -> float:
    """Requests a second at that time over the mean of those replayed; at least 1.

    If the rate changes evenly, relative to its mean by r a second, requests of the last T seconds
    lie r T² / 12 behind their middle on average; of N of them that is exact to T / sqrt(12 N). As
    much as may be chance is taken off: few requests foretell nothing.
    """
    past_s = rules.window_s + rules.lead_s
    begin_s = state.now_s - past_s
    after_s = [asked.at_s - begin_s for asked in state.recent if asked.at_s >= begin_s]
    if not after_s:
        return 1.0
    behind_s = fmean(after_s) - past_s / 2 - past_s / math.sqrt(12 * len(after_s))
    rise = 12 * max(0.0, behind_s) / past_s**2
    return min(MOST_GROWTH, 1.0 + rise * (past_s / 2 + state.startup_s))
