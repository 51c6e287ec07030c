"""What two workers say to each other while KV travels between them, over TCP.

    target ── Wanted ─────────────► source     as a frame of JSON: u32 length, then the object
           ◄───────────── Offered ──
           ◄─ checksums, contents ──           once for each group of layers, first layers first

A target asks once: whatever comes of it, the source lets go. A target that needs nothing asks for
no blocks, and is not answered.

A group's checksums are one u64 a block, its contents the same layers of each block in turn. Both
sides know all lengths from the shape of a block and from `Offered`. Integers are little-endian.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.types import SequenceHash

log = logging.getLogger(__name__)

VERSION = 1
MAX_FRAME_BYTES = 4 << 20
"""A hundred and fifty thousand blocks, each in at most twenty digits and a comma."""
MAX_BLOCKS = MAX_FRAME_BYTES // 24
STALL_S = 2.0
"""A peer from which nothing comes, or to which nothing goes, for so long is given up."""
CONNECT_S = 2.0
SENT_BYTES = 1 << 20
"""Sent within one STALL_S."""


class TransferError(Exception):
    """KV was not handed on, or not all of it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of a prompt's first `num_tokens` is kept, and under which id."""

    host: str
    port: int
    transfer_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that were handed on under an id. kind: what has to be equal on both sides, by name."""

    transfer_id: str
    blocks: tuple[SequenceHash, ...]
    kind: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Offered:
    """How many leading ones of the blocks follow. error: why there are none."""

    num_blocks: int
    error: str = ""


def wanted_frame(wanted: Wanted) -> bytes:
    fields = {"version": VERSION, "transfer_id": wanted.transfer_id, "blocks": wanted.blocks}
    return _frame({**fields, "kind": wanted.kind})


def offered_frame(offered: Offered) -> bytes:
    return _frame({"num_blocks": offered.num_blocks, "error": offered.error})


async def read_wanted(sock: socket.socket) -> Wanted:
    """Raises TransferError, naming what is wrong, and OSError or TimeoutError."""
    match await _read_frame(sock):
        case {"version": int(version)} if version != VERSION:
            raise TransferError(f"version: {VERSION} here, {version} there")
        case {"transfer_id": str(transfer_id), "blocks": list(blocks), "kind": dict(kind)} if (
            set(map(type, blocks)) <= {int} and len(blocks) <= MAX_BLOCKS
        ):
            return Wanted(transfer_id, tuple(map(SequenceHash, blocks)), kind)
    raise TransferError("no blocks are asked for")


async def read_offered(sock: socket.socket, num_wanted: int) -> Offered:
    """Raises as `read_wanted`, and TransferError if nothing is offered."""
    match await _read_frame(sock):
        case {"error": str(error)} if error:
            raise TransferError(error)
        case {"num_blocks": int(num_blocks)} if 0 < num_blocks <= num_wanted:
            return Offered(num_blocks)
    raise TransferError(f"none of {num_wanted} blocks is offered")


async def connected(source: Source) -> socket.socket:
    """Raises OSError and TimeoutError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{source.host} has no address")
    async with asyncio.timeout(CONNECT_S):
        found = await loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
            except OSError as error:
                failure = error
                sock.close()
            except BaseException:
                sock.close()
                raise
            else:
                return sock
    raise failure


async def decline(source: Source) -> None:
    """Tell the source that nothing of what it keeps is needed. If it does not hear that, it keeps
    the blocks until its lease ends."""
    try:
        with closing(await connected(source)) as sock:
            await send(sock, wanted_frame(Wanted(source.transfer_id, (), {})))
    except (OSError, TimeoutError) as error:
        log.debug("%s:%d keeps what nobody needs: %s", source.host, source.port, error)


def log_failure(source: Source, error: Exception) -> None:
    """Of a transfer from there."""
    log.warning(
        "blocks from %s:%d are computed here instead: %s",
        source.host,
        source.port,
        error or f"nothing came for {STALL_S:g} s",
    )


async def send(sock: socket.socket, data: bytes | memoryview) -> None:
    """Raises OSError, and TimeoutError if the other side takes nothing for STALL_S."""
    loop = asyncio.get_running_loop()
    view = memoryview(data).cast("B")
    for at in range(0, len(view), SENT_BYTES):
        async with asyncio.timeout(STALL_S):
            await loop.sock_sendall(sock, view[at : at + SENT_BYTES])


async def receive(sock: socket.socket, into: memoryview) -> None:
    """Fill it. Raises OSError, and TimeoutError if nothing comes for STALL_S."""
    loop = asyncio.get_running_loop()
    at = 0
    while at < len(into):
        async with asyncio.timeout(STALL_S):
            count = await loop.sock_recv_into(sock, into[at:])
        if not count:
            raise ConnectionResetError("the other worker closed the connection")
        at += count


def _frame(fields: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(fields)
    return len(body).to_bytes(4, "little") + body


async def _read_frame(sock: socket.socket) -> object:
    length = bytearray(4)
    await receive(sock, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > MAX_FRAME_BYTES:
        raise TransferError(f"a frame of {size} bytes, of which {MAX_FRAME_BYTES} are allowed")
    body = bytearray(size)
    await receive(sock, memoryview(body))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TransferError(f"a frame that is not JSON: {error}") from None
