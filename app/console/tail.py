"""The newest decisions and events, read from where one last was."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from app.core.keys import Keyspace
from app.policy.record import DecisionRecord, decode
from app.state.client import RedisClient
from app.state.streams import id_ms, pages_backwards

KEPT = 1000
MAX_READ = 256
"""At a time: a millisecond of Redis. What comes faster is left out."""
PAGE = 64
TIMEOUT_S = 2.0
COLUMNS = (
    *("id", "at_ms", "request_id", "worker", "policy", "locality", "isl_tokens", "overlap_blocks"),
    *("full_blocks", "best_worker", "best_blocks", "waited_ms", "tries", "explained"),
)


class Entry(NamedTuple):
    """A decision without its candidates. id: of the stream."""

    id: str
    record: DecisionRecord
    explained: bool

    def row(self) -> list[Any]:
        r = self.record
        return [
            *(self.id, id_ms(self.id.encode()), r.request_id, r.worker, r.policy),
            *(r.locality.value, r.isl_tokens, r.overlap.total, r.full_blocks),
            *(r.best.worker, r.best.blocks, r.waited_ms, r.tries, self.explained),
        ]


class DecisionTail:
    """The newest KEPT decisions of a namespace, the newest last."""

    def __init__(self, redis: RedisClient, keyspace: Keyspace) -> None:
        self._redis = redis
        self._key = keyspace["decisions"]
        self._last = ""
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.gap_after = ""
        """The last entry behind which some were left out; "": none."""

    async def follow(self) -> None:
        """Read what has been added since. Raises RedisUnavailable."""
        oldest = f"({self._last}" if self._last else "-"
        most = MAX_READ if self._last else KEPT
        found: list[Entry] = []
        newest = ""
        is_all = True
        async for page in pages_backwards(
            self._redis, self._key, PAGE, oldest=oldest, timeout_s=TIMEOUT_S
        ):
            if page and not newest:
                newest = page[0][0].decode()
            found += entries(page)
            if len(found) >= most:
                is_all = False
                break
        if newest:
            if not is_all and self._last:
                self.gap_after = self._last
            self._last = newest
        self.entries.extend(reversed(found))

    def hits(self) -> dict[str, float]:
        """Share of the blocks of each worker's prompts that it was predicted to hold."""
        held: dict[str, list[int]] = {}
        for _, record, _ in self.entries:
            sums = held.setdefault(record.worker, [0, 0])
            sums[0] += record.overlap.total
            sums[1] += record.full_blocks
        return {w: round(part / whole, 4) for w, (part, whole) in held.items() if whole}


def entries(page: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Entry]:
    """Those that can be read. Candidates are not: with a thousand workers, that takes 2 ms each."""
    for entry_id, fields in page:
        try:
            record = decode(fields | {b"seen": b""})
        except (LookupError, TypeError, ValueError):
            continue
        yield Entry(entry_id.decode(), record, bool(fields.get(b"seen")))
