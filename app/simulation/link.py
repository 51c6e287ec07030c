"""The link over which KV leaves a worker."""

from __future__ import annotations

from dataclasses import dataclass

from app.simulation.profiles import Profile


@dataclass(frozen=True, slots=True)
class Link:
    """How KV leaves a worker: one transfer after another."""

    bytes_per_s: float
    first_s: float = 0.01
    """On top, for each transfer; those of others go on meanwhile."""


class Sending:
    """The link of one worker, over which KV leaves it, one transfer after another."""

    def __init__(self, link: Link, profile: Profile) -> None:
        self._first_s = link.first_s
        self._s_per_token = profile.kv_bytes_per_token / link.bytes_per_s
        self._free_s = 0.0

    @property
    def speed(self) -> dict[str, float]:
        """Fields of Speed. Workers learn them as receivers; in a fleet with one kind of link they
        are the same."""
        return {"transfer_s": self._first_s, "transfer_s_per_token": self._s_per_token}

    def send(self, tokens: int, now_s: float) -> float:
        """When so many tokens' KV will have arrived, sent from now on."""
        if tokens:
            self._free_s = max(self._free_s, now_s) + tokens * self._s_per_token
            return self._free_s + self._first_s
        return now_s
