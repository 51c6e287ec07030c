"""Reads large bodies in pieces, so that none keeps the other callers waiting. No I/O.

Only arrays make a valid body large. Their contents are cut out; what is left is small, and pydantic
reads it. The contents are then read piece by piece, and other tasks run between any two. The first
bad item ends it, and more items than any prompt has are refused before one is read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from app.core.errors import InvalidRequest, cut, shown
from app.core.hashing import token_bytes
from app.edge import schemas
from app.edge.ask import M, parse
from app.http.numbers import unsigned_of
from app.http.turns import Turns

T = TypeVar("T")

PIECE_BYTES = 64 * 1024
"""Larger bodies are read in pieces of this size. The worst piece known, of numbers that no double
holds exactly, takes 20 ms."""

MAX_READING = 1024
"""Large bodies that may wait to be read."""

_BLANK = b" \t\r\n"
_ARRAY = re.compile(
    rb'"(token_ids|local_hashes|mm_hashes|exclude)"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*'
)
_END_OF_LISTS = re.compile(rb"\][ \t\r\n]{0,1000}\]")
_STRICT = ConfigDict(strict=True)
_ADAPTERS: dict[str, TypeAdapter[list[Any]]] = {
    "token_ids": TypeAdapter(schemas.Array[schemas.Token], config=_STRICT),
    "local_hashes": TypeAdapter(schemas.Array[schemas.HashValue], config=_STRICT),
    "mm_hashes": TypeAdapter(schemas.Array[schemas.Array[schemas.HashValue]], config=_STRICT),
    "exclude": TypeAdapter(schemas.Array[str], config=_STRICT),
}


@dataclass(frozen=True, slots=True)
class _Cut:
    """The content of one array: raw[start:end]. has_lists: whether its items are arrays."""

    start: int
    end: int
    has_lists: bool


class BodyReader:
    """Reads the bodies of one application, the large ones one after another, in turn between
    callers: each keeps others waiting for one piece, and many at once would for many.

    max_tokens: the length of the longest prompt.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._turns = Turns(1, MAX_READING)

    async def read(
        self, model: type[M], raw: bytes, block_size: int | None, holder: str
    ) -> tuple[M, bytes | None]:
        """Reads a body as `ask.parse` does. block_size: None while unknown. holder: whose body it
        is. Raises ValidationError, InvalidRequest and Crowded."""
        if len(raw) <= PIECE_BYTES:
            return parse(model, raw)
        async with self._turns.place(holder):
            return await self._read_in_pieces(model, raw, block_size or 1)

    async def _read_in_pieces(
        self, model: type[M], raw: bytes, block_size: int
    ) -> tuple[M, bytes | None]:
        rest, cuts = await _without_arrays(raw)
        max_blocks = self.max_tokens // block_size
        for name, array in cuts.items():
            most = max_blocks if name == "local_hashes" else self.max_tokens
            most = schemas.MAX_EXCLUDED if name == "exclude" else most
            _check_count(name, b",", raw, array, most - 1)
            if array.has_lists:
                _check_count(name, b"[", raw, array, max_blocks)
            await asyncio.sleep(0)
        body = model.model_validate_json(rest)
        tokens: bytes | None = None
        for name, array in cuts.items():
            if getattr(body, name) != []:
                raise _twice(name)
            if name == "token_ids":
                tokens = b"".join([part async for part in _read(name, raw, array, _tokens)])
                continue
            read = _hashes if name == "local_hashes" else _ADAPTERS[name].validate_json
            items: list[Any] = []
            async for more in _read(name, raw, array, read):
                items += more
            setattr(body, name, items)
        return body, tokens


def _check_count(name: str, sign: bytes, raw: bytes, array: _Cut, most: int) -> None:
    """Raises InvalidRequest if the array has the sign more than `most` times."""
    # Counting takes half as long as reading; an array has the sign at every second byte at most.
    if array.end - array.start > 2 * most and raw.count(sign, array.start, array.end) > most:
        raise InvalidRequest(name, f"over {most + (sign == b',')} items")


async def _without_arrays(raw: bytes) -> tuple[bytes, dict[str, _Cut]]:
    """Returns the body with the arrays empty, and where their contents are, by field. What is taken
    for an array wrongly, inside a string say, leaves a rest that is no valid body."""
    rest: list[bytes] = []
    cuts: dict[str, _Cut] = {}
    done = 0
    while begin := _ARRAY.search(raw, done, done + PIECE_BYTES):
        name = begin[1].decode()
        if name in cuts:
            raise _twice(name)
        start = begin.end()
        has_lists = raw[start : start + 1] == b"["
        end = await _end_of_lists(raw, start) if has_lists else raw.find(b"]", start)
        if end < 0:
            raise InvalidRequest("body", f"Invalid JSON: {name} has no end")
        rest.append(raw[done:start])
        cuts[name] = _Cut(start, end, has_lists)
        done = end
        await asyncio.sleep(0)
    if sum(map(len, rest)) + len(raw) - done > PIECE_BYTES:
        raise InvalidRequest(
            "body", f"over {PIECE_BYTES} bytes besides the items of {', '.join(_ADAPTERS)}"
        )
    return b"".join([*rest, raw[done:]]), cuts


async def _end_of_lists(raw: bytes, start: int) -> int:
    """Returns the place of the bracket that closes an array of arrays; -1 if there is none."""
    while start < len(raw):
        bracket = _END_OF_LISTS.search(raw, start, start + 2 * PIECE_BYTES)
        if bracket:
            return bracket.end() - 1
        # Both brackets may lie on the border.
        start += PIECE_BYTES
        await asyncio.sleep(0)
    return -1


def _twice(name: str) -> InvalidRequest:
    return InvalidRequest(name, "comes twice")


async def _read(name: str, raw: bytes, array: _Cut, read: Callable[[bytes], T]) -> AsyncIterator[T]:
    """Yields what `read` makes of each piece, an array in JSON of some of the items."""
    start = array.start
    end_of_item = b"]" if array.has_lists else b","
    while start < array.end:
        stop = array.end
        if stop - start > PIECE_BYTES:
            # A piece ends before a comma, and if the items are arrays, before one between two.
            last = start + PIECE_BYTES
            closed = raw.rfind(b"]", start, last) if array.has_lists else 0
            if array.has_lists:
                stop = (
                    -1 if closed < 0 else raw.find(b",", closed, min(last + PIECE_BYTES, array.end))
                )
            else:
                stop = raw.rfind(b",", start, last)
            if stop < 0:
                place = raw.count(end_of_item, array.start, start)
                raise InvalidRequest(
                    f"{name}.{place}", f"nothing ends it within {PIECE_BYTES} bytes"
                )
        piece = raw[start:stop]
        # An empty piece would be read as no items, and hide a comma that has none after it.
        if stop + 1 >= array.end > stop or not piece.strip(_BLANK):
            raise InvalidRequest("body", f"Invalid JSON: {name} has a comma without an item")
        try:
            yield read(b"[%b]" % piece)
        except ValidationError as error:
            num_before = raw.count(end_of_item, array.start, start)
            raise _translated(name, num_before, error) from None
        start = stop + 1
        await asyncio.sleep(0)


def _translated(name: str, num_before: int, error: ValidationError) -> InvalidRequest:
    """Returns the error of a body read at once: the first bad item by its place in the whole
    array."""
    first = error.errors(include_url=False, include_context=False)[0]
    if not first["loc"]:
        return InvalidRequest("body", f"{cut(first['msg'])}, in {name} after {num_before} items")
    index, *inner = first["loc"]
    place = ".".join(map(str, [name, num_before + int(index), *inner]))
    return InvalidRequest(place, f"{first['msg']}, got {shown(first['input'])}")


def _tokens(piece: bytes) -> bytes:
    numbers = unsigned_of(piece)
    return token_bytes(_ADAPTERS["token_ids"].validate_json(piece) if numbers is None else numbers)


def _hashes(piece: bytes) -> list[int]:
    numbers = unsigned_of(piece)
    if numbers is None:
        return _ADAPTERS["local_hashes"].validate_json(piece)
    hashes: list[int] = numbers.tolist()
    return hashes
