"""Long texts in pieces: to tokenize one takes two hundred times its size in memory.

The ids of the pieces are those of the whole where a text is cut before a space between two letters
of ASCII, if no token of the vocabulary has such a space inside: then none reaches across.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import normalizers, pre_tokenizers

PIECE_BYTES = 256 * 1024
AROUND_A_CUT = 64
"""Tokens that may be others in the whole than in two pieces of it."""
_SHRINKS = 3
"""Bytes that may become one in normalization form C."""
_PROBED_SPACES = 4096
_PLACE = re.compile(rb"[a-z](?= [a-z])")
_SEARCHED_BYTES = 4096
"""At the end of a piece."""
_INSIDE = re.compile("[a-z][ \u0120\u2581][a-z]")
"""A space between two letters, as the kinds of vocabularies write it."""
_PROBE = "the quick brown fox  jumps over\na lazy dog, and so on"


def can_cut(tokenizer: tokenizers.Tokenizer, ids: Callable[[str], list[int]]) -> bool:
    """Whether the ids of pieces are those of the whole. ids: of a text."""
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
    """The most bytes of a text that one token stands for; 0: no such number is known."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    normalizer = tokenizer.normalizer
    is_of_bytes = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if not is_of_bytes or not isinstance(normalizer, normalizers.NFC | None):
        return 0
    longest = max(map(len, vocabulary)) * (1 if normalizer is None else _SHRINKS)
    spaces = tokenizer.encode(" " * _PROBED_SPACES, add_special_tokens=False).ids
    return longest if longest * len(spaces) >= _PROBED_SPACES else 0


def pieces(text: bytes) -> Iterator[tuple[str, bool]]:
    """The pieces of `text`, in UTF-8, and whether each ends where a text can be cut."""
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
