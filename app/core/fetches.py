"""KV that one worker is yet to fetch from another, which keeps it for a time, as Redis knows of
it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.types import WorkerKey

NIXL = "nixl"
"""The protocol of vLLM's NixlConnectors, whose sources keep KV for a time."""
AHEAD_MS = 1000
"""Redis tells of a fetch so long before its lease may end: no lease is shorter."""
_RECORD = re.compile(rb"(\S+) (\S+) (\S+) (\S+) (\d+)")


@dataclass(frozen=True, slots=True)
class Fetch:
    """By a target, for a request. until_ms: what it begins to fetch later, by the Redis clock, may
    be other prompts'. source_life, target_life: of the engines; "": not known. ended: leases that
    had ended at the source."""

    source: WorkerKey
    target: WorkerKey
    source_life: str
    target_life: str
    ended: int
    attempt: str = ""
    until_ms: int = 0

    def record(self) -> str:
        """What Redis keeps of it, by its attempt."""
        lives = (self.source_life or "-", self.target_life or "-")
        return f"{self.source} {self.target} {' '.join(lives)} {self.ended}"

    @classmethod
    def parse(cls, attempt: bytes, until_ms: bytes, record: bytes | None) -> Fetch | None:
        """What Redis tells of one; None: it makes no sense."""
        found = _RECORD.fullmatch(record or b"")
        try:
            source, target, *lives, ended = [text.decode() for text in found.groups()]  # type: ignore[union-attr]
            one, other = ("" if life == "-" else life for life in lives)
            keys = WorkerKey.parse(source), WorkerKey.parse(target)
            return cls(*keys, one, other, int(ended), attempt.decode(), int(float(until_ms)))
        except (ValueError, AttributeError):
            return None
