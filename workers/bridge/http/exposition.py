"""Reads single metrics out of Prometheus text, which is mostly others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class SamplePattern:
    """Finds the samples with one of these names.

    One regular expression skips all other lines without making objects of them: an engine's text
    has thousands, and is read every second.
    """

    def __init__(self, names: Iterable[str]) -> None:
        either = b"|".join(re.escape(name.encode()) for name in names)
        self._line = re.compile(rb"^(" + either + rb")(?:\{([^\n]*)\})? +(\S+)", re.MULTILINE)

    def samples(self, text: bytes) -> Iterator[Sample]:
        """In the order of `text`. Skips those whose value is no number, or is infinite."""
        for name, labels, number in self._line.findall(text):
            try:
                value = float(number)
            except ValueError:
                continue
            if abs(value) < float("inf"):
                pairs = _LABEL.findall(labels)
                yield Sample(
                    name.decode(),
                    {key.decode(): said.decode(errors="replace") for key, said in pairs},
                    value,
                )
