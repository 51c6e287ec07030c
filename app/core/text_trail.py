"""Names of the prefixes of a text, for prompts whose tokens are not known: equal prefixes have
equal names."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128_hexdigest

PIECE_BYTES = 1024
MAX_PIECES = 512
"""What is longer is named by its beginning alone."""


def trail_of(text: bytes, seed: str) -> list[str]:
    """A name for each prefix of whole pieces, the longest first. seed: texts with other ones have
    other names."""
    names: list[str] = []
    name = seed
    for at in range(PIECE_BYTES, min(len(text), PIECE_BYTES * MAX_PIECES) + 1, PIECE_BYTES):
        name = "text-" + xxh3_128_hexdigest(name.encode() + text[at - PIECE_BYTES : at])
        names.append(name)
    return names[::-1]


def marks_of(trail: Sequence[str]) -> list[str]:
    """Of a trail, the few names by which most prefixes that another text shares are found, and none
    by less than half of it: at the powers of two from its beginning, as many conversations begin
    alike, and from its end, where the next turn of the same one may differ in what it had last."""
    num = len(trail)
    powers = [0, *(1 << n for n in range(num.bit_length()))]
    places = {place for power in powers for place in (power, num - power) if 0 <= place < num}
    return [trail[place] for place in sorted(places)]
