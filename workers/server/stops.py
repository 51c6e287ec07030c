"""Text up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Holds back what may be the beginning of a stop string.

    stop: the one that ended the text; None: none has, yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._begun = [0] * len(strings)
        """How much of each is at the end of the text by now."""
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        if not self._strings:
            return text
        num_held = len(self._held)
        self._held += text
        matches = []
        for index, string in enumerate(self._strings):
            end = self._read(index, text)
            if end is not None:
                matches.append((num_held + end - len(string), string))
        at, stop = min(matches, default=(len(self._held) - max(self._begun), None))
        given, self._held, self.stop = self._held[:at], self._held[at:], stop
        return given

    def end(self) -> str:
        """What was held back, as no more text is to come."""
        return "" if self.stop is not None else self._held

    def _read(self, index: int, text: str) -> int | None:
        """Where in `text` the string is complete for the first time; None: nowhere. As Knuth,
        Morris and Pratt do it: a text costs its length, however much of it begins like a string."""
        string, begun = self._strings[index], self._begun[index]
        borders = _borders(string)
        for end, character in enumerate(text, 1):
            while begun and string[begun] != character:
                begun = borders[begun - 1]
            begun += string[begun] == character
            if begun == len(string):
                return end
        self._begun[index] = begun
        return None


@lru_cache(maxsize=256)
def _borders(string: str) -> list[int]:
    """For each beginning of it, the longest shorter one in which that ends, too."""
    borders = [0] * len(string)
    border = 0
    for at in range(1, len(string)):
        while border and string[border] != string[at]:
            border = borders[border - 1]
        border += string[border] == string[at]
        borders[at] = border
    return borders
