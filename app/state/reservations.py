"""Reservations of capacity for requests in flight, and the loads that result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from app.core.errors import NamespaceMissing, WrongVersion
from app.core.fetches import AHEAD_MS, Fetch
from app.core.keys import DATA_VERSION, Keyspace
from app.core.loads import Load, Refusal, Reservation, Snapshot
from app.core.types import Incarnation, parse_incarnation
from app.core.verdicts import MarksByWorker, parse_marks
from app.state.columns import Columns, parse_load
from app.state.records import ExtendRow, PrefillCompleteRow, ReleaseRow, ReserveRow
from app.state.scripts import Call, ScriptRunner, call, command

_TAGGED = re.compile(r" \d+-([0-9a-f]+)")
CARRIED_MS = 10_000
"""Time for which a door's reservation lasts after the door was last heard of."""


def loads(keyspace: Keyspace) -> Call[Snapshot]:
    """Returns a Snapshot of all loads. Its parser raises NamespaceMissing if there is no such
    namespace, WrongVersion if another release wrote it."""

    def parse(reply: list[Any] | None) -> Snapshot:
        snapshot = _snapshot(keyspace, reply, Columns())
        assert snapshot is not None
        return snapshot

    return call("loads", keyspace, DATA_VERSION, 0, AHEAD_MS, parse=parse)


def load_of(keyspace: Keyspace, incarnation: Incarnation) -> Call[Load | None]:
    """Returns the load of one worker; None if there is none that can be read."""

    def parse(reply: bytes | None) -> Load | None:
        return None if reply is None else parse_load(reply)

    return command("load_of", "HGET", keyspace["load"], incarnation, parse=parse)


def changes(keyspace: Keyspace, columns: Columns) -> Call[Snapshot | None]:
    """Returns a Snapshot, by what has changed since `columns` were last taken. None: Redis lost
    some of what they hold; ask again, for everything."""

    def parse(reply: list[Any] | None) -> Snapshot | None:
        return _snapshot(keyspace, reply, columns)

    return call("loads", keyspace, DATA_VERSION, columns.ask(), AHEAD_MS, parse=parse)


def reserve(
    keyspace: Keyspace,
    wanted: Sequence[Reservation],
    *,
    ttl_ms: int,
    prefill_ttl_ms: int | None = None,
    columns: Columns | None = None,
) -> Call[list[Refusal | None]]:
    """Makes each reservation in turn, unless its worker has changed; None: made.

    A reservation ends after ttl_ms, and without a first token after prefill_ttl_ms and four times
    the worker's predicted queue, if that is earlier; None: after ttl_ms all the same. One that is
    carried ends after CARRIED_MS, unless it is extended. columns: the loads known; a refusal's
    answer says what has changed in them. None: it says everything.
    """
    known = columns or Columns()

    def parse(reply: list[Any]) -> list[Refusal | None]:
        outcomes, *rows = reply
        if not rows:
            return [None] * len(outcomes)
        fresh = known.take(rows[0])
        return [None if why == 1 else Refusal(why.decode(), fresh) for why in outcomes]

    args: list[int | str] = [ttl_ms, ttl_ms if prefill_ttl_ms is None else prefill_ttl_ms]
    args += (CARRIED_MS, known.ask())
    for one in wanted:
        if one.source:
            args += _reserve_row(one.source, "")
        args += _reserve_row(one, one.request_id)
    return call("reserve", keyspace, *args, parse=parse)


def _reserve_row(one: Reservation, request_id: str) -> ReserveRow:
    return ReserveRow(
        inc=one.incarnation,
        request_id=request_id,
        prefill_tokens=one.prefill_tokens,
        prefill_us=one.prefill_us,
        blocks=one.blocks,
        attempt=one.attempt,
        max_requests=one.max_requests,
        seen_total=-1 if one.seen_total is None else one.seen_total,
        retry=int(one.retry),
        carried=int(one.carried),
        sending_ms=one.sending_ms,
        receiving_ms=one.receiving_ms,
        fetch="" if one.fetch is None else f"{one.lease_ms} {one.fetch.record()}",
        flow=one.flow,
    )


@dataclass(frozen=True, slots=True)
class Extension:
    """Reservation of a request that a door carries. incarnation: its worker's now; None: it has
    none. decoding: whether the first token is out."""

    reservation_id: str
    reservation: Reservation
    incarnation: Incarnation | None
    decoding: bool


class ExtensionOutcome(IntEnum):
    """Outcome of an extension. NEITHER: its worker is not routed to, or another try has it."""

    NEITHER = 0
    EXTENDED = 1
    RESERVED_AGAIN = 2


def extend(keyspace: Keyspace, extensions: Sequence[Extension]) -> Call[list[ExtensionOutcome]]:
    """Keeps reservations for CARRIED_MS from now on; makes those again that Redis has lost."""

    def parse(reply: list[int]) -> list[ExtensionOutcome]:
        return [ExtensionOutcome(outcome) for outcome in reply]

    args: list[int | str] = [CARRIED_MS]
    for one in extensions:
        reservation = one.reservation
        args += ExtendRow(
            id=one.reservation_id,
            attempt=reservation.attempt,
            inc=one.incarnation or "",
            prefill_tokens=reservation.prefill_tokens,
            prefill_us=reservation.prefill_us,
            blocks=reservation.blocks,
            state="d" if one.decoding else "p",
        )
    return call("extend", keyspace, *args, parse=parse)


@dataclass(slots=True)
class PrefillComplete:
    """First token of one request. request_id: the request's, or the reservation's own id. ttl_ms:
    how much longer the reservation lasts. began_by_ms: only if the try that made it began by then,
    Redis clock. of_source: the source's reservation: the prompt is computed there, and its blocks
    wait to be fetched for ttl_ms. late_ms: how much later than predicted the token came; None:
    unknown."""

    request_id: str
    ttl_ms: int
    began_by_ms: int | None = None
    of_source: bool = False
    late_ms: int | None = None


def prefill_complete(
    keyspace: Keyspace, requests: Sequence[PrefillComplete]
) -> Call[list[str | None]]:
    """Records that first tokens are out. Idempotent. Returns of each the attempt that made the
    reservation, "-" if that is unknown; None: there is no such reservation."""
    args: list[int | str] = []
    for one in requests:
        by_ms = -1 if one.began_by_ms is None else one.began_by_ms
        late_ms = -1 if one.late_ms is None else one.late_ms
        of_source = int(one.of_source)
        args += PrefillCompleteRow(one.request_id, one.ttl_ms, by_ms, of_source, late_ms)
    return call("prefill_complete", keyspace, *args, parse=_attempts)


@dataclass(slots=True)
class Release:
    """End of one reservation. request_id: the request's, or the reservation's own id. attempt: only
    if the reservation is that attempt's; "": any. began_by_ms: only if the try that made it began
    by then, Redis clock; None: any. answered: whether its worker has answered it, which ends a row
    of failures, if the first token was reported. whole: whether that is reported with this.
    late_ms: how much later than predicted the first token came, if reported with this or still
    missing; None: unknown."""

    request_id: str
    attempt: str = ""
    began_by_ms: int | None = None
    answered: bool = False
    whole: bool = False
    late_ms: int | None = None


def release(keyspace: Keyspace, releases: Sequence[Release]) -> Call[list[str | None]]:
    """Ends reservations. Idempotent. Returns of each the attempt that made it if its first token
    was not out yet, else "-"; None: there is no such reservation (any more)."""
    args: list[int | str] = []
    for one in releases:
        by_ms = -1 if one.began_by_ms is None else one.began_by_ms
        came = (2 if one.answered else 3) if one.whole else int(one.answered)
        late_ms = -1 if one.late_ms is None else one.late_ms
        args += ReleaseRow(one.request_id, one.attempt, by_ms, came, late_ms)
    return call("release", keyspace, *args, parse=_attempts)


def settle(keyspace: Keyspace, attempts: Sequence[str]) -> list[Call[int]]:
    """Forgets the fetches of these attempts: made in time, or nothing came too late."""
    return [
        command("settle", "ZREM", keyspace["fetches"], *attempts, parse=int),
        command("settle", "HDEL", keyspace["fetching"], *attempts, parse=int),
    ]


@lru_cache(maxsize=4096)
def owner_mark(owner: str) -> str:
    """Returns 8 hex digits, in which the tags of the reservations of a key end."""
    return hashlib.blake2b(owner.encode(), digest_size=4).hexdigest()


async def is_foreign(runner: ScriptRunner, keyspace: Keyspace, request_id: str, owner: str) -> bool:
    """Returns whether a reservation under that id, or its request's, does not belong to `owner`.
    Raises RedisUnavailable."""
    name, _, tag = request_id.rpartition("~")
    if name:
        return not tag.endswith(owner_mark(owner))
    held = command("reservations", "HGET", keyspace["reservations"], request_id, parse=_text)
    inc = await runner.one(held)
    requests = f"{keyspace['requests:']}{inc}"
    record = await runner.one(command("requests", "HGET", requests, request_id, parse=_text))
    tagged = _TAGGED.search(record)
    return tagged is not None and not tagged[1].endswith(owner_mark(owner))


def _text(reply: bytes | None) -> str:
    return (reply or b"").decode(errors="replace")


def expire(keyspace: Keyspace, limit: int) -> Call[int]:
    """Forgets at most `limit` reservations whose time is up; returns how many."""
    return call("expire", keyspace, limit, parse=int)


def _attempts(reply: list[bytes | None]) -> list[str | None]:
    return [None if attempt is None else attempt.decode() for attempt in reply]


def _snapshot(keyspace: Keyspace, reply: list[Any] | None, columns: Columns) -> Snapshot | None:
    if reply is None:
        raise NamespaceMissing("no worker has registered yet, or Redis was emptied")
    if len(reply) == 1:
        raise WrongVersion(keyspace.namespace, reply[0], DATA_VERSION)
    rows, workers_ms, shards, waiting, marked, late, records, mixed_ms = reply
    snapshot = columns.take(rows)
    if snapshot is None:
        return None
    pairs = zip(map(parse_incarnation, marked[::2]), marked[1::2], strict=True)
    fetches = map(Fetch.parse, late[::2], late[1::2], records)
    snapshot.workers_ms, snapshot.shards, snapshot.mixed_ms = workers_ms, shards, mixed_ms
    snapshot.somebody_waits = bool(waiting)
    snapshot.marks = MarksByWorker(
        (inc, parse_marks(text)) for inc, text in pairs if inc is not None
    )
    snapshot.fetches = [fetch for fetch in fetches if fetch is not None]
    return snapshot
