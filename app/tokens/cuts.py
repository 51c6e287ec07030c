"""Where a text may be cut so that its parts, tokenized apart, give the ids of the whole.

A tokenizer first looks for its added tokens, from left to right, the longest at each place, and
treats the text between two of them by itself. So a part that begins with an added token, and ends
before one, has the same ids wherever it stands, provided that this token is found at that place
whatever surrounds it. `cut_tokens` selects the tokens of which that is sure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tokenizers import AddedToken

MAX_CUT_TOKENS = 16
"""Each may be looked for in all of a text."""
SEARCHED_BYTES = 256 * 1024
"""At once: meanwhile no other thread runs."""
MIN_PART_BYTES = 256
"""Parts are at least as long, but for the last, as each costs a look-up."""


def cut_tokens(added: Mapping[int, AddedToken], used: Collection[str]) -> dict[bytes, int]:
    """The tokens, in UTF-8, before which a text may be cut, and their ids.

    added: all added tokens, by id. used: those that the model's prompts are known to contain,
    preferred if there are many.
    """
    plain = {token.content: token_id for token_id, token in added.items() if _is_plain(token)}
    if len(plain) > MAX_CUT_TOKENS:
        plain = {content: plain[content] for content in plain if content in used}
    contents = {token.content for token in added.values()}
    sure = {
        content.encode(): token_id
        for content, token_id in plain.items()
        if not any(_hides(other, content) for other in contents)
    }
    return dict(list(sure.items())[:MAX_CUT_TOKENS])


def _is_plain(token: AddedToken) -> bool:
    """Whether it is looked for in the text as it came, and takes nothing of what is around it."""
    is_literal = not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    # Neighbours may take white space.
    return is_literal and bool(token.content) and token.content == token.content.strip()


def _hides(other: str, content: str) -> bool:
    """Whether finding `other` in a text may keep `content` from being found there."""
    if other != content and content in other:
        return True
    return any(content.startswith(other[start:]) for start in range(1, len(other)))


class Cuts:
    """Finds where to cut texts. tokens: before which, as from `cut_tokens`."""

    def __init__(self, tokens: Collection[bytes]) -> None:
        # One pass for all of them: most vocabularies' begin alike, and the text is searched for
        # that.
        self._any = re.compile(b"|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)

    def of(self, text: bytes) -> list[tuple[int, bytes]]:
        """Where to cut, and the token that is there: as offsets in bytes, ascending.

        The cuts of a text do not depend on what follows them.
        """
        cuts: list[tuple[int, bytes]] = []
        target = 0
        while self._any is not None and target < len(text):
            end = target + SEARCHED_BYTES + self._longest
            if (place := self._any.search(text, target, end)) is None:
                target += SEARCHED_BYTES
            else:
                cuts.append((place.start(), place[0]))
                target = place.start() + MIN_PART_BYTES
        return cuts
