"""JSON bodies of requests, whose members are read when they are looked at."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from app.core.errors import InvalidRequest, cut
from app.http import numbers

MAX_MEMBERS = 1000
"""Members of a body: no API has a tenth of that."""
MAX_VALUES = 100_000
"""Values of a body, besides plain numbers in arrays of nothing else: to make objects of millions
takes seconds, here and in engines."""
MAX_IDS = 1 << 21
"""Ids in one array: no prompt is as long."""
MAX_LISTS = 4096
IDS = frozenset(("prompt", "input", "prompt_token_ids", "input_ids", "tokens"))
"""Members that may be arrays of token ids."""
FROM_ROUTERS = "kv_transfer_params"
"""Object whose members may be such arrays, too."""

_PIECE_BYTES = 64 * 1024
"""Bytes of a larger body's member that are looked at before other tasks run. Smaller bodies are
read in a few ms."""
_ID_CHARACTERS = b"0123456789,[] \t\r\n"
_ONE = re.compile(rb"\][ \t\r\n]*\]\Z")
_NO_BATCH = re.compile(rb"\A\[[ \t\r\n]*[0-9\]]|\][ \t\r\n]*,[ \t\r\n]*[0-9]")
"""Sign that an array of numbers and arrays has an item that is no array."""


MAX_HALVES, MAX_HALVED_BYTES = 1000, 2 * 2**20
"""Halves of characters looked for, and bytes in which: a MiB takes 50 ms."""
_HALF = re.compile(
    rb"((?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+)"
    rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""Text without, and then one half of a pair of escapes that stands for one character: JavaScript
and Python write such halves, and no engine takes them."""
_HALF_PAIRS = re.compile("escape|surrogate|truncated")


class _Name(str):
    """Name for which msgspec calls a hook, else it would keep one of two equal names."""

    __slots__ = ()


class Fields(Mapping[str, Any]):
    """Members of a body, by name, read when they are looked at. Raises InvalidRequest where one
    cannot be read.

    Members of IDS that are arrays of integers in [0, 2^64), and not empty, are numpy arrays of
    uint64; an array of such arrays is a list of them, or that one array if it is alone.
    """

    __slots__ = ("_members", "_read")

    def __init__(self, members: Mapping[str, msgspec.Raw]) -> None:
        self._members = members
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._read:
            return self._read[name]
        value = self._read[name] = _value(name, bytes(self._members[name]))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        # A Mapping's own raises and catches a KeyError for each member that is absent.
        return self[name] if name in self._members else default

    def keys(self) -> KeysView[str]:
        # Of a Mapping's own, each name goes through __iter__ or __contains__.
        return self._members.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def raw(self, name: str) -> bytes:
        """Returns a member as it came; b"" if there is none."""
        return bytes(self._members[name]) if name in self._members else b""

    def size(self, name: str) -> int:
        return len(memoryview(self._members[name])) if name in self._members else 0

    def mentions(self, name: str, words: Iterable[bytes]) -> bool:
        """Whether any of the words is in a member, as it came."""
        text = bytes(self._members[name]) if name in self._members else b""
        return any(word in text for word in words)


@dataclass(slots=True)
class JsonBody:
    """A body. text: all of it. members: of its top level, as they came, in their order. fields:
    their values."""

    text: bytes
    members: Mapping[str, msgspec.Raw]
    fields: Fields

    @classmethod
    def parse(cls, raw: bytes) -> JsonBody:
        """Returns the body. Half a character becomes U+FFFD.

        Raises InvalidRequest if it is no object in JSON, or if a name comes twice at its top level:
        of two values, two parsers may take different ones. A member that is not looked at may be no
        Unicode, or a number that nobody can hold.
        """
        names: set[str] = set()

        def named(_: type, name: str) -> _Name:
            if name in names:
                raise InvalidRequest(cut(name), "comes twice")
            if len(names) == MAX_MEMBERS:
                raise InvalidRequest("body", f"has over {MAX_MEMBERS} members")
            names.add(name)
            return _Name(name)

        try:
            members: dict[Any, msgspec.Raw] = msgspec.json.decode(
                raw, type=dict[_Name, msgspec.Raw], dec_hook=named
            )
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if _HALF_PAIRS.search(str(error)) and len(raw) <= MAX_HALVED_BYTES:
                parts, at = list[bytes](), 0
                while (half := _HALF.match(raw, at)) and len(parts) < 2 * MAX_HALVES:
                    parts += [half[1], rb"\ufffd"]
                    at = half.end()
                if parts and half is None:
                    return cls.parse(b"".join([*parts, raw[at:]]))
            # Its text says where, and repeats nothing.
            raise InvalidRequest("body", f"is not an object in JSON: {error}") from None
        return cls(raw, members, Fields(members))

    @classmethod
    async def read(cls, raw: bytes) -> JsonBody:
        """Returns the body, giving way to other tasks. Raises InvalidRequest, also for too many
        values."""
        body = cls.parse(raw)
        if len(raw) <= _PIECE_BYTES:
            return body
        left = MAX_VALUES
        for name, member in body.members.items():
            await asyncio.sleep(0)
            left -= await _num_values(name, bytes(member), left)
        return body

    def changed(self, changes: Mapping[str, object], without: Collection[str] = ()) -> bytes:
        """Returns the object with the members in `changes` set (new ones last), and without those
        in `without`; all others stay as they came."""
        if self.members and not without and self.members.keys().isdisjoint(changes):
            new = [b",%b:%b" % (dumps(name), dumps(value)) for name, value in changes.items()]
            return b"".join([self.text.rstrip()[:-1], *new, b"}"])
        parts: list[Any] = []
        for name, value in {**self.members, **changes}.items():
            if name in without:
                continue
            is_raw = isinstance(value, msgspec.Raw)
            parts += [b",", orjson.dumps(name), b":", value if is_raw else dumps(value)]
        return b"".join([b"{", *parts[1:], b"}"])


def dumps(value: object, field: str = "body") -> bytes:
    """Returns JSON of what was read. Raises InvalidRequest."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:  # what can be read can be written, but for its depth
        raise InvalidRequest(field, f"is nested too deeply: {error}") from None


def _value(name: str, text: bytes) -> Any:
    if name == FROM_ROUTERS and text.startswith(b"{"):
        return dict(JsonBody.parse(text).fields)
    if name in IDS and _has_only_numbers(text):
        ids = _ids(text)
        if ids is not None:
            return ids
        if _NO_BATCH.search(text) is None:
            items = msgspec.json.decode(text, type=list[msgspec.Raw])
            batch = [_ids(bytes(item)) for item in items]
            if not any(ids is None for ids in batch):
                return batch
        if len(text) > _PIECE_BYTES:
            raise InvalidRequest(name, "is neither an array of token ids nor one of such arrays")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(cut(name), f"cannot be read: {error}") from None


def _has_only_numbers(text: bytes) -> bool:
    return text.startswith(b"[") and not text.translate(None, _ID_CHARACTERS)


def _ids(text: bytes) -> NDArray[np.uint64] | None:
    """Returns an array of integers in [0, 2^64), or the only one in an array; None if it is none,
    or empty."""
    begin = text.rfind(b"[")
    if begin and (text[1:begin].strip() or _ONE.search(text, begin) is None):
        return None
    flat = text[begin : text.find(b"]") + 1]
    ids = numbers.unsigned_of(flat)
    if ids is None and numbers.simdjson is None:
        given = orjson.loads(flat)
        if {*map(type, given)} == {int}:  # it makes floats of larger ones
            ids = np.array(given, np.uint64)
    return ids if ids is not None and len(ids) else None


async def _num_values(name: str, text: bytes, most: int) -> int:
    if text.startswith(b"{") and name == FROM_ROUTERS:
        members = JsonBody.parse(text).members
        return sum([await _num_values(name, bytes(each), most) for each in members.values()])
    num_lists, num_items = text.count(b"["), text.count(b",")
    num = num_lists + num_items + text.count(b"{")
    if num <= most:
        return num
    await asyncio.sleep(0)
    if _has_only_numbers(text):
        if num_lists > min(MAX_LISTS, most) or num_items > MAX_IDS:
            raise InvalidRequest(cut(name), f"over {MAX_LISTS} arrays or {MAX_IDS} numbers")
        return num_lists
    num = 0
    async for outside in _outside_strings(text):
        num += sum(outside.count(mark) for mark in (b",", b"[", b"{"))
        if num > most:
            raise InvalidRequest(cut(name), f"the body has over {MAX_VALUES} values")
    return num


async def _outside_strings(text: bytes) -> AsyncIterator[bytes]:
    """Yields the parts of valid JSON that are outside of strings."""
    is_quoted = False
    start = 0
    while start < len(text):
        await asyncio.sleep(0)
        end = start + _PIECE_BYTES
        piece = text[start:end]
        # A backslash goes with what follows it.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1
            piece = text[start:end]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_quoted::2])
        is_quoted ^= len(parts) % 2 == 0
        start = end


FORM = b"multipart/form-data"
_BOUNDARY = re.compile(rb"""(?i)boundary="?([^";,\s]{1,70})""")
_NAME = re.compile(rb"""(?i)[;\s]name="?([^";\r\n]{1,100})""")


@dataclass(slots=True)
class FormBody(JsonBody):
    """A form. members: its texts, as in JSON, without files."""

    @classmethod
    def of_form(cls, raw: bytes, content_type: bytes) -> FormBody:
        """Returns the form in a body. Raises InvalidRequest."""
        boundary = _BOUNDARY.search(content_type)
        if boundary is None:
            raise InvalidRequest("content-type", "names no boundary of the form's parts")
        members = dict[str, msgspec.Raw]()
        for part in raw.split(b"--" + boundary[1], MAX_MEMBERS):
            head, is_part, value = part.partition(b"\r\n\r\n")
            if is_part and (name := _NAME.search(head)) and b"filename" not in head.lower():
                text = name[1].decode(errors="replace")
                if text == "model" and text in members:
                    raise InvalidRequest(cut(text), "comes twice")
                said = value.removesuffix(b"\r\n").decode(errors="replace")
                members[text] = msgspec.Raw(dumps(said))
        return cls(raw, members, Fields(members))

    def changed(self, changes: Mapping[str, object], without: Collection[str] = ()) -> bytes:
        """Returns the form with another `model`, if `changes` name one."""
        if "model" not in changes or "model" not in self.fields:
            return self.text
        old = re.escape(self.fields["model"].encode())
        part = rb'(?i)(\sname="?model"?(?:\r\n[^\r\n]+)*\r\n\r\n)%b(?=\r\n--)' % old
        return re.sub(part, rb"\1" + str(changes["model"]).encode(), self.text, count=1)
