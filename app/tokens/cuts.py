"""Cuts in a text whose parts, tokenized apart, give the ids of the whole; and a memory of parts'
ids.

A tokenizer first looks for its added tokens, from left to right, the longest at each place, and
treats the text between two of them by itself. So a part that begins with an added token, and ends
before one, has the same ids wherever it stands, provided that this token is found at that place
whatever surrounds it. `cut_tokens` selects the tokens of which that is sure.

To tokenize a long text takes two hundred times its size in memory. So what lies between two added
tokens is cut into pieces as well, before a space between two letters of ASCII, if no token of the
vocabulary has such a space inside: then none reaches across.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

MAX_CUT_TOKENS = 16
"""Tokens to cut at: each may be looked for in all of a text."""
SEARCHED_BYTES = 256 * 1024
"""Bytes searched at once, while no other thread runs."""
MIN_PART_BYTES = 256
"""Least bytes of a part, but for the last, as each costs a look-up."""


def cut_tokens(added: Mapping[int, AddedToken], used: Collection[str]) -> dict[bytes, int]:
    """Returns the tokens, in UTF-8, before which a text may be cut, and their ids. added: all added
    tokens, by id. used: those that the model's prompts are known to contain, preferred if there are
    many."""
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
    """Whether a token is looked for in the text as it came, and takes nothing of what is
    around it."""
    is_literal = not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    # Neighbours may take white space.
    return is_literal and bool(token.content) and token.content == token.content.strip()


def _hides(other: str, content: str) -> bool:
    """Whether finding `other` in a text may keep `content` from being found there."""
    if other != content and content in other:
        return True
    return any(content.startswith(other[start:]) for start in range(1, len(other)))


class Cuts:
    """Search for cuts in texts. tokens: those of `cut_tokens`."""

    def __init__(self, tokens: Collection[bytes]) -> None:
        # One pass for all of them: most vocabularies' begin alike, and the text is searched for
        # that.
        self._any = re.compile(b"|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)

    def of(self, text: bytes) -> list[tuple[int, bytes]]:
        """Returns cuts as offsets in bytes, ascending, each with its token. The cuts of a text do
        not depend on what follows them."""
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


PIECE_BYTES = 256 * 1024
AROUND_A_CUT = 64
"""Tokens around a cut that may differ between the whole and two pieces of it."""
_SHRINKS = 3
"""Bytes that may become one in normalization form C."""
_PROBED_SPACES = 4096
_PLACE = re.compile(rb"[a-z](?= [a-z])")
_SEARCHED_BYTES = 4096
"""Bytes at the end of a piece in which a cut is looked for."""
_INSIDE = re.compile("[a-z][ \u0120\u2581][a-z]")
"""A space between two letters, as the kinds of vocabularies write it."""
_PROBE = "the quick brown fox  jumps over\na lazy dog, and so on"


def can_cut(tokenizer: tokenizers.Tokenizer, ids: Callable[[str], list[int]]) -> bool:
    """Whether the ids of pieces are those of the whole. ids: returns those of a text."""
    if any(_INSIDE.search(token) for token in tokenizer.get_vocab(with_added_tokens=False)):
        return False
    # Added tokens are looked for as they are written.
    added = [token.content.encode() for token in tokenizer.get_added_tokens_decoder().values()]
    if any(_PLACE.search(content) for content in added):
        return False
    whole = ids(_PROBE)
    ends = [place.end() for place in _PLACE.finditer(_PROBE.encode())]
    return all(ids(_PROBE[:end]) + ids(_PROBE[end:]) == whole for end in ends)


def longest_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Returns the most bytes of a text that one token stands for; 0 if that is not known."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    normalizer = tokenizer.normalizer
    is_of_bytes = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if not is_of_bytes or not isinstance(normalizer, normalizers.NFC | None):
        return 0
    longest = max(map(len, vocabulary)) * (1 if normalizer is None else _SHRINKS)
    spaces = tokenizer.encode(" " * _PROBED_SPACES, add_special_tokens=False).ids
    return longest if longest * len(spaces) >= _PROBED_SPACES else 0


def pieces(text: bytes) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of `text`, in UTF-8, and whether each ends where a text can be cut."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = start + PIECE_BYTES
        tail = text[end - _SEARCHED_BYTES : end]
        places = [place.end() for place in _PLACE.finditer(tail)]
        end = end - _SEARCHED_BYTES + places[-1] if places else _before_character(text, end)
        yield text[start:end].decode(), bool(places)
        start = end
    yield text[start:].decode(), True


def _before_character(text: bytes, end: int) -> int:
    while text[end] & 0xC0 == 0x80:
        end -= 1
    return end


OVERHEAD_BYTES = 250


class Parts:
    """Memory of the ids of the texts that were used last, for any number of threads. max_bytes: of
    texts and ids together; when full, those not used for longest are forgotten. An entry that would
    take a quarter of it is not remembered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._entry_bytes = 0

    def get(self, texts: Sequence[bytes]) -> list[bytes | None]:
        """Returns the ids of each text, as little-endian u32; None if they are not known."""
        with self._lock:
            ids = [self._ids.get(text) for text in texts]
            for text, known in zip(texts, ids, strict=True):
                if known is not None:
                    self._ids.move_to_end(text)
            return ids

    def put(self, parts: Iterable[tuple[bytes, bytes]]) -> None:
        with self._lock:
            for text, ids in parts:
                size = _entry_bytes(text, ids)
                if text not in self._ids and size <= self._max_bytes // 4:
                    self._entry_bytes += size
                    self._ids[text] = ids
            while self._entry_bytes > self._max_bytes:
                self._entry_bytes -= _entry_bytes(*self._ids.popitem(last=False))

    def check(self) -> None:
        with self._lock:
            assert self._entry_bytes == sum(
                _entry_bytes(text, ids) for text, ids in self._ids.items()
            )
            assert self._entry_bytes <= self._max_bytes


def _entry_bytes(text: bytes, ids: bytes) -> int:
    return len(text) + len(ids) + OVERHEAD_BYTES
