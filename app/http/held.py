"""Bytes of bodies that a server holds, of all its callers together, and of each."""

from __future__ import annotations

from app.core.errors import BodiesTooLarge
from app.core.places import TIMES_WHAT_IS_LEFT, Shares

HELD = "kvroute.held"
MAX_HELD_BYTES = 192 * 1024 * 1024
SMALL_BYTES = 16 * 1024
"""Bytes up to which a body is always taken."""


class HeldBodies:
    """Bodies of all callers. Beyond max_bytes only small bodies are taken, or one alone. No caller
    has more than three times what is left of it, and none of its connections more than three times
    what that caller may have besides."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.shares = Shares(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that have come of bodies whose requests are not answered yet."""
        return int(self.shares.total)


class HeldBody:
    """Bodies over one connection, until they are answered. holder: an address, until a key is
    known."""

    def __init__(self, bodies: HeldBodies, holder: str) -> None:
        self.num_bytes = 0
        self._shares = bodies.shares
        self._holder = holder

    def add(self, size: int) -> None:
        if size:
            self.num_bytes += size
            self._shares.take(self._holder, size)

    def clear(self) -> None:
        if self.num_bytes:
            self._shares.give_back(self._holder, self.num_bytes)
            self.num_bytes = 0

    def belong_to(self, holder: str) -> None:
        if holder != self._holder:
            size = self.num_bytes
            self.clear()
            self._holder = holder
            self.add(size)

    def check(self, size: int) -> None:
        """Raises BodiesTooLarge if a body of `size` bytes, come or announced, does not fit."""
        if size <= SMALL_BYTES or self._shares.total <= self.num_bytes:
            return
        left = self._shares.left_for(self._holder)
        more = max(0, size - self.num_bytes)
        if more > left or self.num_bytes + more > TIMES_WHAT_IS_LEFT * (left - more):
            own = int(self._shares.of(self._holder))
            raise BodiesTooLarge(
                f"body: of {self._shares.capacity:.0f} bytes that all bodies together may have, "
                f"{self._shares.total:.0f} are here by now, {own} of them yours"
            )
