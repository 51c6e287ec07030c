"""Fetches of KV between workers that are still to be made, as Redis keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.types import WorkerKey

NIXL = "nixl"
AHEAD_MS = 1000
"""Milliseconds before a fetch's lease may end at which Redis tells of it: no lease is shorter."""
_RECORD = re.compile(rb"(\S+) (\S+) (\S+) (\S+) (\d+)")


@dataclass(frozen=True, slots=True)
class Fetch:
    """A target's fetch for one request. until_ms: Redis clock; KV that is fetched later may belong
    to other prompts. source_life, target_life: lives of the engines; "": not known. ended: leases
    that had ended at the source."""

    source: WorkerKey
    target: WorkerKey
    source_life: str
    target_life: str
    ended: int
    attempt: str = ""
    until_ms: int = 0

    def record(self) -> str:
        """Returns the text that Redis keeps under the attempt."""
        lives = (self.source_life or "-", self.target_life or "-")
        return f"{self.source} {self.target} {' '.join(lives)} {self.ended}"

    @classmethod
    def parse(cls, attempt: bytes, until_ms: bytes, record: bytes | None) -> Fetch | None:
        """Returns the fetch that Redis tells of; None if the text makes no sense."""
        found = _RECORD.fullmatch(record or b"")
        try:
            source, target, *lives, ended = [text.decode() for text in found.groups()]  # type: ignore[union-attr]
            one, other = ("" if life == "-" else life for life in lives)
            keys = WorkerKey.parse(source), WorkerKey.parse(target)
            return cls(*keys, one, other, int(ended), attempt.decode(), int(float(until_ms)))
        except (ValueError, AttributeError):
            return None
