"""Text up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back as much text as the beginning of the longest stop string may have, as vLLM does.

    stop: the one that ended the text; None: none has, yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._most_held = max(map(len, strings), default=1) - 1
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        self._held += text
        matches = []
        for string in self._strings:
            # What was held has been searched, but for what may end in `text`.
            new = max(0, len(self._held) - len(text) - len(string) + 1)
            begin = self._held.find(string, new)
            if begin >= 0:
                matches.append((begin, string))
        at, self.stop = min(matches, default=(max(0, len(self._held) - self._most_held), None))
        said, self._held = self._held[:at], self._held[at:]
        return said

    def end(self) -> str:
        """What was held back, as no more text is to come."""
        return "" if self.stop is not None else self._held
