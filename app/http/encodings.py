"""Decoding of bodies, piece by piece, so that none outgrows its limit unseen."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import brotli
import zstandard

from app.core.errors import BodyTooLarge, EncodingUnknown, InvalidRequest, cut
from app.http.held import HeldBody

PIECE_BYTES = 64 * 1024
MAX_WINDOW_BYTES = 8 * 2**20
"""Window of zstd: decoders have to support no more (RFC 8878)."""


async def decoded(body: bytes, coding: str, limit: int, held: HeldBody | None) -> bytes:
    """Returns the body as it was before `coding`; its bytes count for `held`, too. Raises
    EncodingUnknown, InvalidRequest, BodyTooLarge and BodiesTooLarge."""
    if coding not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise EncodingUnknown(f"content-encoding: {cut(coding)!r} is none of {known}, identity")
    pieces, size = [], 0
    try:
        for piece in _DECODERS[coding](body):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"body: over {limit} bytes once decoded")
            if held is not None:
                held.add(len(piece))
                held.check(held.num_bytes)
            await asyncio.sleep(0)
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise InvalidRequest("body", f"is not {coding}: {error}") from None
    return b"".join(pieces)


def _inflated(body: bytes, wbits: int) -> Iterator[bytes]:
    inflater = zlib.decompressobj(wbits)
    while not inflater.eof:
        yield (piece := inflater.decompress(body, PIECE_BYTES))
        body = inflater.unconsumed_tail
        if not piece and not inflater.eof:
            raise zlib.error("it has no end")
    if inflater.unused_data:
        raise zlib.error("something follows its end")


def _deflated(body: bytes) -> Iterator[bytes]:
    """Inflates with the header of zlib, as HTTP has it, or without, as some clients send it."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return _inflated(body, 15 if has_header else -15)


def _brotli(body: bytes) -> Iterator[bytes]:
    decoder: Any = brotli.Decompressor()
    yield decoder.process(body, output_buffer_limit=PIECE_BYTES)
    while not decoder.is_finished():
        if decoder.can_accept_more_data():
            raise brotli.error("it has no end")
        yield decoder.process(b"", output_buffer_limit=PIECE_BYTES)


def _zstd(body: bytes) -> Iterator[bytes]:
    with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body) as reader:
        yield from iter(lambda: reader.read(PIECE_BYTES), b"")


_DECODERS: Mapping[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": lambda body: _inflated(body, 31),
    "deflate": _deflated,
    "br": _brotli,
    "zstd": _zstd,
}
