"""Whether a file has changed that a replica has read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LOOK_EVERY_S = 1.0


def stamp_of(path: str) -> Sequence[int]:
    """What is different once a file has been written, or another one is in its place. "": none."""
    if not path:
        return ()
    try:
        seen = Path(path).stat()
    except OSError:
        return ()
    return seen.st_mtime_ns, seen.st_ino, seen.st_size
