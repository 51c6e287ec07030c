"""`kvroute inspect`: looks into Redis without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

import click
import orjson

from app.core.hashing import compute_hashes, seed_for
from app.core.keys import Keyspace
from app.core.types import SequenceHash, Tier
from app.core.worker_report import GPU, INFO, NO_READINGS, Item
from app.ops import namespaces, reuse, workers
from app.ops import verify as verification
from app.ops.terminal import CommandAnswer, answering, counted, text_table
from app.options import POSITIVE, POSITIVE_SECONDS, Command
from app.policy.record import DecisionRecord
from app.state import decisions, last_errors, planner
from app.state.client import RedisClient
from app.state.waiting import flows

MAX_SHOWN = 20
TIERS = tuple(tier.name.lower() for tier in Tier)


class _Hash(click.ParamType[SequenceHash]):
    name = "hash"

    def convert(self, value: Any, param: Any, ctx: Any) -> SequenceHash:
        try:
            number = int(value, 16)
        except ValueError:
            self.fail(f"{value!r} is not a hexadecimal number", param, ctx)
        if number < 0:
            self.fail(f"{value!r} is negative", param, ctx)
        if number >= 2**64:
            self.fail(f"{value!r} has more than 16 hex digits", param, ctx)
        return SequenceHash(number)


@click.group()
def inspect() -> None:
    """Inspect the state in Redis without changing it."""


inspect.add_command(reuse.command)


@inspect.command(cls=Command)
@answering
async def summary(redis: RedisClient, keyspace: Keyspace) -> CommandAnswer:
    """Show namespaces, workers, blocks by worker and tier, memory and the age of metrics."""
    names = await namespaces.names(redis)
    about = await namespaces.summary(redis, keyspace)
    lines = [f"namespaces  {', '.join(names) or 'none'}"]
    if about is None:
        error = click.ClickException(f"namespace {keyspace.namespace!r} does not exist")
        return CommandAnswer({"namespaces": names, "summary": None}, lines, error)
    lines += [
        f"namespace   {about.namespace}: blocks of {counted(about.block_size, 'token')}, "
        f"{counted(about.shards, 'shard')}",
        f"index       {counted(about.unique_blocks, 'unique block')}, "
        f"laid out for {about.laid_out_blocks:,}"
        + (" (overfull: changes are slower)" if about.overfull else ""),
        f"memory      {about.memory_bytes / 2**20:,.1f} MiB used by Redis",
        "",
        *_workers_table(about.workers),
    ]
    plain = asdict(about) | {"workers": [_worker_dict(w) for w in about.workers]}
    return CommandAnswer({"namespaces": names, "summary": plain}, lines)


def _worker_dict(worker: workers.WorkerStatus) -> dict[str, Any]:
    by_tier = {tier.name.lower(): count for tier, count in worker.blocks.items()}
    return asdict(worker) | {"blocks": by_tier, "state": worker.state}


def _workers_table(rows: list[workers.WorkerStatus]) -> list[str]:
    head = (
        *("worker", "incarnation", "state", "lease", "metrics", *TIERS),
        *("requests", "prefill tokens"),
    )
    return text_table(
        head,
        [
            (
                w.info.key if w.info else "?",
                w.incarnation,
                w.state,
                "-" if w.lease_ms is None else f"{w.lease_ms / 1000:.1f} s",
                "-" if w.metrics_age_s is None else f"{w.metrics_age_s:.1f} s ago",
                *(f"{w.blocks[tier]:,}" for tier in Tier),
                w.load.requests if w.load else "-",
                f"{w.load.prefill_tokens:,}" if w.load else "-",
            )
            for w in rows
        ],
    )


@inspect.command(cls=Command)
@answering
async def errors(redis: RedisClient, keyspace: Keyspace) -> CommandAnswer:
    """Show what requests failed of lately, in the engines' own words, the latest first."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    now_ms, latest = await last_errors.read(redis, keyspace)
    head = ("last", "first", "requests", "model", "worker", "cause", "words", "request")
    rows = [
        (
            *(_ago(now_ms - one.last_ms), _ago(now_ms - one.first_ms), f"{one.requests:,}"),
            *(text or "-" for text in one.error),
        )
        for one in latest
    ]
    lines = text_table(head, rows, empty="no request failed lately")
    return CommandAnswer([one.as_dict() for one in latest], lines)


def _ago(ms: int) -> str:
    return f"{max(0, ms) / 1000:,.0f} s ago"


@inspect.command(cls=Command)
@click.argument("block", metavar="HASH", type=_Hash())
@answering
async def block(redis: RedisClient, keyspace: Keyspace, block: SequenceHash) -> CommandAnswer:
    """Show who holds a block, given its sequence hash (16 hex digits)."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    everyone = await workers.everyone(redis, keyspace)
    names = {w.incarnation: str(w.info.key) for w in everyone if w.info}
    rows = [
        (names.get(inc, "gone"), inc, tier.name.lower(), key)
        for key, owners in await workers.owners_of(redis, keyspace, block)
        for inc, tier in owners
    ]
    head = ("worker", "incarnation", "tier", "key")
    plain = [dict(zip(head, row, strict=True)) for row in rows]
    return CommandAnswer(plain, text_table(head, rows, empty="no worker holds it"))


RESERVED_TEXT = (
    "  request  prefill tokens, prefill µs, blocks, p (prefilling) or d (decoding), attempt"
)
"""Heading of reservations, which are shown as Redis has them."""


@inspect.command(cls=Command)
@click.argument("name", metavar="WORKER")
@answering
async def worker(redis: RedisClient, keyspace: Keyspace, name: str) -> CommandAnswer:
    """Show a worker's lease, load, blocks, GPU and reservations, by its id or <id>:<dp_rank>."""
    ranks = await workers.worker(redis, keyspace, name)
    if not ranks:
        await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
        raise click.ClickException(f"worker {name!r} does not exist")
    values = await planner.values(redis, keyspace)
    plain = [
        _worker_dict(w)
        | {
            "reserved": await workers.requests_on(redis, keyspace, w.incarnation),
            "unique_value_s": values.get(w.info.key.worker_id) if w.info else None,
        }
        for w in ranks
    ]
    details = [
        line for w, more in zip(ranks, plain, strict=True) for line in _worker_lines(w, more)
    ]
    return CommandAnswer(plain, [*_workers_table(ranks), *details])


def _worker_lines(w: workers.WorkerStatus, more: Mapping[str, Any]) -> Iterator[str]:
    value_s, reserved = more["unique_value_s"], more["reserved"]
    if w.info:
        yield ""
        yield f"{w.info.key} {_said(INFO, w.info)}"
    if value_s is not None:
        yield f"  worth: without it, {value_s:.2f} s of recent prefills would be done again"
    if w.gpu != NO_READINGS:
        yield f"  GPU: {_said(GPU, w.gpu)}"
    if reserved:
        yield RESERVED_TEXT
    for request, record in list(reserved.items())[:MAX_SHOWN]:
        yield f"  {request}  {record}"
    if len(reserved) > MAX_SHOWN:
        yield f"  ... and {len(reserved) - MAX_SHOWN} more"


def _said(items: Iterable[Item], report: object) -> str:
    """Returns a worker's report as a person reads it."""
    texts = []
    for item in items:
        value: Any = getattr(report, item.name)
        if item.kind == tuple[str, ...]:
            value = ", ".join(value)
        if item.text and value not in (None, ""):
            if item.noun:
                value = counted(value, item.noun)
            elif not isinstance(value, str):
                value /= item.per
            texts.append(item.text.format(value))
    return ", ".join(texts)


@inspect.command(cls=Command)
@click.argument("file", type=click.File("rb"))
@click.option(
    "--text", is_flag=True, help="FILE is text, a token per byte; else a JSON list of token ids."
)
@click.option("--lora-name", default=None, help="LoRA adapter of the request.")
@click.option("--cache-namespace", default=None, help="Cache namespace of the request.")
@answering
async def prefix(
    redis: RedisClient,
    keyspace: Keyspace,
    file: BinaryIO,
    text: bool,
    lora_name: str | None,
    cache_namespace: str | None,
) -> CommandAnswer:
    """Show how much of a prompt each worker holds."""
    tokens = list(file.read()) if text else _tokens(file)
    block_size = await namespaces.block_size(redis, keyspace)
    _, chain = compute_hashes(tokens, block_size, seed=seed_for(lora_name, cache_namespace))
    holdings = await workers.prefix(redis, keyspace, chain, len(tokens)) if chain else {}
    rows = sorted(
        [
            (name, one.held.device, one.held.host, one.held.disk, one.held.total, one.reused)
            for name, one in holdings.items()
        ],
        key=lambda row: -row[4],
    )
    head = ("worker", *TIERS, "blocks", "reused")
    overlaps = [dict(zip(head, row, strict=True)) for row in rows]
    lines = [
        f"{counted(len(tokens), 'token')}, {counted(len(chain), 'full block')} of {block_size}",
        *text_table(head, rows, empty="no worker holds its first block"),
    ]
    return CommandAnswer({"full_blocks": len(chain), "overlaps": overlaps}, lines)


def _tokens(file: BinaryIO) -> list[int]:
    try:
        tokens = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise click.ClickException(f"{file.name} is not JSON: {error}") from None
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < 2**32 for token in tokens
    ):
        raise click.ClickException(f"{file.name} is not a JSON list of token ids, 0 to 2^32 - 1")
    return tokens


@inspect.command(cls=Command)
@click.option(
    "--max-buckets",
    default=100_000,
    show_default=True,
    type=POSITIVE,
    help="Maximum number of index buckets to check.",
)
@answering
async def verify(redis: RedisClient, keyspace: Keyspace, max_buckets: int) -> CommandAnswer:
    """Check for contradictions; exit with status 1 if there are any."""
    found, extent = await verification.verify(redis, keyspace, max_buckets)
    if not found:
        # Raises if there is no such namespace: then nothing can be wrong with it.
        await namespaces.block_size(redis, keyspace)
    lines = [
        f"checked all reservations and {extent}",
        "closure under prefix is not checked: Redis does not know a block's parent",
    ]
    for one in found:
        lines.append(f"{counted(one.count, 'time')}: {one.what}")
        lines += [f"    {example}" for example in one.examples]
    plain = asdict(extent) | {"findings": [asdict(one) for one in found]}
    if found:
        return CommandAnswer(plain, lines, click.exceptions.Exit(1))
    return CommandAnswer(plain, [*lines, "no contradictions found"])


@inspect.command(cls=Command)
@answering
async def waiting(redis: RedisClient, keyspace: Keyspace) -> CommandAnswer:
    """Show who waits for a worker, in the order of turns."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    queues = await flows(redis, keyspace)
    rows = [
        (f.tenant or "(none)", f.priority, f"{f.requests:,}", f"{f.oldest_s:.1f} s") for f in queues
    ]
    head = ("tenant", "priority", "requests", "oldest")
    lines = text_table(head, rows, empty="no requests are waiting")
    return CommandAnswer([asdict(flow) for flow in queues], lines)


@inspect.command(cls=Command)
@click.option(
    "--window-s",
    default=600.0,
    show_default=True,
    type=POSITIVE_SECONDS,
    help="How far back to count, from the latest decision kept.",
)
@answering
async def usage(redis: RedisClient, keyspace: Keyspace, window_s: float) -> CommandAnswer:
    """Show how often prefixes of prompts were requested, according to the decisions kept."""
    await namespaces.block_size(redis, keyspace)  # raises if there is no such namespace
    records: list[DecisionRecord] = []
    async for record in decisions.read(redis, keyspace):
        if records and record.at_ms < records[0].at_ms - window_s * 1000:
            break
        records.append(record)
    used = list(reuse.usages(records))
    prefixes = [asdict(u) | {"block": f"{u.block:016x}"} for u in used]
    rows = [(f"{u.block:016x}", u.num_blocks, u.requests) for u in used[:MAX_SHOWN]]
    lines = [
        f"{counted(len(records), 'decision')}; "
        "a prefix is left out if a longer one was requested as often",
        *text_table(("last block", "blocks", "requests"), rows, empty="no prefixes are kept"),
    ]
    return CommandAnswer({"decisions": len(records), "prefixes": prefixes}, lines)
