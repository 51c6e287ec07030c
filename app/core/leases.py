"""Incarnations of workers: register, renew, switch over, retire; and who is live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import NamespaceMismatch, WorkerReplaced
from app.core.keys import Keyspace
from app.core.scripts import Call, call
from app.core.types import Incarnation, WorkerInfo, WorkerKey


@dataclass(frozen=True, slots=True)
class Registration:
    """staged: not routed to until `activate`, because its predecessor still serves.
    shards: of the namespace's index."""

    incarnation: Incarnation
    staged: bool
    shards: int


def encode_info(info: WorkerInfo) -> bytes:
    return orjson.dumps(
        {
            "worker": str(info.key),
            "address": info.address,
            "block_size": info.block_size,
            "kv_total_blocks": info.kv_total_blocks,
            "max_requests": info.max_requests,
            "accelerator": info.accelerator,
        }
    )


def decode_info(text: bytes | str) -> WorkerInfo:
    """Inverse of `encode_info`. Raises ValueError, KeyError or TypeError for anything else."""
    fields = orjson.loads(text)
    return WorkerInfo(
        key=WorkerKey.parse(fields["worker"]),
        address=str(fields["address"]),
        block_size=int(fields["block_size"]),
        kv_total_blocks=int(fields["kv_total_blocks"]),
        max_requests=int(fields["max_requests"]),
        accelerator=str(fields["accelerator"]),
    )


def register(
    keyspace: Keyspace,
    info: WorkerInfo,
    nonce: str,
    *,
    ttl_ms: int,
    shards: int = 1,
    resync: bool = False,
) -> Call[Registration]:
    """Begin an incarnation. It replaces the worker's last one at once, or, with `resync` while
    that one lives, when it is activated.

    nonce: tells this process from any other. shards counts only in a new namespace.
    The reply's parser raises NamespaceMismatch if the namespace has another block size, and, with
    `resync`, WorkerReplaced if another process has taken `info.key` over and lives.
    """

    def parse(reply: list[Any]) -> Registration:
        if reply[0] == 0:
            raise NamespaceMismatch(
                f"worker {info.key} has block_size {info.block_size}, "
                f"namespace {keyspace.namespace} has {int(reply[1])}"
            )
        if reply[0] == -1:
            raise WorkerReplaced(f"another process has registered as worker {info.key}")
        return Registration(Incarnation(int(reply[1])), bool(reply[2]), int(reply[3]))

    return call(
        "register",
        keyspace,
        str(info.key),
        nonce,
        ttl_ms,
        encode_info(info),
        info.block_size,
        shards,
        int(resync),
        parse=parse,
    )


def activate(keyspace: Keyspace, key: WorkerKey, inc: Incarnation, nonce: str) -> Call[bool]:
    """Switch `key` over to its staged incarnation. False: it is lost; register again."""
    return call("activate", keyspace, str(key), inc, nonce, parse=bool)


def renew(
    keyspace: Keyspace,
    info: WorkerInfo,
    inc: Incarnation,
    nonce: str,
    *,
    ttl_ms: int,
    staged: bool = False,
) -> Call[bool]:
    """Extend a lease, or revive a lapsed one.

    False: it is retired, or what Redis keeps of it is not whole; register again.
    """
    return call(
        "lease_renew",
        keyspace,
        str(info.key),
        inc,
        nonce,
        ttl_ms,
        encode_info(info),
        int(staged),
        parse=bool,
    )


def retire(keyspace: Keyspace, key: WorkerKey, inc: Incarnation, nonce: str) -> Call[bool]:
    """End an incarnation now. False: it was over already."""
    return call("retire", keyspace, str(key), inc, nonce, parse=bool)


def lapse(keyspace: Keyspace, grace_ms: int) -> Call[int]:
    """Retire incarnations whose lease lapsed `grace_ms` ago; how many were, a few at most."""
    return call("lapse", keyspace, grace_ms, parse=int)


def absent(keyspace: Keyspace, incarnations: Iterable[Incarnation]) -> Call[list[Incarnation]]:
    """Those of `incarnations` that are over."""
    return call(
        "absent", keyspace, *incarnations, parse=lambda reply: [Incarnation(int(i)) for i in reply]
    )
