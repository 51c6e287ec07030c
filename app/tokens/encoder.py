"""Encoding of text as token ids, without tokenizing again what was tokenized before."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
import tokenizers
from numpy.typing import NDArray

from app.core.hashing import PROBE, hash_of_probe
from app.tokens.cuts import (
    AROUND_A_CUT,
    PIECE_BYTES,
    Cuts,
    Parts,
    can_cut,
    cut_tokens,
    longest_token,
    pieces,
)
from app.tokens.errors import Allowance, TooManyTokens, Unrenderable

Ids = NDArray[np.uint32]
"""Token ids, read-only. `app.core.hashing` takes the array as it is; orjson writes it with
OPT_SERIALIZE_NUMPY in an eighth of the time that a list of ints takes to be made and written."""

FIRST = b"\xff"
"""Prefix, not in UTF-8, of a part that begins a text, as some tokenizers put a space there."""


class Encoder:
    """Encoder of one model's texts, safe to call from several threads. used: added tokens that
    texts are likely to contain. max_bytes: of texts and ids remembered; 0: none."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, used: Collection[str], max_bytes: int
    ) -> None:
        # A file may ask for both, for training; a prompt must stay as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._parts = Parts(max_bytes)
        # Dropout, or tokens that are split like any text, make ids depend on more than the text.
        is_random = bool(getattr(tokenizer.model, "dropout", None))
        may_cut = max_bytes > 0 and not is_random and not tokenizer.encode_special_tokens
        added = tokenizer.get_added_tokens_decoder()
        self._cut_tokens = cut_tokens(added, used) if may_cut else {}
        self._cuts = Cuts(self._cut_tokens)
        self._cuts_words = not is_random and can_cut(tokenizer, self._ids)
        self._longest_token = longest_token(tokenizer)
        self._special = self._special_ids()
        self.fingerprint = hash_of_probe(self._ids(PROBE, add_special_tokens=True))

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allowance: Allowance | None = None
    ) -> Ids:
        """Returns the ids of `text`, equal to those from scratch.

        add_special_tokens: whether to add those that the tokenizer puts around a text, mostly one
        at its start. Raises Unrenderable if `text` is not Unicode, or cannot be tokenized in parts
        although it is long; and what Allowance.take raises.
        """
        allowance = allowance or Allowance()
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise Unrenderable("text", str(error)) from None
        if self._longest_token and len(raw) > self._longest_token * allowance.max_tokens > 0:
            raise TooManyTokens(len(raw) // self._longest_token)
        places = self._cuts.of(raw)
        if len(raw) <= PIECE_BYTES and (
            not places or (add_special_tokens and self._special is None)
        ):
            ids = _packed(self._ids(text, add_special_tokens))
            allowance.take(len(ids) // 4)
            return np.frombuffer(ids, "<u4")
        ids = self._by_parts(raw, places, allowance) if places else self._long(raw, allowance)
        if add_special_tokens:
            if self._special is None:
                raise Unrenderable("size", f"{len(raw)} bytes at once")
            ids = ids.join(self._special)
        return np.frombuffer(ids, "<u4")

    def check(self) -> None:
        self._parts.check()

    def _by_parts(self, raw: bytes, places: list[tuple[int, bytes]], allowance: Allowance) -> bytes:
        starts = [start for start, _ in places]
        keys = [raw[start:end] for start, end in pairwise(starts)]
        if starts[0]:
            keys.insert(0, FIRST + raw[: starts[0]])
            places = [(0, b""), *places]
            starts = [0, *starts]
        known = self._parts.get(keys)
        # The last part ends where the text does, and the next text may go on there.
        parts: list[bytes] = []
        new: list[tuple[bytes, bytes]] = []
        at = 0
        while at < len(places):
            if at < len(keys) and (ids := known[at]) is not None:
                allowance.take(len(ids) // 4)
                parts.append(ids)
                at += 1
                continue
            end = _end_of_run(at, starts, known)
            made = self._run(
                raw, places[at:end], places[end] if end < len(places) else None, allowance
            )
            if len(made) == end - at:
                new += zip(keys[at:end], made, strict=False)
            parts += made
            at = end
        self._parts.put(new)
        return b"".join(parts)

    def _run(
        self,
        raw: bytes,
        places: list[tuple[int, bytes]],
        next_place: tuple[int, bytes] | None,
        allowance: Allowance,
    ) -> list[bytes]:
        """Returns the ids of each of the parts that begin at `places`; or of all of them as one, if
        it cannot be told where a part's ids begin. next_place: where the next part begins; None:
        there is none."""
        begin = places[0][0]
        end, token = next_place or (len(raw), b"")
        # With the token behind it, as that is what follows.
        ids = np.frombuffer(
            self._long(raw[begin : end + len(token)], allowance, 1 if token else 0), "<u4"
        )
        if token:
            ids = ids[:-1]
        indexes = [0]
        last: dict[bytes, tuple[int, int]] = {}
        where: dict[bytes, NDArray[np.intp]] = {}
        for start, cut_token in places[1:]:
            if cut_token not in where:
                where[cut_token] = np.flatnonzero(ids == self._cut_tokens[cut_token])
                # Normalized text can turn into the token's text, and then into its id.
                if len(where[cut_token]) != raw.count(cut_token, begin, end):
                    return [ids.tobytes()]
            since, num = last.get(cut_token, (begin, 0))
            num += raw.count(cut_token, since, start)
            last[cut_token] = start, num
            indexes.append(int(where[cut_token][num]))
        bounds = zip(indexes, [*indexes[1:], len(ids)], strict=True)
        return [ids[a:b].tobytes() for a, b in bounds]

    def _long(self, raw: bytes, allowance: Allowance, behind: int = 0) -> bytes:
        """Returns the ids of a text of any length. behind: tokens at its end that do not count.
        Raises Unrenderable."""
        ids: list[bytes] = []
        is_whole = True
        allowance.num_tokens -= behind
        for piece, is_cut in pieces(raw):
            ids.append(_packed(self._ids(piece)))
            is_whole = is_whole and is_cut
            # Those around a cut may be fewer in the whole.
            uncounted = 0 if is_cut else AROUND_A_CUT
            allowance.take(max(0, len(ids[-1]) // 4 - uncounted))
        if len(ids) > 1 and not (is_whole and self._cuts_words):
            raise Unrenderable("size", f"{len(raw)} bytes at once")
        return b"".join(ids)

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # The library lets other threads run meanwhile only if given a batch.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids

    def _special_ids(self) -> tuple[bytes, bytes] | None:
        """Returns the ids that the tokenizer puts before and after any text; None if that cannot be
        told."""
        whole = self._tokenizer.encode("a")
        mask = whole.special_tokens_mask
        bare = self._ids("a")
        if 0 not in mask:
            return None
        before = mask.index(0)
        after = before + len(bare)
        if whole.ids[before:after] != bare or not all(mask[after:]):
            return None
        return _packed(whole.ids[:before]), _packed(whole.ids[after:])


def _end_of_run(at: int, starts: list[int], known: list[bytes | None]) -> int:
    """Returns where the parts end that are tokenized together from `at` on. known: of all but the
    last part."""
    end = at + 1
    while (
        end < len(starts)
        and (end == len(known) or known[end] is None)
        and starts[end] - starts[at] < PIECE_BYTES
    ):
        end += 1
    return end


def _packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()
