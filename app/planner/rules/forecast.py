"""By how much the load will have grown when a worker that is asked for now is live."""

from __future__ import annotations

import math
from statistics import fmean

from app.planner.rules.state import FleetState, Rules

MOST_GROWTH = 2.0
LEAST_S = 1.0


def growth(state: FleetState, rules: Rules) -> float:
    """Requests a second at that time over the mean of those replayed; at least 1.

    If the rate changes evenly, relative to its mean by r a second, requests of the last T seconds
    lie r T² / 12 behind their middle on average; of N of them that is exact to T / sqrt(12 N). As
    much as may be chance is taken off: few requests foretell nothing. T begins with the first
    request of the window: that there was none before says that traffic began, not that it grows.
    """
    begin_s = state.now_s - rules.window_s - rules.lead_s
    at_s = [asked.at_s for asked in state.recent if asked.at_s >= begin_s]
    if len(at_s) < 2:
        return 1.0
    first_s, *later_s = sorted(at_s)
    past_s = max(state.now_s - first_s, LEAST_S)
    behind_s = fmean(later_s) - first_s - past_s / 2 - past_s / math.sqrt(12 * len(later_s))
    rise = 12 * max(0.0, behind_s) / past_s**2
    return min(MOST_GROWTH, 1.0 + rise * (past_s / 2 + state.startup_s))
