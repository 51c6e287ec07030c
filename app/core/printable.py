"""Text of others, made safe for logs and terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns `text` with JSON's escapes for every character that is not printable.

    So a worker's name or a path cannot end the line, move the cursor, change colours, or turn the
    direction of text: C0 and C1, line separators, bidi controls, odd spaces, surrogates and
    unassigned characters are escaped. JSON keeps its meaning.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
