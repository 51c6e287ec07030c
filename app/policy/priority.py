"""What a request's priority means for its price: who waits for whom."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WAITING = {"high": 2.0, "normal": 1.0, "low": 0.25}
"""Weight of the request's own wait."""
BLOCKING_OF_LOW = 4.0
CROWDED_S = 2.0
"""A queue of so many seconds keeps others away by a factor of e."""


def weighed(
    priority: str,
    felt_s: NDArray[np.float64],
    blocking_s: NDArray[np.float64],
    queue_s: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The price of the wait, and that of keeping others waiting, (workers,) each.

    felt_s, blocking_s: those of a request of normal priority. One of low priority pays several
    times for keeping others waiting, but little where a queue is so long that they go elsewhere: so
    jobs gather on workers that are busy with jobs, and leave the rest to others.
    """
    felt_s = WAITING[priority] * felt_s
    if priority == "low":
        blocking_s = BLOCKING_OF_LOW * blocking_s * np.exp(queue_s / -CROWDED_S)
    return felt_s, blocking_s
