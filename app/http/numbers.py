"""Arrays of numbers in JSON, read without an object for each number."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import simdjson as simdjson  # it is what others use it by
except ImportError:  # there is no wheel for the newest Python yet
    simdjson = None  # type: ignore[assignment]


def unsigned_of(array: bytes) -> NDArray[np.uint64] | None:
    """Returns the numbers of an array in JSON; None if one is not an integer in [0, 2^64), or there
    are none, or only a parser that makes objects can say."""
    # Buffers are flat, so the array must not contain others.
    if simdjson is not None and array.rfind(b"[") == 0:
        with suppress(RuntimeError, TypeError, ValueError):
            # The parser must outlive what it has parsed.
            parser = simdjson.Parser()
            numbers: Any = parser.parse(array)
            return unsigned(numbers)
    return None


def unsigned(numbers: simdjson.Array) -> NDArray[np.uint64]:
    """Returns the numbers. Raises TypeError or ValueError if one is not an integer in [0, 2^64), or
    there are none."""
    return np.frombuffer(numbers.as_buffer(of_type="u"), np.uint64)
