"""Request bodies within a limit, and errors in one shape."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from types import coroutine
from typing import Any, TypeVar

import brotli
import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from app.core.errors import BodyTimeout, BodyTooLarge, EncodingUnknown, InvalidRequest, cut
from app.http.held import HELD, HeldBody

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


T = TypeVar("T")

BODY_TIMEOUT_S = 30.0
"""Seconds for a body, and between any two of its pieces."""
LEAST_BYTES_PER_S = 8192
"""Bytes that earn a body a further second: slow lines bring large ones, too."""


async def read_body(request: Request, limit: int, flag: str = "") -> bytes:
    """Returns the body, decoded. flag: named in errors of the limit. Raises BodyTooLarge and
    BodiesTooLarge as soon as that is known, BodyTimeout, ClientDisconnect, and what `decoded`
    raises."""
    size, coding = _announced(request)
    held: HeldBody | None = request.scope.get(HELD)  # servers of other makes, in tests, have none
    if held is not None and size <= limit:
        held.check(size)
    chunks: list[bytes] = []
    began_s = 0.0
    more = size <= limit
    if more:
        size = 0
    while more and size <= limit:
        receiving = request.receive().__await__()
        try:
            waits_for = next(receiving)
        except StopIteration as arrived:
            # Most bodies arrive with their headers, and a deadline for those would take a twentieth
            # of a decision's CPU.
            message: Message = arrived.value
        else:
            now_s = asyncio.get_running_loop().time()
            began_s = began_s or now_s
            earned_s = size / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout_at(min(now_s, began_s + earned_s) + BODY_TIMEOUT_S):
                    message = await resumed(receiving, waits_for)
            except TimeoutError:
                raise BodyTimeout(
                    f"body: nothing of it for {BODY_TIMEOUT_S:g} s, or under {LEAST_BYTES_PER_S} "
                    "bytes a second"
                ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if held is not None:
            held.check(size)
        more = message.get("more_body", False)
    try:
        if size > limit:
            raise BodyTooLarge(f"body: over {limit} bytes")
        body = b"".join(chunks)
        return await decoded(body, coding, limit, held) if coding else body
    except BodyTooLarge as error:
        raise BodyTooLarge(f"{error}: see {flag}" if flag else str(error)) from None


def _announced(request: Request) -> tuple[int, str]:
    """Returns length and encoding ("": none) that headers say, without making an object of all
    headers, as request.headers does."""
    size, coding = 0, ""
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            size = int(value) if value.isdigit() else 0
        elif name == b"content-encoding":
            coding = value.decode("latin-1").strip().lower().removeprefix("x-")
    return size, "" if coding == "identity" else coding


@coroutine
def resumed(started: Generator[Any, None, T], waits_for: Any) -> Generator[Any, None, T]:
    """Awaits the rest of a coroutine that has been started and waits for something."""
    try:
        yield waits_for
        return (yield from started)
    finally:
        started.close()


def error_body(code: str, message: str, field: str | None = None) -> dict[str, object]:
    """Returns the body of an error, one shape for all. code: stable, part of the interface."""
    return {"error": {"code": code, "message": message, "field": field}}
