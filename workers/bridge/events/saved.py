"""Index of an engine's blocks, kept on disk while its agent restarts.

The file is a digest and then msgpack. It is replaced as a whole, so it is never half written; what
cannot be read, or was written for an engine or an index of another form, is as good as none.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from app.core.types import SequenceHash, Tier
from workers.bridge.events.block import Block
from workers.bridge.events.blocks import HeldBlocks
from workers.bridge.events.events import key_of
from workers.bridge.events.stream import Position

MAX_BYTES = 2 * 1024**3
_DIGEST_BYTES = 16


class _Row(msgspec.Struct, array_like=True):
    name: int
    blocks: tuple[int, ...]
    parent: int | None
    tokens: int
    lora_name: str | None
    cache_salt: str | None
    references: tuple[tuple[tuple[int, int | None], int], ...]
    folder: str | None


class _File(msgspec.Struct, array_like=True):
    form: list[str]
    position: Position
    joined_late: bool
    group: int | None
    chunk_blocks: int
    rows: list[_Row]


class SavedIndex(NamedTuple):
    position: Position
    snapshot: HeldBlocks
    joined_late: bool


_DECODER = msgspec.msgpack.Decoder(_File)
_ENCODER = msgspec.msgpack.Encoder()


def save(path: Path, form: list[str], saved: SavedIndex) -> None:
    """form: what must be equal for the file to be of use. Raises OSError."""
    group, chunk_blocks, rows = saved.snapshot
    text = _ENCODER.encode(
        _File(
            form,
            saved.position,
            saved.joined_late,
            group,
            chunk_blocks,
            [
                _Row(
                    key_of(name),
                    block.blocks,
                    block.parent,
                    block.tokens,
                    block.lora_name,
                    block.cache_salt,
                    tuple(((int(tier), group), count) for (tier, group), count in references),
                    block.folder,
                )
                for name, block, references in rows
            ],
        )
    )
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
        file = _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    if file.form != form:
        return None
    snapshot = HeldBlocks(file.group, file.chunk_blocks, [_restored(row) for row in file.rows])
    return SavedIndex(file.position, snapshot, file.joined_late)


def _restored(
    row: _Row,
) -> tuple[int, Block, tuple[tuple[tuple[Tier, int | None], int], ...]]:
    blocks = tuple(SequenceHash(block) for block in row.blocks)
    parent = None if row.parent is None else SequenceHash(row.parent)
    block = Block(blocks, parent, row.tokens, row.lora_name, row.cache_salt)
    block.folder = row.folder
    references = tuple(((Tier(tier), group), count) for (tier, group), count in row.references)
    return row.name, block, references
