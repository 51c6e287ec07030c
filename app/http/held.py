"""How many bytes of bodies a server holds, of all its callers together."""

from __future__ import annotations

from app.core.errors import BodiesTooLarge

HELD = "kvroute.held"
"""In a request's scope: the HeldBodies of its server."""
MAX_HELD_BYTES = 192 * 1024 * 1024
SMALL_BYTES = 16 * 1024
"""Bodies up to this size are always taken."""


class HeldBodies:
    """max_bytes: beyond, only small bodies are taken, or one alone."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.num_bytes = 0
        """Of what has come of bodies, until their requests are answered."""
        self.max_bytes = max_bytes

    def check(self, size: int) -> None:
        """size: of a body, as far as it has come or is announced. Raises BodiesTooLarge."""
        others = max(0, self.num_bytes - size)
        if size > SMALL_BYTES and others and self.num_bytes > self.max_bytes:
            raise BodiesTooLarge(
                f"body: those of all callers have over {self.max_bytes} bytes by now"
            )
