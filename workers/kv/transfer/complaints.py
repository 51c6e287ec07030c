"""What strangers do at a port, said in a log without letting them fill it."""

from __future__ import annotations

import logging
import time

from app.core.errors import cut
from app.core.pace import Paces

EVERY_S = 60.0
MAX_PEERS = 256
"""That are told apart; further ones share one line."""
MAX_SHOWN = 300


class Complaints:
    """One line for each peer and minute, which says how many went unsaid."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._limits = Paces(1 / EVERY_S, most=MAX_PEERS)

    def say(self, peer: str, what: str, error: Exception, *, traced: bool = False) -> None:
        """peer: an address; "": nobody's. traced: with a traceback."""
        unsaid = self._limits.allows(peer, time.monotonic())
        if unsaid is None:
            return
        why = cut(str(error), MAX_SHOWN) or "nothing came, or was taken, in time"
        more = f" ({unsaid} like it went unsaid)" if unsaid else ""
        by = f" by {peer}" if peer else ""
        self._log.warning("%s%s: %s%s", what, by, why, more, exc_info=error if traced else None)
