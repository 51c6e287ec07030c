"""Plain data shared by routers and workers. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple, NewType

from app.core.errors import InvalidRequest, shown

LocalHash = NewType("LocalHash", int)
"""u64 over the tokens of one block."""

SequenceHash = NewType("SequenceHash", int)
"""u64 over the whole prefix up to and including one block."""

Incarnation = NewType("Incarnation", int)
"""Number of one life of a worker key, from registration to lease loss. Reused only after Redis lost
its data or its last writes."""

_INCARNATION = re.compile(rb"\d{1,15}")
WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
TAG = re.compile(r"[0-9a-f]{16}")
RESERVATION_ID = re.compile(r"[\x21-\x7e]{1,128}(~[0-9a-f]{16})?")
"""`<request_id>~<tag>`; or the request's id, if no other reservation has it."""
_SENT = re.compile(r"(?:t=)?(\d{10})\.?(\d{3})\d*")
TENANT_ID = re.compile(r"[\x21-\x7e]{1,64}")


def random_hex(num_bytes: int) -> str:
    """Returns two digits for each byte, which nobody can guess; the system is asked once for
    many."""
    global _random
    taken = _random.read(num_bytes)
    if len(taken) < num_bytes:
        _random = BytesIO(os.urandom(4096))
        taken = _random.read(num_bytes)
    return taken.hex()


_random = BytesIO()
# A child process must not draw what its parent draws.
os.register_at_fork(after_in_child=lambda: _random.seek(0, os.SEEK_END))


def new_id() -> str:
    """Returns a name that nothing else has: letters and digits."""
    return random_hex(16)


@lru_cache(maxsize=4096)
def parse_incarnation(text: bytes) -> Incarnation | None:
    """Returns the incarnation in a key or field of Redis, where anybody may write; None if it is
    none. Cached, because every decision reads those of all workers."""
    return Incarnation(int(text)) if _INCARNATION.fullmatch(text) else None


def checked_request_id(value: object) -> str:
    """Returns a caller's `value` if it can be the id of a request. Raises InvalidRequest."""
    if not isinstance(value, str) or not REQUEST_ID.fullmatch(value):
        raise InvalidRequest(
            "request_id", f"needs 1 to 128 visible ASCII characters, got {shown(value)}"
        )
    return value


def checked_sent_ms(value: str | None) -> int | None:
    """Returns when a request was sent, ms since 1970, by the sender's clock; None if `value` is
    empty. value: of the header, as proxies write it: `t=1700000000123`, or `t=1700000000.123`.
    Raises InvalidRequest."""
    if not value:
        return None
    match = _SENT.fullmatch(value)
    if not match:
        raise InvalidRequest(
            "x-request-start", f"needs t=<ms since 1970>, as t=1700000000123, got {shown(value)}"
        )
    return int(match[1] + match[2])


def request_id_of(reservation_id: str) -> str:
    request_id, _, tag = reservation_id.rpartition("~")
    return request_id if request_id and TAG.fullmatch(tag) else reservation_id


def checked_reservation_id(value: str) -> str:
    """Returns a caller's `value` if it can be the id of a reservation, or of its request. Raises
    InvalidRequest."""
    return value if RESERVATION_ID.fullmatch(value) else checked_request_id(value)


class WorkerKey(NamedTuple):
    """Unit of routing, written `<worker_id>:<dp_rank>`."""

    worker_id: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}:{self.dp_rank}"

    @classmethod
    def parse(cls, text: str) -> WorkerKey:
        """Returns the key in `text`. Raises ValueError for anything but `<worker_id>:<dp_rank>`."""
        worker_id, _, rank = text.rpartition(":")
        if not WORKER_ID.fullmatch(worker_id) or not re.fullmatch(r"[0-9]{1,5}", rank):
            raise ValueError(f"not a worker key: {text!r}")
        return cls(worker_id, int(rank))


class Tier(IntEnum):
    """Memory that holds a block; a larger value is slower to use."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class TierOverlap:
    """Leading blocks of a chain that one worker holds, by the tier each would be read from."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def first(self, blocks: int) -> TierOverlap:
        """Returns the first `blocks` blocks, or all of them if there are fewer."""
        device = min(self.device, blocks)
        host = min(self.host, blocks - device)
        return TierOverlap(device, host, min(self.disk, blocks - device - host))


NO_OVERLAP = TierOverlap()
