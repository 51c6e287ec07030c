"""The JSON body of a request: its members, and its bytes with a few members changed. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.errors import InvalidRequest, cut
from app.http import numbers

MAX_MEMBERS = 1000
"""No API has a tenth of that, and making objects of millions takes seconds."""
PROMPTS = ("prompt", "input")
"""Members that may be arrays of token ids."""

_BLANK = b" \t\r\n"
_OPENING = re.compile(rb"[ \t\r\n]*\{")
_SPACE = re.compile(rb"[ \t\r\n]*")
_BEFORE_IDS = re.compile(rb'[{, \t\r\n]"(prompt|input)"[ \t\r\n]*:[ \t\r\n]*\Z')
_MAX_BEFORE_IDS = 64
_FIRST_ID = re.compile(rb"\[[ \t\r\n]*[0-9]")
_PIECE_BYTES = 64 * 1024
"""Of what is scanned at once, so that it stays in the processor's cache."""
_OBJECT_BIT = 0x20
"""With it, the brackets of arrays are those of objects."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """raw: as it came. fields: its top-level members, in their order.

    Those of PROMPTS that are flat arrays of integers in [0, 2^64), and not empty, are numpy arrays
    of uint64.
    """

    raw: bytes
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: bytes) -> JsonBody:
        """Raises InvalidRequest if it is no object in JSON, or if a name comes twice at its top
        level: of two values, two parsers may take different ones."""
        found = _ids_in(raw)
        if found is not None:
            name, ids, rest = found
            # Invalid also where the array was no value, but inside of a string.
            with suppress(InvalidRequest):
                return cls(raw, _members(rest) | {name: ids})
        fields = _members(raw)
        for name in PROMPTS:
            # To isinstance, bool would be an int, too.
            if isinstance(fields.get(name), list) and {*map(type, fields[name])} == {int}:
                with suppress(OverflowError):
                    fields[name] = np.array(fields[name], np.uint64)
        return cls(raw, fields)

    def spliced(self, changes: Mapping[str, object], removed: Collection[str] = ()) -> bytes:
        """`raw` with the members in `changes` set and those in `removed` gone; all other bytes stay
        as they are. A member that is new comes last."""
        raw, fields = self.raw, self.fields
        begin, end = raw.index(b"{") + 1, raw.rindex(b"}")
        if fields.keys().isdisjoint(changes) and fields.keys().isdisjoint(removed):
            runs = [raw[begin:end]] if fields else []
        else:
            runs = self._runs(changes, removed)
        runs += [
            _dumps(name) + b":" + _dumps(value)
            for name, value in changes.items()
            if name not in fields
        ]
        blank = b"" if fields else raw[begin:end]
        return b"".join((raw[:begin], blank, b",".join(runs), raw[end:]))

    def _runs(self, changes: Mapping[str, object], removed: Collection[str]) -> list[bytes]:
        """What is left of the members, as texts that commas belong between."""
        raw = self.raw
        text = _without_escapes(raw)
        # Member i is between edges i and i + 1.
        edges = [raw.index(b"{"), *_commas(text), raw.rindex(b"}")]
        runs = []
        kept = 0
        for i, name in enumerate(self.fields):
            if name not in changes and name not in removed:
                continue
            if kept < i:
                runs.append(raw[edges[kept] + 1 : edges[i]])
            if name in changes:
                begin, end = edges[i] + 1, edges[i + 1]
                _, key_end = _key(text, begin)
                match = _SPACE.match(raw, raw.index(b":", key_end) + 1)
                assert match is not None
                value = raw[match.end() : end]
                blank = value[len(value.rstrip(_BLANK)) :]
                runs.append(raw[begin : match.end()] + _dumps(changes[name]) + blank)
            kept = i + 1
        if kept < len(self.fields):
            runs.append(raw[edges[kept] + 1 : edges[-1]])
        return runs


def _dumps(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _members(raw: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if _OPENING.match(raw) is None:
        raise InvalidRequest("body", "is not an object in JSON")
    num_members = _num_members(raw)
    if num_members > MAX_MEMBERS:
        raise InvalidRequest("body", f"has over {MAX_MEMBERS} members")
    try:
        fields: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # Its text says where, and repeats nothing.
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if num_members != max(1, len(fields)):
        raise InvalidRequest(cut(_repeated(raw)), "comes twice")
    return fields


def _num_members(raw: bytes) -> int:
    """How many members an object in JSON has, names that come twice counted twice; 1: or none. If
    over MAX_MEMBERS, perhaps more. Says nothing if `raw` is not valid."""
    if numbers.simdjson is not None:
        # It refuses some numbers that orjson takes.
        with suppress(RuntimeError, ValueError):
            # The parser must outlive what it has parsed.
            parser = numbers.simdjson.Parser()
            document: Any = parser.parse(raw)
            return max(1, len(document))
    return len(_commas(_without_escapes(raw))) + 1


def _repeated(raw: bytes) -> str:
    """The first name that comes again."""
    text = _without_escapes(raw)
    names: set[str] = set()
    for edge in (raw.index(b"{"), *_commas(text)):
        begin, end = _key(text, edge + 1)
        name = orjson.loads(raw[begin:end])
        if name in names:
            break
        names.add(name)
    return str(name)


def _ids_in(raw: bytes) -> tuple[str, NDArray[np.uint64], bytes] | None:
    """The name of the member that is an array of token ids, these, and the body with an empty
    string in its place; None: it is not plain that there is one.

    Half the time of making an object of each id. If the array was inside of a string, its quotes
    make the rest of the body invalid. Else it is where no array or second object has begun, so at
    the top level.
    """
    begin = raw.find(b"[")
    if begin < 0 or _FIRST_ID.match(raw, begin) is None:
        return None
    before = _BEFORE_IDS.search(raw[max(0, begin - _MAX_BEFORE_IDS) : begin])
    if before is None or raw.find(b"{") != raw.rfind(b"{", 0, begin):
        return None
    end = raw.find(b"]", begin) + 1
    ids = numbers.unsigned_of(raw[begin:end])
    if ids is None:
        return None
    return before[1].decode(), ids, raw[:begin] + b'""' + raw[end:]


def _without_escapes(raw: bytes) -> bytes:
    """`raw` with other bytes in place of escaped quotes and backslashes: all other quotes are where
    they were, and begin or end a string."""
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _key(text: bytes, begin: int) -> tuple[int, int]:
    """Where the first string after `begin` begins and ends, its quotes included."""
    start = text.index(b'"', begin)
    return start, text.index(b'"', start + 1) + 1


def _commas(text: bytes) -> list[int]:
    """Where the commas between the members of an object are; if over MAX_MEMBERS, the first ones.

    text: as from _without_escapes. The same few passes of numpy over every byte, so that no body
    takes longer than others; regular expressions crawl through deep nesting.
    """
    found: list[int] = []
    depth, is_quoted = 0, np.False_
    for start in range(0, len(text), _PIECE_BYTES):
        if is_quoted and text.find(b'"', start, start + _PIECE_BYTES) < 0:
            continue
        piece = np.frombuffer(text, np.uint8, min(_PIECE_BYTES, len(text) - start), start)
        quoted = np.logical_xor.accumulate(piece == ord('"')) ^ is_quoted
        brackets = piece | _OBJECT_BIT
        steps = (brackets == ord("{")).view(np.int8) - (brackets == ord("}")).view(np.int8)
        steps *= ~quoted
        depths = np.cumsum(steps, dtype=np.int32) + depth
        commas = np.flatnonzero((piece == ord(",")) & (depths == 1) & ~quoted)
        found += (commas[: MAX_MEMBERS + 1 - len(found)] + start).tolist()
        if len(found) > MAX_MEMBERS:
            break
        depth, is_quoted = int(depths[-1]), quoted[-1]
    return found
