"""Publishes a dump, which app/ops/dump.py reads, under new incarnations."""

from __future__ import annotations

import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import click

from app.core import worker_report
from app.core.errors import ConfigError
from app.core.keys import Keyspace
from app.core.rate_limit import RateLimit
from app.core.types import Incarnation, WorkerKey
from app.core.worker_report import WorkerInfo
from app.ops.dump import Dump
from app.ops.terminal import COMMON, counted, on_redis, say
from app.options import POSITIVE_SECONDS, Command
from app.state import index, leases
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import STEP_TIMEOUT_S, bucket_bits_of
from app.state.scripts import Call, ScriptRunner

BATCH = 256


@click.command(cls=Command)
@click.option("--in", "source", type=click.File("rb"), default="-", help="Default: stdin.")
@click.option(
    "--lease-ttl-s",
    default=60.0,
    show_default=True,
    type=POSITIVE_SECONDS,
    help="How long the restored workers count as live, unless their agents register first.",
)
@COMMON
@on_redis
async def restore(
    redis: RedisClient, keyspace: Keyspace, source: BinaryIO, lease_ttl_s: float
) -> None:
    """Publish a dump, with every worker in it under a new incarnation.

    Refused if any of the workers is live, as restoring it would end its process. Workers from an
    earlier restore are live until their leases end.

    The whole dump is checked first; for that, a dump that comes through a pipe is kept in a
    temporary file.
    """
    with _rewindable(source) as file:
        restored = await publish(redis, keyspace, file, round(lease_ttl_s * 1000))
    say(f"{counted(restored, 'entry', 'entries')} restored", err=True)


@contextmanager
def _rewindable(source: BinaryIO) -> Iterator[BinaryIO]:
    """`source`, or a copy of it if it is a pipe."""
    if source.seekable():
        yield source
        return
    with TemporaryFile() as copy:
        shutil.copyfileobj(source, copy)
        copy.seek(0)
        yield copy


async def publish(redis: RedisClient, keyspace: Keyspace, file: BinaryIO, lease_ttl_ms: int) -> int:
    """Publish a dump, each worker under a new incarnation; returns how many entries.

    file: read twice, as all of it is checked before anything is written.
    The incarnations live for `lease_ttl_ms` after the end; a worker's agent takes over when it
    registers.
    Raises ConfigError for lines that are not a dump, or for a namespace that they do not fit or in
    which one of the workers is live.
    """
    start = file.tell()
    dumped = Dump(file)
    for _ in dumped.stored():
        pass
    await _refuse_live(redis, keyspace, dumped.workers.values())
    runner = ScriptRunner(redis, STEP_TIMEOUT_S)
    nonce = secrets.token_hex(8)
    writers = {
        inc: await _register(runner, keyspace, dumped.bucket_bits, info, nonce, lease_ttl_ms)
        for inc, info in dumped.workers.items()
    }
    renewals = [
        leases.renew(
            keyspace,
            info,
            writers[inc],
            nonce,
            ttl_ms=lease_ttl_ms,
            shards=len(dumped.bucket_bits),
            staged=True,
        )
        for inc, info in dumped.workers.items()
    ]
    # Leases run on meanwhile: each is renewed three times in its length.
    renewals_due = RateLimit(3000 / lease_ttl_ms)
    seqs: dict[tuple[Incarnation, int], int] = defaultdict(int)
    restored = 0
    file.seek(start)
    for stored in Dump(file).stored():
        if renewals_due.allows(time.monotonic()):
            await _all_hold(runner, renewals)
        inc, shard = writers[stored.incarnation], stored.shard
        for at in range(0, len(stored.changes), BATCH):
            batch = stored.changes[at : at + BATCH]
            seqs[inc, shard] += 1
            call = index.apply(keyspace.of_shard(shard), inc, nonce, seqs[inc, shard], batch)
            if not await runner.one(call):
                raise ConfigError(
                    f"line {stored.line}: incarnation {inc} was replaced during the restore"
                )
            restored += len(batch)
    await _all_hold(runner, renewals)
    activations = [
        leases.activate(keyspace, info.key, writers[inc], nonce)
        for inc, info in dumped.workers.items()
    ]
    await _all_hold(runner, activations)
    return restored


async def _all_hold(runner: ScriptRunner, calls: Sequence[Call[Any]]) -> None:
    if not all(await runner.run(calls)):
        raise ConfigError("another process registered a worker of the dump during the restore")


async def _refuse_live(
    redis: RedisClient, keyspace: Keyspace, workers: Iterable[WorkerInfo]
) -> None:
    # Registering a worker again replaces its agent, which would end the process.
    ends_ms: dict[WorkerKey, float] = {}
    async with deadline(STEP_TIMEOUT_S):
        seconds, micros = await redis.node_of(keyspace["leases"]).client.time()
        now_ms = seconds * 1000 + micros // 1000
        live: Any = await redis.zrangebyscore(
            keyspace["leases"], f"({now_ms}", "+inf", withscores=True
        )
        infos: Any = await redis.hgetall(keyspace["workers"])
    for inc, end_ms in live:
        try:
            ends_ms[worker_report.decode_info(infos[inc]).key] = end_ms
        except (KeyError, ValueError):
            # Nobody knows whose it is.
            continue
    for worker in workers:
        if worker.key in ends_ms:
            raise ConfigError(
                f"worker {worker.key} is live in namespace {keyspace.namespace!r}, with a lease "
                f"that ends in {(ends_ms[worker.key] - now_ms) / 1000:.1f} s: "
                "restore into another --namespace, or stop the worker first"
            )


async def _register(
    runner: ScriptRunner,
    keyspace: Keyspace,
    bucket_bits: list[int],
    worker: WorkerInfo,
    nonce: str,
    lease_ttl_ms: int,
) -> Incarnation:
    shards = len(bucket_bits)
    opened = [False]
    while not all(opened):
        made = await runner.one(
            leases.register(keyspace, worker, nonce, ttl_ms=lease_ttl_ms, shards=shards)
        )
        if made.shards != shards:
            raise ConfigError(
                f"namespace {keyspace.namespace!r} has {made.shards} shards, "
                f"but the dump has {shards}"
            )
        opened = await runner.run(
            [
                index.open_shard(keyspace.of_shard(shard), made.incarnation, nonce, bits)
                for shard, bits in enumerate(bucket_bits)
            ]
        )
    for shard, bits in enumerate(bucket_bits):
        async with deadline(STEP_TIMEOUT_S):
            found = await bucket_bits_of(runner.redis, keyspace.of_shard(shard))
        if found != bits:
            raise ConfigError(
                f"shard {shard} of {keyspace.namespace!r} has {found} bucket bits, "
                f"but the dump has {bits}"
            )
    return made.incarnation
