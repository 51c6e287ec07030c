"""Incarnations of workers: register, renew, switch over, retire; and which are live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.core.errors import NamespaceMismatch, WorkerReplaced, WrongVersion
from app.core.keys import DATA_VERSION, Keyspace
from app.core.types import Incarnation, WorkerKey, parse_incarnation
from app.core.worker_report import WorkerInfo, encode_info
from app.state.scripts import Call, call, command


@dataclass(frozen=True, slots=True)
class Registration:
    """An incarnation that is not routed to until `activate`.

    predecessor_lives: another incarnation of the same process is, so publish everything first.
    shards: how many the namespace's index has.
    """

    incarnation: Incarnation
    predecessor_lives: bool
    shards: int


def block_size_of(keyspace: Keyspace) -> Call[int | None]:
    """Tokens per block of the namespace's index; None if nobody has registered yet."""

    def parse(reply: bytes | None) -> int | None:
        return int(reply) if reply and reply.isdigit() else None

    return command("block_size_of", "HGET", keyspace["meta"], "block_size", parse=parse)


def register(
    keyspace: Keyspace,
    info: WorkerInfo,
    nonce: str,
    *,
    ttl_ms: int,
    shards: int = 1,
    previous: Incarnation | None = None,
) -> Call[Registration]:
    """Begin an incarnation, which replaces the worker's last one when it is activated.

    nonce: distinguishes this process from any other. shards: used only if the namespace is new.
    previous: the incarnation that the process has acted as until now; None: the process is new.
    The reply's parser raises NamespaceMismatch if the namespace has another block size,
    WrongVersion if another release wrote it and, with
    `previous`, WorkerReplaced if another process has taken over `info.key` and is live.
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
) -> Call[bool]:
    """Route to `inc` from now on, and no longer to the worker's last incarnation.

    previous: as for `register`; if given, requests in flight move along. drains: what the agent
    last heard of that. False: `inc` is lost, or another process has taken over `key`; register
    again.
    """
    args = (str(key), inc, nonce, previous or "", int(drains))
    return call("activate", keyspace, *args, parse=bool)


class Renewed(NamedTuple):
    """num_leases: how many incarnations have one; 0: it is not renewed, so register again. drains:
    whether the worker is out of service."""

    num_leases: int
    drains: bool = False

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
) -> Call[Renewed]:
    """Extend a lease, or revive a lapsed one, and restore what Redis has lost of the worker.

    shards: how many `inc` publishes in. thorough: recount its load as well. drains: what the agent
    last heard of that. Not renewed: `inc` is retired or replaced, or the index has another number
    of shards, or the namespace another version.
    """

    def parse(reply: list[int]) -> Renewed:
        return Renewed(reply[0], reply[1:] == [1])

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
        parse=parse,
    )


def retire(keyspace: Keyspace, key: WorkerKey, inc: Incarnation, nonce: str) -> Call[bool]:
    """End an incarnation now. False: it had ended already."""
    return call("retire", keyspace, str(key), inc, nonce, parse=bool)


def retire_lapsed(keyspace: Keyspace, grace_ms: int, heard_ms: int) -> Call[int]:
    """Retire incarnations whose lease lapsed `grace_ms` before Redis was last heard from.

    heard_ms: when that was, by the Redis clock, as in a Snapshot. Returns how many were retired, a
    few at most.
    """
    return call("retire_lapsed", keyspace, grace_ms, heard_ms, parse=int)


def suspend(
    keyspace: Keyspace, request_id: str, *, of_source: bool = False
) -> Call[Incarnation | None]:
    """Let the lease of the incarnation that failed a request lapse until it is renewed, and longer
    if it failed others before.

    of_source: the request's source failed it, not the worker that decodes.
    Returns that incarnation. None: nothing has changed, as the request has no reservation, or the
    lease had lapsed, or too many have.
    """
    args = (request_id, int(of_source))
    return call("suspend", keyspace, *args, parse=lambda inc: parse_incarnation(inc or b""))


def drain(keyspace: Keyspace, key: WorkerKey, *, undo: bool = False) -> Call[int | None]:
    """Route nothing to a worker any more, until that is undone or another process takes it over.

    Returns how many requests are reserved on it; None: there is no such worker.
    """
    return call("drain", keyspace, str(key), int(not undo), parse=lambda left: left)


def absent(keyspace: Keyspace, incarnations: Iterable[Incarnation]) -> Call[list[Incarnation]]:
    """Those of `incarnations`, at least one, that no process may act as: they have ended, or were
    lost when Redis lost data."""
    asked = list(incarnations)

    def parse(nonces: list[bytes | None]) -> list[Incarnation]:
        return [inc for inc, nonce in zip(asked, nonces, strict=True) if nonce is None]

    return command("absent", "HMGET", keyspace["writers"], *asked, parse=parse)
