"""Index of an engine's blocks, kept on disk while its agent restarts.

The file is a digest and then msgpack. It is replaced as a whole, so it is never half written; what
cannot be read, or was written for an engine or an index of another form, is as good as none.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
from xxhash import xxh3_128_digest

from workers.bridge.events.blocks import HeldBlocks
from workers.bridge.events.stream import Position

MAX_BYTES = 2 * 1024**3
_DIGEST_BYTES = 16


class SavedIndex(msgspec.Struct, array_like=True):
    """Content of the file. form: what must be equal for the file to be of use."""

    form: list[str]
    position: Position
    snapshot: HeldBlocks
    joined_late: bool


_DECODER = msgspec.msgpack.Decoder(SavedIndex)


def save(path: Path, saved: SavedIndex) -> None:
    """Raises OSError."""
    text = msgspec.msgpack.encode(saved)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(xxh3_128_digest(text) + text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load(path: Path, form: list[str]) -> SavedIndex | None:
    """Returns None if there is no such file, or none that can be used. Raises OSError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    text = content[_DIGEST_BYTES:]
    if xxh3_128_digest(text) != content[:_DIGEST_BYTES]:
        return None
    try:
        saved = _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    return saved if saved.form == form else None
