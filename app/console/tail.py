"""The newest decisions of a namespace, each read from Redis once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.core.keys import Keyspace
from app.policy.record import DecisionSummary, decode_summary
from app.state import decisions
from app.state.client import RedisClient
from app.state.streams import id_ms, pages_backwards

KEPT = 1000
MAX_READ = 256
"""Decisions that are read at a time, in a millisecond of Redis. What comes faster is left out."""
PAGE = 64
TIMEOUT_S = 2.0
COLUMNS = (
    *("id", "at_ms", "request_id", "worker", "policy", "locality", "isl_tokens", "overlap_blocks"),
    *("full_blocks", "best_worker", "best_blocks", "waited_ms", "tries", "explained"),
    *("trust", "tenant", "model"),
)


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Values of the decisions that are asked for. worker: an id or a key. None: any."""

    reason: str | None = None
    worker: str | None = None
    model: str | None = None
    tenant: str | None = None

    def takes(self, record: DecisionSummary) -> bool:
        return (
            self.reason in (None, record.locality.value)
            and self.worker in (None, record.worker, record.worker.rpartition(":")[0])
            and self.model in (None, record.model)
            and self.tenant in (None, record.tenant)
        )


class Entry(NamedTuple):
    id: str
    record: DecisionSummary
    explained: bool

    def row(self) -> list[Any]:
        r = self.record
        return [
            *(self.id, id_ms(self.id.encode()), r.request_id, r.worker, r.policy),
            *(r.locality.value, r.isl_tokens, r.overlap.total, r.full_blocks),
            *(r.best.worker, r.best.blocks, r.waited_ms, r.tries, self.explained),
            *(r.trust.value, r.tenant, r.model),
        ]


class DecisionTail:
    """The newest KEPT decisions of a namespace, the newest last."""

    def __init__(self, redis: RedisClient, keyspace: Keyspace) -> None:
        self._redis = redis
        self._key = keyspace["decisions"]
        self._last = ""
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self._read_from = ""
        """Entry before which some may be missing; "": none has been read."""

    async def follow(self) -> None:
        """Read the decisions that have been added since. Raises RedisUnavailable."""
        oldest = f"({self._last}" if self._last else "-"
        most = MAX_READ if self._last else KEPT
        new: list[Entry] = []
        newest = ""
        is_all = True
        async for page in pages_backwards(
            self._redis, self._key, PAGE, oldest=oldest, timeout_s=TIMEOUT_S
        ):
            if page and not newest:
                newest = page[0][0].decode()
            new += entries(page)
            if len(new) >= most:
                is_all = False
                break
        if newest:
            self._last = newest
        if new and not is_all:
            self._read_from = new[-1].id
        self.entries.extend(reversed(new))

    def lacks(self, after: str) -> bool:
        is_full = len(self.entries) == KEPT
        begins = max(place(self._read_from), place(self.entries[0].id) if is_full else (0, 0))
        return place(after) < begins

    def hits(self) -> dict[str, float]:
        """Returns the share of the blocks of each worker's prompts that it should have held."""
        held: dict[str, list[int]] = {}
        for _, record, _ in self.entries:
            sums = held.setdefault(record.worker, [0, 0])
            sums[0] += record.overlap.total
            sums[1] += record.full_blocks
        return {w: round(part / whole, 4) for w, (part, whole) in held.items() if whole}


def place(entry_id: str) -> tuple[int, int]:
    """Returns an id as two numbers, which sort like the stream; (0, 0) if it is no id."""
    ms, _, number = entry_id.partition("-")
    number = number or "0"
    return (int(ms), int(number)) if ms.isdecimal() and number.isdecimal() else (0, 0)


def entries(page: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Entry]:
    for entry_id, fields in page:
        try:
            record, explained = decode_summary(fields[decisions.FIELD])
        except (LookupError, ValueError):
            continue
        yield Entry(entry_id.decode(), record, explained)
