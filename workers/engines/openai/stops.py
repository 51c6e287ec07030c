"""Text up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back what may be the beginning of a stop string.

    found: the one that ended the text; None: none has, yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        if not self._strings:
            return text
        self._held += text
        at, found = min(
            ((at, s) for s in self._strings if (at := self._held.find(s)) >= 0),
            default=(len(self._held) - self._num_pending(), None),
        )
        given, self._held, self.found = self._held[:at], self._held[at:], found
        return given

    def end(self) -> str:
        """What was held back, as no more text is to come."""
        return "" if self.found is not None else self._held

    def _num_pending(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = min(len(self._held), max(map(len, self._strings)) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
