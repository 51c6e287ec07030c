"""What was decided and why: a trimmed stream in Redis, for looking back and for rescoring.

Written after decisions, never before their answers. What Redis does not accept in time is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
import orjson

from app.core.config import MOST, RouterSettings
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.rate_limit import Pace
from app.core.types import SequenceHash, TierOverlap
from app.policy.affinity import Affinity, discounted
from app.policy.cost import POLICIES, Candidates, CostFunction, RequestSize
from app.policy.locality import LOCALITIES
from app.state.client import Client
from app.state.connect import deadline
from app.state.index import hex_text
from app.state.predictions import positions
from app.state.scripts import Call, ScriptRunner, command

log = logging.getLogger(__name__)

PAGE = 64
"""A few of them may hold all candidates: with a thousand workers, 160 KB each."""
PAGE_TIMEOUT_S = 5.0
WRITE_PAUSE_S = 0.05
MAX_UNWRITTEN = 1024
MAX_WRITTEN = 64
"""How many go in one round trip, which takes Redis a millisecond."""
FIELDS = tuple(field.name for field in fields(Candidates))
ENTRY = (
    *("request_id", "at_ms", "worker", "policy", "locality", "isl_tokens", "full_blocks"),
    *("overlap", "best", "tries", "waited_ms", "blocks", "seen"),
)
"""Fields of a stream entry."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """All that one choice was made from. eligible: which the request allows, (workers,)."""

    workers: list[str]
    block_size: int
    candidates: Candidates
    eligible: Sequence[bool]
    affinity: Affinity | None = None

    def priced(self, cost: CostFunction) -> CostFunction:
        """`cost`, plus what the request's session was worth."""
        return cost if self.affinity is None else discounted(cost, self.affinity)


@dataclass(slots=True)
class Record:
    """One decision.

    at_ms: when loads were looked up, by the Redis clock. best: the worker with the longest overlap,
    "" if none had any. blocks: those of the prompt at `predictions.positions` of `full_blocks`.
    seen: for a few decisions only.
    """

    request_id: str
    at_ms: int
    worker: str
    policy: str
    locality: str
    isl_tokens: int
    full_blocks: int
    overlap: TierOverlap
    best: str
    best_overlap: int
    tries: int
    waited_ms: int
    blocks: Sequence[SequenceHash]
    seen: Seen | None = None

    @property
    def size(self) -> RequestSize:
        """Raises AssertionError for a record without `seen`."""
        assert self.seen is not None
        return RequestSize(self.isl_tokens, self.seen.block_size)


def sampled(chain: Sequence[SequenceHash]) -> list[SequenceHash]:
    """The blocks of a chain that are recorded: the same for all chains that share them."""
    return [chain[at - 1] for at in positions(len(chain))]


def encode(record: Record) -> tuple[Any, ...]:
    """Values of a stream entry, as text, in the order of ENTRY."""
    overlap = record.overlap
    return (
        record.request_id,
        record.at_ms,
        record.worker,
        record.policy,
        record.locality,
        record.isl_tokens,
        record.full_blocks,
        f"{overlap.device} {overlap.host} {overlap.disk}",
        f"{record.best} {record.best_overlap}",
        record.tries,
        record.waited_ms,
        hex_text(record.blocks),
        b"" if record.seen is None else _packed(record.seen),
    )


def _packed(seen: Seen) -> bytes:
    columns = {name: getattr(seen.candidates, name).astype(np.float32) for name in FIELDS}
    return orjson.dumps(
        {
            "workers": seen.workers,
            "block_size": seen.block_size,
            "eligible": [bool(ok) for ok in seen.eligible],
            "affinity": seen.affinity and astuple(seen.affinity),
            **columns,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def decode(entry: dict[bytes, bytes]) -> Record:
    """The record in a stream entry. Raises LookupError, TypeError or ValueError for an invalid one:
    what it returns can be explained, and priced again."""
    text = {name.decode(): value.decode() for name, value in entry.items()}
    isl_tokens = int(text["isl_tokens"])
    if (
        text["policy"] not in POLICIES
        or text["locality"] not in LOCALITIES
        or not 1 <= isl_tokens <= MOST
    ):
        raise ValueError(f"{isl_tokens} tokens, {text['policy']!r}, {text['locality']!r}")
    best, _, best_overlap = text["best"].rpartition(" ")
    blocks = text["blocks"]
    return Record(
        request_id=text["request_id"],
        at_ms=int(text["at_ms"]),
        worker=text["worker"],
        policy=text["policy"],
        locality=text["locality"],
        isl_tokens=isl_tokens,
        full_blocks=int(text["full_blocks"]),
        overlap=TierOverlap(*map(int, text["overlap"].split())),
        best=best,
        best_overlap=int(best_overlap),
        tries=int(text["tries"]),
        waited_ms=int(text["waited_ms"]),
        blocks=[SequenceHash(int(blocks[i : i + 16], 16)) for i in range(0, len(blocks), 16)],
        seen=_seen(text["seen"]) if text.get("seen") else None,
    )


def _seen(text: str) -> Seen:
    found = orjson.loads(text)
    matrix = np.array([found[name] for name in FIELDS], dtype=np.float64)
    block_size, places = found["block_size"], range(len(found["workers"]))
    if matrix.shape != (len(FIELDS), len(places)) or len(found["eligible"]) != len(places):
        raise ValueError(f"seen: {matrix.shape} does not fit {len(places)} workers")
    if block_size < 1:
        raise ValueError(f"seen: a block has {block_size} tokens")
    limits = matrix[FIELDS.index("max_requests")]
    limits[np.isnan(limits)] = math.inf  # which JSON does not have
    if np.isnan(matrix).any():
        raise ValueError("seen: a candidate lacks a value")
    affinity: Affinity | None = None
    if found["affinity"] is not None:
        position, fraction, max_queue_s = found["affinity"]
        most_s = math.inf if max_queue_s is None else float(max_queue_s)
        affinity = Affinity(places[position], float(fraction), most_s)
    return Seen(found["workers"], block_size, Candidates(*matrix), found["eligible"], affinity)


def record(keyspace: Keyspace, kept: int, values: Sequence[Any]) -> Call[bytes]:
    """Append one decision, as from `encode`, to the stream, which keeps about `kept`; its id."""
    entry = chain.from_iterable(zip(ENTRY, values, strict=True))
    limit = ("MAXLEN", "~", kept, "*")
    return command("record", "XADD", keyspace["decisions"], *limit, *entry, parse=bytes)


class Recorder:
    """Writes decisions to their stream, while `run` runs."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, settings: RouterSettings) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._kept = settings.decisions_kept
        self._details = Pace(settings.details_per_s)
        # Beyond the limit, the oldest are not recorded.
        self._unwritten: deque[Callable[[Pace], Record]] = deque(maxlen=MAX_UNWRITTEN)
        self._has_some = asyncio.Event()

    def add(self, make: Callable[[Pace], Record]) -> None:
        """Have a decision recorded. make: called later, with the pace for adding `seen`."""
        if self._kept:
            self._unwritten.append(make)
            self._has_some.set()

    async def run(self) -> None:
        """Run until cancelled. What has come in since the last write is written together."""
        while True:
            await self._has_some.wait()
            self._has_some.clear()
            entries = [encode(make(self._details)) for make in self._unwritten]
            self._unwritten.clear()
            for start in range(0, len(entries), MAX_WRITTEN):
                some = entries[start : start + MAX_WRITTEN]
                try:
                    await self._runner.run([record(self._keyspace, self._kept, e) for e in some])
                except RedisUnavailable as error:
                    log.debug("decisions not recorded: %s", error)
            await asyncio.sleep(WRITE_PAUSE_S)


async def read(redis: Client, keyspace: Keyspace) -> AsyncIterator[Record]:
    """All records that are kept, latest first. Raises RedisUnavailable.

    Corrupted entries are left out.
    """
    newest = "+"
    while True:
        async with deadline(PAGE_TIMEOUT_S):
            page: Any = await redis.xrevrange(keyspace["decisions"], max=newest, count=PAGE)
        for _, entry in page:
            try:
                record = decode(entry)
            except (LookupError, TypeError, ValueError):
                continue
            yield record
        if len(page) < PAGE:
            return
        newest = f"({page[-1][0].decode()}"


@dataclass(frozen=True, slots=True)
class Usage:
    """A prefix of prompts. block: its last. requests: how many in the window had all of it."""

    block: SequenceHash
    num_blocks: int
    requests: int


def usages(records: Iterable[Record]) -> Iterator[Usage]:
    """How often prefixes were asked for, the most frequent first, among equals the longest.

    A prefix is left out if a longer recorded one with as many requests continues it. So the system
    prompt is listed, but not each of its blocks.
    """
    counts: dict[SequenceHash, int] = {}
    place: dict[SequenceHash, int] = {}
    continued: dict[SequenceHash, int] = {}
    for record in records:
        at = positions(record.full_blocks)
        for block, position, child in zip(
            record.blocks, at, [*record.blocks[1:], None], strict=False
        ):
            counts[block] = counts.get(block, 0) + 1
            place[block] = position
            if child is not None:
                # If all requests go on with the same child, it is also the one seen last.
                continued[block] = counts.get(child, 0) + 1
    found = [
        Usage(block, place[block], count)
        for block, count in counts.items()
        if continued.get(block, 0) < count
    ]
    yield from sorted(found, key=lambda usage: (-usage.requests, -usage.num_blocks))
