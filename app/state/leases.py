"""Incarnations of workers: registered, renewed, switched over, retired; and their leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.core.errors import NamespaceMismatch, WorkerReplaced, WrongVersion
from app.core.failures import Failure
from app.core.keys import DATA_VERSION, Keyspace
from app.core.registration import encode_info
from app.core.types import Incarnation, WorkerKey, parse_incarnation
from app.core.worker_report import WorkerInfo
from app.state.scripts import Call, call, command

AWAY_GRACE_MS = 60_000
"""Time for which a worker whose agent is away is kept after its engine last answered: no agent
registers it again, and an engine that starts anew, or cannot be reached, takes a while."""


@dataclass(frozen=True, slots=True)
class Registration:
    """An incarnation that is not routed to until `activate`. predecessor_lives: whether another
    incarnation of the same process is live, so that everything is published first. shards: of the
    namespace's index."""

    incarnation: Incarnation
    predecessor_lives: bool
    shards: int


def block_size_of(keyspace: Keyspace) -> Call[int | None]:
    """Returns the tokens per block of the namespace's index; None if nobody has registered yet."""

    def parse(reply: bytes | None) -> int | None:
        return int(reply) if reply and reply.isdigit() else None

    return command("block_size_of", "HGET", keyspace["meta"], "block_size", parse=parse)


def in_service(keyspace: Keyspace) -> Call[list[WorkerKey]]:
    """Returns the workers that are routed to, drain, or have lapsed."""

    def parse(reply: list[bytes]) -> list[WorkerKey]:
        keys = []
        for text in reply:
            with suppress(ValueError):
                keys.append(WorkerKey.parse(text.decode(errors="replace")))
        return keys

    return command("in_service", "HKEYS", keyspace["current"], parse=parse)


def register(
    keyspace: Keyspace,
    info: WorkerInfo,
    nonce: str,
    *,
    ttl_ms: int,
    shards: int = 1,
    previous: Incarnation | None = None,
) -> Call[Registration]:
    """Begins an incarnation, which replaces the worker's last one when it is activated.

    nonce: distinguishes this process from any other. shards: used only if the namespace is new.
    previous: the process's incarnation until now; None: the process is new.
    The reply's parser raises NamespaceMismatch if the namespace has another block size,
    WrongVersion if another release wrote it and, with `previous`, WorkerReplaced if another process
    has taken over `info.key` and is live.
    """

    def parse(reply: list[Any]) -> Registration:
        if reply[0] == 0:
            raise NamespaceMismatch(
                f"worker {info.key} has block_size {info.block_size}, "
                f"but namespace {keyspace.namespace} has {int(reply[1])}"
            )
        if reply[0] == -2:
            raise WrongVersion(keyspace.namespace, int(reply[1]), DATA_VERSION)
        if reply[0] == -1:
            raise WorkerReplaced(f"another process has registered as worker {info.key}")
        return Registration(Incarnation(int(reply[1])), bool(reply[2]), int(reply[3]))

    return call(
        "register",
        keyspace,
        str(info.key),
        nonce,
        ttl_ms,
        encode_info(info, ttl_ms),
        info.block_size,
        shards,
        previous or "",
        DATA_VERSION,
        parse=parse,
    )


def activate(
    keyspace: Keyspace,
    key: WorkerKey,
    inc: Incarnation,
    nonce: str,
    *,
    previous: Incarnation | None = None,
    drains: bool = False,
    tainted: bool = False,
) -> Call[bool]:
    """Routes to `inc` from now on, and no longer to the worker's last incarnation.

    previous: the process's incarnation until now, whose requests in flight move along; None: the
    process is new. drains, tainted: as the agent last heard. False: `inc` is lost, or another
    process has taken over `key`; register again.
    """
    args = (str(key), inc, nonce, previous or "", int(drains), int(tainted))
    return call("activate", keyspace, *args, parse=bool)


class Renewal(NamedTuple):
    """Answer to a renewal. num_leases: incarnations with a lease; 0: this one's is not renewed, so
    register again. drains, is_out, tainted: whether the worker is out of service as asked, as its
    engine is ill, or as its engine is tainted by `fetched_late`. same: says that another worker,
    which is routed to, has the same engine; "": none has."""

    num_leases: int
    drains: bool = False
    is_out: bool = False
    tainted: bool = False
    same: str = ""

    def __bool__(self) -> bool:
        return self.num_leases > 0


def renew(
    keyspace: Keyspace,
    info: WorkerInfo,
    inc: Incarnation,
    nonce: str,
    *,
    ttl_ms: int,
    shards: int = 1,
    staged: bool = False,
    thorough: bool = True,
    drains: bool = False,
    tainted: bool = False,
) -> Call[Renewal]:
    """Extends a lease, or revives a lapsed one, and restores what Redis has lost of the worker. If
    its engine is ill, as `info` says, it stays lapsed, unless too many others are.

    shards: how many `inc` publishes in. thorough: recount its load as well. drains, tainted: as the
    agent last heard. Not renewed: `inc` is retired or replaced, or the index has another number of
    shards, or the namespace another version.
    """

    def parse(reply: list[Any]) -> Renewal:
        if len(reply) == 1:
            return Renewal(0)
        other = reply[4].decode()
        same = f"has the same engine as worker {other}, which gets the requests" if other else ""
        return Renewal(reply[0], bool(reply[1]), bool(reply[2]), bool(reply[3]), same)

    return call(
        "renew",
        keyspace,
        str(info.key),
        inc,
        nonce,
        ttl_ms,
        encode_info(info, ttl_ms),
        info.block_size,
        shards,
        int(staged),
        int(thorough),
        DATA_VERSION,
        int(drains),
        info.ill,
        int(tainted),
        info.engine_id,
        parse=parse,
    )


def retire(keyspace: Keyspace, key: WorkerKey, inc: Incarnation, nonce: str) -> Call[bool]:
    """Ends an incarnation now. False: it had ended already."""
    return call("retire", keyspace, str(key), inc, nonce, parse=bool)


def retire_lapsed(
    keyspace: Keyspace, grace_ms: int, heard_ms: int, away_grace_ms: int = AWAY_GRACE_MS
) -> Call[int]:
    """Retires incarnations whose lease lapsed `grace_ms` before Redis was last heard from, at
    `heard_ms` of its clock. away_grace_ms: for those that routers vouched for. Returns how many
    were retired, a few at most."""
    return call("retire_lapsed", keyspace, grace_ms, heard_ms, away_grace_ms, parse=int)


def ending(keyspace: Keyspace, by_ms: int) -> Call[dict[Incarnation, float]]:
    """Returns the ends of leases up to `by_ms`, in ms by the Redis clock."""

    def parse(reply: list[bytes]) -> dict[Incarnation, float]:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {inc: float(ms) for text, ms in pairs if (inc := parse_incarnation(text))}

    args = ("-inf", by_ms, "WITHSCORES")
    return command("ending", "ZRANGEBYSCORE", keyspace["leases"], *args, parse=parse)


def vouch(
    keyspace: Keyspace, incarnations: Sequence[Incarnation], *, most_ms: int
) -> Call[list[bool]]:
    """Extends the leases of workers whose engines answer while their agents are away, for `most_ms`
    at most. Returns whether each was extended; else the agent has the lease in hand, has been away
    for too long, or the worker is gone."""

    def parse(vouched: list[int]) -> list[bool]:
        return [bool(one) for one in vouched]

    return call("vouch", keyspace, most_ms, *incarnations, parse=parse)


def suspend(
    keyspace: Keyspace,
    failure: Failure,
    request_id: str = "",
    *,
    caller: str = "",
    incarnation: Incarnation | None = None,
    sent_ms: int | None = None,
    failed_ms: int | None = None,
) -> Call[list[Incarnation]]:
    """Counts a failure against a worker, for whom `failure.counts` says, and lets its lease lapse
    if that is due.

    caller: sender of the request; "": not known. incarnation: the worker's; None: as the request's
    reservation says. sent_ms: when the request was sent there, Redis clock; None: when it was
    reserved. failed_ms: when it failed; None: now.
    Returns those whose leases lapse: none, if there are too few failures, too many workers have
    lapsed, the request has no reservation, or the lease had lapsed.
    """

    def parse(suspended: list[bytes]) -> list[Incarnation]:
        return [inc for text in suspended if (inc := parse_incarnation(text))]

    args = (
        *(incarnation or "", request_id, caller, int(failure.counts)),
        *(-1 if ms is None else ms for ms in (sent_ms, failed_ms)),
        *(failure.mark, failure.cause, round(1000 * failure.weight), failure.in_a_row),
        *(round(1000 * failure.most_s), round(1000 * failure.pause_s)),
    )
    return call("suspend", keyspace, *args, parse=parse)


def answers_again(keyspace: Keyspace, key: WorkerKey, marks: Iterable[str]) -> Call[int]:
    """Forgets these marks of a worker, as it has answered; returns how many it had."""
    return call("answers_again", keyspace, str(key), *marks, parse=int)


def fetched_late(keyspace: Keyspace, source: WorkerKey) -> Call[list[str]]:
    """Records that a source's engine has counted fetches after their lease had ended. Targets that
    may have made them may hold KV of one prompt as another's, so nothing is routed to them until
    they have begun anew or dropped what they hold. Returns the targets that are newly marked."""

    def parse(reply: list[bytes]) -> list[str]:
        return [worker.decode() for worker in reply]

    return call("fetched_late", keyspace, str(source), parse=parse)


def drain(keyspace: Keyspace, key: WorkerKey, *, undo: bool = False) -> Call[int | None]:
    """Routes nothing to a worker any more, until that is undone or another process takes it over.
    Returns how many requests are reserved on it; None: there is no such worker."""
    return call("drain", keyspace, str(key), int(not undo), parse=lambda left: left)


def absent(keyspace: Keyspace, incarnations: Iterable[Incarnation]) -> Call[list[Incarnation]]:
    """Returns those of `incarnations`, at least one, that no process may act as: they have ended,
    or were lost when Redis lost data."""
    asked = list(incarnations)

    def parse(nonces: list[bytes | None]) -> list[Incarnation]:
        return [inc for inc, nonce in zip(asked, nonces, strict=True) if nonce is None]

    return command("absent", "HMGET", keyspace["writers"], *asked, parse=parse)


def claim(
    keyspace: Keyspace,
    source: str,
    holder: str,
    ready: Sequence[str],
    others: Sequence[str] = (),
    *,
    ttl_ms: int,
    room: int,
) -> Call[tuple[frozenset[str], frozenset[str]]]:
    """Claims engines for the process `holder`, for `ttl_ms` (0: it leaves). Returns the engines
    that it is the agent of, and those that have no agent.

    source: of the engines; processes with the same one share them. ready, others: all engines that
    the process sees; `others` are claimed only if somebody had claimed them before. room: most
    engines of a process.
    """

    def parse(reply: list[Any]) -> tuple[frozenset[str], frozenset[str]]:
        claimed, free = (frozenset(name.decode(errors="replace") for name in one) for one in reply)
        return claimed, free

    args = (source, holder, ttl_ms, room, len(ready), *ready, *others)
    return call("claim", keyspace, *args, parse=parse)
