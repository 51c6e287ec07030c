"""Names of a text's prefixes, for prompts whose tokens are not known: equal prefixes have equal
names."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128_hexdigest

PIECE_BYTES = 1024
MAX_PIECES = 512
"""Pieces that are named; a longer text is named by its beginning alone."""


def trail_of(text: bytes, seed: str) -> list[str]:
    """Returns a name for each prefix of whole pieces, the longest first. seed: part of all
    names."""
    names: list[str] = []
    name = seed
    for at in range(PIECE_BYTES, min(len(text), PIECE_BYTES * MAX_PIECES) + 1, PIECE_BYTES):
        name = "text-" + xxh3_128_hexdigest(name.encode() + text[at - PIECE_BYTES : at])
        names.append(name)
    return names[::-1]


def marks_of(trail: Sequence[str]) -> list[str]:
    """Returns the few names of a trail that find most prefixes shared with another text, and none
    by less than half of it: at the powers of two from its beginning, as many conversations begin
    alike, and from its end, where the next turn of the same one may differ."""
    num = len(trail)
    powers = [0, *(1 << n for n in range(num.bit_length()))]
    places = {place for power in powers for place in (power, num - power) if 0 <= place < num}
    return [trail[place] for place in sorted(places)]
