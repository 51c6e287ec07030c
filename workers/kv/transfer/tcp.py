"""The protocol by which KV travels between two workers, over TCP.

    target ── Challenge ──────────────► source     as a frame of JSON: u32 length, then the object
           ── blocks ─────────────►            the identity of each
           ◄──────── number of blocks ──           as a frame, or an error
           ◄─ checksums, contents ──           once for each group of layers, first layers first

A target asks once: whatever comes of it, the source lets go. A target that needs nothing asks for
no blocks, and is not answered. A target that does not prove that it has the workers' key is
refused.

A group's checksums are one u64 a block, its contents the same layers of each block in turn. Both
sides know all lengths from the shape of a block and their number. Integers are little-endian.

Neither side trusts the other before it is known: a frame is short, and no object is made of what
follows it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from app.core.errors import cut
from workers.kv.identity import IDENTITY_BYTES, BlockIdentity

log = logging.getLogger(__name__)

T = TypeVar("T")
VERSION = 3
MAX_FRAME_BYTES = 4096
MAX_BLOCKS = 150_000
"""Blocks of a prompt of two million tokens; their identities take 6 MB."""
MAX_ID = 64
"""Characters of an id."""
STALL_S = 2.0
"""Seconds after which a peer is given up from which nothing comes, or to which nothing goes."""
MAX_ERROR = 300
"""Characters that are shown of the other side's error."""
CONNECT_S = 2.0
PIECE_BYTES = 1 << 20
"""Bytes that are sent, or received, within one STALL_S."""
DROPPED_BYTES = 64 * 1024
MAX_SENDING = 8
"""Transfers at once of one source."""
WHOLE_S = 300.0
"""Seconds after which a transfer is given up, however steadily it goes on."""


class TransferError(Exception):
    """Raised if KV was not handed on, or not all of it."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A place where the KV of a prompt's first `num_tokens` is kept, under an id."""

    host: str
    port: int
    transfer_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Challenge:
    """First frame of a target. kind: what has to be equal on both sides, by name."""

    transfer_id: str
    num_blocks: int
    kind: Mapping[str, str]
    proof: str

    def is_proven(self, key: str) -> bool:
        """Whether the target has the key; "": none is needed."""
        return not key or hmac.compare_digest(proof_of(key, self.transfer_id), self.proof.encode())


def proof_of(key: str, transfer_id: str) -> bytes:
    """Returns a proof that the key is known, for one id: the other side may be no source."""
    return hmac.new(key.encode(), transfer_id.encode(), hashlib.sha256).hexdigest().encode()


def wanted_frame(
    transfer_id: str, blocks: Sequence[BlockIdentity], kind: Mapping[str, str], key: str
) -> bytes:
    """Returns a Challenge and the blocks. key: that workers have in common; "": none."""
    fields = {
        "version": VERSION,
        "transfer_id": transfer_id,
        "num_blocks": len(blocks),
        "kind": kind,
        "proof": proof_of(key, transfer_id).decode() if key else "",
    }
    return _frame(fields) + b"".join(blocks)


def offered_frame(num_blocks: int, error: str = "") -> bytes:
    """Returns how many leading blocks follow. error: why there are none."""
    return _frame({"num_blocks": num_blocks, "error": error})


async def read_asked(sock: socket.socket) -> Challenge:
    """Reads a target's first frame. Raises TransferError, OSError and TimeoutError."""
    match await _read_frame(sock):
        case {"version": int(version)} if version != VERSION:
            raise TransferError(f"version: {VERSION} here, {cut(str(version))} there")
        case {
            "version": int(),
            "transfer_id": str(transfer_id),
            "num_blocks": int(num_blocks),
            "kind": dict(kind),
            "proof": str(proof),
        } if (
            len(transfer_id) <= MAX_ID
            and 0 <= num_blocks <= MAX_BLOCKS
            and all(isinstance(value, str) for value in kind.values())
            and transfer_id.isascii()
        ):
            return Challenge(transfer_id, num_blocks, kind, proof)
    raise TransferError("a frame that asks for no blocks")


async def read_blocks(sock: socket.socket, num_blocks: int) -> list[BlockIdentity]:
    """Reads the identities of wanted blocks. Raises OSError and TimeoutError."""
    blocks = np.empty(num_blocks, f"V{IDENTITY_BYTES}")
    await receive(sock, blocks.data.cast("B"))
    wanted: list[BlockIdentity] = blocks.tolist()
    return wanted


async def read_offered(sock: socket.socket, num_wanted: int) -> int:
    """Returns how many leading blocks follow. Raises TransferError, OSError and TimeoutError."""
    match await _read_frame(sock):
        case {"error": str(error)} if error:
            raise TransferError(cut(error, MAX_ERROR))
        case {"num_blocks": int(num_blocks)} if 0 < num_blocks <= num_wanted:
            return num_blocks
    raise TransferError(f"none of {num_wanted} blocks is offered")


async def connected(source: BlockSource) -> socket.socket:
    """Returns a connection to a source. Raises OSError and TimeoutError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{source.host} has no address")
    async with asyncio.timeout(CONNECT_S):
        addresses = await loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
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


async def decline(source: BlockSource, key: str) -> None:
    """Tells the source that nothing of what it keeps is needed. If that is not heard, the source
    keeps the blocks until its lease ends. key: that workers have in common; "": none."""
    try:
        with closing(await connected(source)) as sock:
            await send(sock, wanted_frame(source.transfer_id, (), {}, key))
    except (OSError, TimeoutError) as error:
        log.debug("%s:%d keeps what nobody needs: %s", source.host, source.port, error)


def log_failure(source: BlockSource, error: Exception) -> None:
    """Logs why blocks from that source are computed here."""
    log.warning(
        "blocks from %s:%d are computed here instead: %s",
        source.host,
        source.port,
        error or f"nothing came for {STALL_S:g} s",
    )


async def send(sock: socket.socket, data: bytes | memoryview) -> None:
    """Sends all of it. Raises OSError, and TimeoutError if nothing is taken for STALL_S."""
    loop = asyncio.get_running_loop()
    view = memoryview(data).cast("B")
    for at in range(0, len(view), PIECE_BYTES):
        async with asyncio.timeout(STALL_S):
            await loop.sock_sendall(sock, view[at : at + PIECE_BYTES])


async def send_last(sock: socket.socket, data: bytes) -> None:
    """Sends all of it, and drops what the other side has sent and still sends, for STALL_S at most:
    if that was not read, closing would take away from the other side what it is sent."""
    loop = asyncio.get_running_loop()
    await send(sock, data)
    sock.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(STALL_S):
        for _ in range(0, IDENTITY_BYTES * MAX_BLOCKS, DROPPED_BYTES):
            if not await loop.sock_recv(sock, DROPPED_BYTES):
                return


async def receive(sock: socket.socket, into: memoryview) -> None:
    """Fills `into`. Raises OSError, and TimeoutError if a piece has not come whole in STALL_S."""
    loop = asyncio.get_running_loop()
    for at in range(0, len(into), PIECE_BYTES):
        piece = into[at : at + PIECE_BYTES]
        async with asyncio.timeout(STALL_S):
            while piece:
                count = await loop.sock_recv_into(sock, piece)
                if not count:
                    raise ConnectionResetError("the other worker closed the connection")
                piece = piece[count:]


async def in_thread(threads: Executor, sock: socket.socket, work: Callable[[], T]) -> T:
    """Returns what `work` returns, which sends or receives much.

    Where this is cancelled, the connection ends first, and `work` with it, unless it waits for a
    thread and so never begins.
    """
    submitted = threads.submit(work)
    working = asyncio.wrap_future(submitted)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        if not submitted.cancel():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([working])
        raise


def send_all(sock: socket.socket, data: memoryview) -> None:
    """Sends all of it; runs in a thread. Raises OSError and TimeoutError."""
    sock.settimeout(STALL_S)
    view = data.cast("B")
    for at in range(0, len(view), PIECE_BYTES):
        sock.sendall(view[at : at + PIECE_BYTES])


def receive_all(sock: socket.socket, into: memoryview) -> None:
    """Fills `into`; runs in a thread. Raises OSError and TimeoutError."""
    view = into.cast("B")
    for at in range(0, len(view), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        until_s = time.monotonic() + STALL_S
        while piece:
            sock.settimeout(max(until_s - time.monotonic(), 0.001))
            count = sock.recv_into(piece)
            if not count:
                raise ConnectionResetError("the other worker closed the connection")
            piece = piece[count:]


def _frame(fields: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(fields)
    return len(body).to_bytes(4, "little") + body


async def _read_frame(sock: socket.socket) -> object:
    length = bytearray(4)
    await receive(sock, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > MAX_FRAME_BYTES:  # of another version, or of another protocol
        raise TransferError(f"a frame of {size} bytes, of which {MAX_FRAME_BYTES} are allowed")
    body = bytearray(size)
    await receive(sock, memoryview(body))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:  # says where, and repeats nothing
        raise TransferError(f"a frame that is not JSON: {error}") from None
