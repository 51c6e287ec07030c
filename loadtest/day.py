"""A day's traffic, made of a shorter trace.

No public trace at hand has both the blocks of its prompts and a whole day. So a trace is repeated,
each time with tokens of its own, and arrivals come as often as a curve says: a day from night to
night, 4:1 from peak to trough, with a dip at noon, and bursts that last for minutes. Sessions keep
their order, and the gaps within them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from loadtest.traces import Trace

PEAK_TO_TROUGH = 4.0
NOON_DIP = 0.3
"""Of the peak."""
BURST_S = 120.0
BURST_SHAPE = 0.5
"""Of the gamma distribution that the bursts' rates have."""

Rates = NDArray[np.float64]


def curve(seconds: int, *, bursts: float, seed: int) -> Rates:
    """Arrival rate in each second of the day, over the day's mean. bursts: their share in it."""
    at = (np.arange(seconds) + 0.5) / seconds
    shape = 1.0 - np.cos(2 * math.pi * at)
    shape -= 2 * NOON_DIP * np.exp(-(((at - 0.5) / 0.06) ** 2))
    shape = (shape - shape.min()) / (shape.max() - shape.min())
    rates = 1.0 + (PEAK_TO_TROUGH - 1.0) * shape
    rng = np.random.default_rng(seed)
    number = math.ceil(seconds / BURST_S)
    height = rng.gamma(BURST_SHAPE, 1.0 / BURST_SHAPE, number).repeat(round(BURST_S))[:seconds]
    rates *= 1.0 - bursts + bursts * height
    shares: Rates = rates / rates.mean()
    return shares


def day_of(trace: Trace, rates: Rates, load: float) -> Trace:
    """A trace that lasts as long as `rates`, at `load` times the recorded rate on average."""
    wanted_s = load * rates.size
    sessions = trace.repeated(math.ceil(wanted_s / trace.span_s), in_turn=True).sessions
    # How far the recording has got at the end of each second.
    reached_s = np.concatenate(([0.0], rates.cumsum())) * load
    ends = np.arange(rates.size + 1)
    moved = [
        replace(session, start_s=float(np.interp(session.start_s, reached_s, ends)))
        for session in sessions
        if session.start_s < wanted_s
    ]
    return Trace(f"{trace.name}, a day in {rates.size / 3600:g} h", tuple(moved))
