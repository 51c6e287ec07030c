"""Request bodies within a limit, and errors in one shape."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from app.core.errors import BodyTimeout, BodyTooLarge
from app.http.encodings import decoded
from app.http.held import HELD, HeldBody

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
