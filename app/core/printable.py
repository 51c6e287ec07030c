"""What others wrote, as a line of a log or a terminal may have it."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with JSON's escapes in place of all that is not printed as itself.

    So nobody who names a worker or a path can end the line, move the cursor, change colours, or
    turn the direction of what follows: C0 and C1, line and paragraph separators, bidi controls and
    other format characters, spaces but the usual one, surrogates, and what Unicode has not assigned
    yet. JSON stays JSON with the same meaning.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
