"""Commands for operators: look into Redis, move an index, delete a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, BinaryIO, TypeVar

import click
import numpy as np
import orjson

from app import dump as dumping
from app import inspection, recording
from app.core import config
from app.core.config import POLICY_NAMES, Command, CommonSettings
from app.core.errors import RoutingError
from app.core.hashing import compute_hashes, seed_for
from app.core.keys import Keyspace
from app.core.redis import connect
from app.core.topology import Client
from app.core.types import Incarnation, SequenceHash, Tier
from app.policy.cost import POLICIES, CostFunction, blocks, predicted_prefill_s
from app.policy.select import choose
from app.recording import Record

T = TypeVar("T")
TIMEOUT_S = 5.0
MAX_SHOWN = 20
_COMMON = config.options(CommonSettings, without=("host", "log_level"))


class _Hash(click.ParamType[SequenceHash]):
    name = "hash"

    def convert(self, value: Any, param: Any, ctx: Any) -> SequenceHash:
        try:
            number = int(value, 16)
        except ValueError:
            self.fail(f"{value!r} is no hexadecimal number", param, ctx)
        if not 0 <= number < 2**64:
            self.fail(f"{value!r} has more than 16 hex digits", param, ctx)
        return SequenceHash(number)


def _on_redis(command: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Runs `command` with a client of the Redis, and the keyspace, that the options name."""

    @wraps(command)
    def run(redis_url: str, namespace: str, **values: Any) -> T:
        async def connected() -> T:
            async with connect(redis_url, timeout_s=TIMEOUT_S) as redis:
                return await command(redis, Keyspace(namespace), **values)

        return asyncio.run(connected())

    return run


def _json(value: Any) -> str:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: Any) -> Any:
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns as wide as their widest cell; all but the first to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


@click.group()
def inspect() -> None:
    """Look into Redis, reading only."""


as_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@inspect.command(cls=Command)
@_COMMON
@as_json
@_on_redis
async def summary(redis: Client, keyspace: Keyspace, as_json: bool) -> None:
    """Namespaces, workers, blocks by worker and tier, memory, age of metrics."""
    names = await inspection.namespaces(redis)
    found = await inspection.summary(redis, keyspace)
    if as_json:
        click.echo(_json({"namespaces": names, "summary": asdict(found) if found else None}))
        return
    click.echo(f"namespaces  {', '.join(names) or 'none'}")
    if found is None:
        raise click.ClickException(f"namespace {keyspace.namespace!r}: there is none")
    per_block = found.memory_bytes / found.unique_blocks if found.unique_blocks else 0
    click.echo(
        f"namespace   {found.namespace}: blocks of {found.block_size} tokens, "
        f"{found.shards} shard{'s' if found.shards > 1 else ''}\n"
        f"index       {found.unique_blocks:,} unique blocks, laid out for {found.laid_out_blocks:,}"
        + (" (overfull: look-ups and changes are slow)" if found.overfull else "")
        + f"\nmemory      {found.memory_bytes / 2**20:,.1f} MiB used by Redis"
        + (f", {per_block:,.0f} bytes a block" if per_block else "")
        + "\n"
    )
    click.echo(_workers_table(found.workers))


def _workers_table(workers: list[inspection.Worker]) -> str:
    return _table(
        (
            "worker",
            "incarnation",
            "state",
            "lease",
            "metrics",
            *[t.name.lower() for t in Tier],
            "requests",
            "prefill tokens",
        ),
        [
            (
                w.info.key if w.info else "?",
                w.incarnation,
                _state(w),
                "-" if w.lease_ms is None else f"{w.lease_ms / 1000:.1f} s",
                "-" if w.metrics_age_s is None else f"{w.metrics_age_s:.1f} s ago",
                *(f"{w.blocks[tier]:,}" for tier in Tier),
                w.load.requests if w.load else "-",
                f"{w.load.prefill_tokens:,}" if w.load else "-",
            )
            for w in workers
        ],
    )


def _state(worker: inspection.Worker) -> str:
    if worker.lease_ms is None or worker.lease_ms <= 0:
        return "lapsed"
    return "live" if worker.current else "staged"


@inspect.command(cls=Command)
@click.argument("block", metavar="HASH", type=_Hash())
@_COMMON
@as_json
@_on_redis
async def block(redis: Client, keyspace: Keyspace, block: SequenceHash, as_json: bool) -> None:
    """Who holds a block, by its sequence hash: 16 hex digits."""
    names = {w.incarnation: w for w in (await inspection.everyone(redis, keyspace))}
    rows = [
        (_name(names, inc), inc, tier.name.lower(), key)
        for key, owners in await inspection.owners_of(redis, keyspace, block)
        for inc, tier in owners
    ]
    head = ("worker", "incarnation", "tier", "key")
    if as_json:
        click.echo(_json([dict(zip(head, row, strict=True)) for row in rows]))
    else:
        click.echo(_table(head, rows) if rows else "nobody holds it")


def _name(names: dict[Incarnation, inspection.Worker], inc: Incarnation) -> str:
    one = names.get(inc)
    return str(one.info.key) if one and one.info else "over"


GPU_TEXT = (
    ("memory_used_bytes", 2**30, "{:,.1f} GiB used"),
    ("memory_total_bytes", 2**30, "{:,.1f} GiB in all"),
    ("utilisation", 0.01, "{:.0f} % busy"),
    ("temperature_c", 1, "{:.0f} °C"),
    ("power_w", 1, "{:.0f} W"),
    ("pcie_sent_bytes_per_s", 1e6, "{:,.1f} MB/s sent over PCIe"),
    ("pcie_received_bytes_per_s", 1e6, "{:,.1f} MB/s received"),
)
"""Fields of GpuReadings: the unit that a person reads them in, and the words around it."""


@inspect.command(cls=Command)
@click.argument("name", metavar="WORKER")
@_COMMON
@as_json
@_on_redis
async def worker(redis: Client, keyspace: Keyspace, name: str, as_json: bool) -> None:
    """A worker by its id, or <id>:<dp_rank>: lease, load, blocks, GPU, what is reserved on it."""
    found = await inspection.worker(redis, keyspace, name)
    if not found:
        raise click.ClickException(f"worker {name!r}: there is none")
    requests = {
        w.incarnation: await inspection.requests_on(redis, keyspace, w.incarnation) for w in found
    }
    if as_json:
        rows = [asdict(w) | {"reserved": requests[w.incarnation]} for w in found]
        click.echo(_json(rows))
        return
    click.echo(_workers_table(found))
    for w in found:
        if w.info:
            click.echo(
                f"\n{w.info.key} at {w.info.address}, {w.info.kv_total_blocks:,} blocks, "
                f"up to {w.info.max_requests} requests, {w.info.accelerator}"
            )
        if readings := w.gpu.known():
            texts = [text.format(readings[k] / u) for k, u, text in GPU_TEXT if k in readings]
            click.echo("  GPU: " + ", ".join(texts))
        reserved = requests[w.incarnation]
        for request, record in list(reserved.items())[:MAX_SHOWN]:
            click.echo(f"  {request}  {record}")
        if len(reserved) > MAX_SHOWN:
            click.echo(f"  ... and {len(reserved) - MAX_SHOWN} more")


@inspect.command(cls=Command)
@click.argument("file", type=click.File("rb"))
@click.option(
    "--text", is_flag=True, help="The file is text, a token a byte; else a JSON list of token ids."
)
@click.option("--lora", default=None, help="LoRA adapter of the request.")
@click.option("--cache-namespace", default=None, help="Cache namespace of the request.")
@_COMMON
@as_json
@_on_redis
async def prefix(
    redis: Client,
    keyspace: Keyspace,
    file: BinaryIO,
    text: bool,
    lora: str | None,
    cache_namespace: str | None,
    as_json: bool,
) -> None:
    """Who holds how much of a prompt."""
    tokens = list(file.read()) if text else _tokens(file)
    block_size = await inspection.block_size(redis, keyspace)
    _, chain = compute_hashes(tokens, block_size, seed=seed_for(lora, cache_namespace))
    found = await inspection.prefix(redis, keyspace, chain) if chain else {}
    rows = sorted(
        ((name, o.device, o.host, o.disk, o.total) for name, o in found.items()),
        key=lambda row: -row[4],
    )
    head = ("worker", *[t.name.lower() for t in Tier], "blocks")
    if as_json:
        click.echo(
            _json(
                {
                    "isl_blocks": len(chain),
                    "overlaps": [dict(zip(head, row, strict=True)) for row in rows],
                }
            )
        )
        return
    click.echo(f"{len(tokens):,} tokens, {len(chain):,} full blocks of {block_size}")
    click.echo(_table(head, rows) if rows else "nobody holds its first block")


def _tokens(file: BinaryIO) -> list[int]:
    try:
        tokens = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise click.ClickException(f"FILE is no JSON: {error}") from None
    if not isinstance(tokens, list) or not all(
        isinstance(token, int) and 0 <= token < 2**32 for token in tokens
    ):
        raise click.ClickException("FILE is no list of token ids, 0 to 2^32 - 1")
    return tokens


@inspect.command(cls=Command)
@click.option(
    "--max-buckets",
    default=100_000,
    show_default=True,
    type=config.POSITIVE,
    help="Of the index, looked through at most.",
)
@_COMMON
@as_json
@_on_redis
async def verify(redis: Client, keyspace: Keyspace, max_buckets: int, as_json: bool) -> None:
    """Look for contradictions; exit status 1 if there are some."""
    findings, buckets = await inspection.verify(redis, keyspace, max_buckets)
    if as_json:
        click.echo(_json({"buckets": buckets, "findings": [asdict(f) for f in findings]}))
    else:
        click.echo(f"{buckets:,} buckets and all that is reserved looked through")
        click.echo("closure under prefix is not checked: Redis does not know a block's parent")
        for finding in findings:
            click.echo(f"{finding.count:,} times: {finding.what}")
            for example in finding.examples:
                click.echo(f"    {example}")
        if not findings:
            click.echo("nothing is wrong")
    if findings:
        click.get_current_context().exit(1)


@click.command(cls=Command)
@click.option("--out", type=click.File("wb", lazy=True), default="-", help="Default: stdout.")
@_COMMON
@_on_redis
async def dump(redis: Client, keyspace: Keyspace, out: BinaryIO) -> None:
    """Write who holds which blocks as JSON lines."""
    async for line in dumping.dump(redis, keyspace):
        out.write(line + b"\n")


@click.command(cls=Command)
@click.option("--in", "source", type=click.File("rb"), default="-", help="Default: stdin.")
@click.option(
    "--lease-ttl-s",
    default=60.0,
    show_default=True,
    type=config.POSITIVE_SECONDS,
    help="The workers count as live for so long, or until their agents register.",
)
@_COMMON
@_on_redis
async def restore(redis: Client, keyspace: Keyspace, source: BinaryIO, lease_ttl_s: float) -> None:
    """Publish a dump: every worker in it under a new incarnation."""
    ttl_ms = round(lease_ttl_s * 1000)
    restored = await dumping.restore(redis, keyspace, source, ttl_ms)
    click.echo(f"{restored:,} entries restored", err=True)


@click.command(cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_COMMON
@_on_redis
async def reset(redis: Client, keyspace: Keyspace, yes: bool) -> None:
    """Delete all keys of a namespace. Workers that run register again by themselves."""
    keys = await dumping.count_keys(redis, keyspace)
    if not yes:
        click.confirm(f"Delete {keys:,} keys of namespace {keyspace.namespace!r}?", abort=True)
    click.echo(f"{await dumping.reset(redis, keyspace):,} keys deleted")


@inspect.command(cls=Command)
@_COMMON
@as_json
@_on_redis
async def waiting(redis: Client, keyspace: Keyspace, as_json: bool) -> None:
    """Who waits for a worker, in the order of turns."""
    found = await inspection.waiting(redis, keyspace)
    if as_json:
        click.echo(_json([asdict(flow) for flow in found]))
        return
    rows = [
        (f.tenant or "(none)", f.priority, f"{f.requests:,}", f"{f.oldest_s:.1f} s") for f in found
    ]
    click.echo(
        _table(("tenant", "priority", "requests", "oldest"), rows) if rows else "nobody waits"
    )


@inspect.command(cls=Command)
@click.option(
    "--window-s",
    default=600.0,
    show_default=True,
    type=config.POSITIVE_SECONDS,
    help="Back from the latest decision that is kept.",
)
@_COMMON
@as_json
@_on_redis
async def usage(redis: Client, keyspace: Keyspace, window_s: float, as_json: bool) -> None:
    """How often prefixes of prompts were asked for, by the decisions that are kept."""
    records: list[Record] = []
    async for record in recording.read(redis, keyspace):
        if records and record.at_ms < records[0].at_ms - window_s * 1000:
            break
        records.append(record)
    found = list(recording.usages(records))
    if as_json:
        click.echo(_json({"decisions": len(records), "prefixes": [asdict(u) for u in found]}))
        return
    click.echo(f"{len(records):,} decisions; prefixes that no longer one continues as often")
    rows = [(f"{u.block:016x}", u.num_blocks, u.requests) for u in found[:MAX_SHOWN]]
    click.echo(_table(("last block", "blocks", "requests"), rows) if rows else "none is kept")


@click.command(cls=Command)
@click.argument("request_id")
@_COMMON
@as_json
@_on_redis
async def explain(redis: Client, keyspace: Keyspace, request_id: str, as_json: bool) -> None:
    """Why a request went where it went, as long as the decision is kept."""
    async for record in recording.read(redis, keyspace):
        if record.request_id == request_id:
            break
    else:
        raise click.ClickException(f"no decision about {request_id!r} is kept (any more)")
    rows, terms = _scored(record)
    if as_json:
        plain = {k: v for k, v in asdict(record).items() if k not in ("seen", "blocks")}
        head = ("worker", "eligible", "requests", "overlap_blocks", "cost", *terms)
        plain["candidates"] = [dict(zip(head, row, strict=True)) for row in rows]
        click.echo(_json(plain))
        return
    o = record.overlap
    click.echo(
        f"{request_id}: {record.isl_tokens:,} tokens to {record.worker} by {record.policy}, which "
        f"held {o.total:,} of {record.isl_blocks:,} full blocks ({o.device:,} on its device, "
        f"{o.host:,} in host memory, {o.disk:,} on disk)"
    )
    longest = f"; {record.best} held most, {record.best_overlap:,}" if record.best else ""
    click.echo(f"{LOCALITY_TEXT[record.locality]}{longest}; decided at try {record.tries}")
    if record.waited_ms:
        click.echo(f"it waited {record.waited_ms / 1000:.2f} s for a worker that could take it")
    if not rows:
        click.echo("what the other workers were like was not kept: see --details-per-s")
        return
    shown = [[_short(cell) for cell in row] for row in rows]
    click.echo(_table(("worker", "eligible", "requests", "overlap", "cost", *terms), shown))


LOCALITY_TEXT = {
    "kept": "the longest overlap was taken",
    "none": "nobody held its beginning",
    "tie": "another was drawn, at the same cost",
    "load": "another was cheaper, overlap and load together",
    "session": "another was cheaper, as the session had gone there before",
    "full": "the longest overlap was on a worker that was full",
    "excluded": "the longest overlap was on a worker that the request excludes",
    "lease": "the longest overlap was on a worker whose lease had run out",
    "degraded": "Redis was away, and so overlap was not known",
}


def _scored(record: Record) -> tuple[list[list[Any]], list[str]]:
    """Every candidate with its cost and terms, the cheapest first; and the terms' names."""
    if record.seen is None:
        return [], []
    seen, candidates = record.seen, record.seen.candidates
    costs = seen.priced(POLICIES[record.policy])(candidates, record.size)
    overlap = candidates.overlap_device + candidates.overlap_host + candidates.overlap_disk
    rows = [
        [
            worker,
            bool(seen.eligible[i]),
            int(candidates.active_requests[i]),
            int(overlap[i]),
            float(costs.cost[i]),
            *(float(values[i]) for values in costs.terms.values()),
        ]
        for i, worker in enumerate(seen.workers)
    ]
    return sorted(rows, key=lambda row: row[4]), list(costs.terms)


def _short(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


@click.command(cls=Command)
@click.option("--policy", required=True, type=click.Choice(POLICY_NAMES), help="To score with.")
@click.option(
    "--prefill-weight",
    type=click.FloatRange(min=0),
    help="Of `blocks`, in the place of 1.",
)
@click.option("--last", default=1000, show_default=True, type=config.POSITIVE, help="Decisions.")
@_COMMON
@as_json
@_on_redis
async def whatif(
    redis: Client,
    keyspace: Keyspace,
    policy: str,
    prefill_weight: float | None,
    last: int,
    as_json: bool,
) -> None:
    """Score the last decisions again with another policy, each by itself.

    Only those of which all candidates are kept: see --details-per-s. What the other choices would
    have made of the load is not followed up.
    """
    if prefill_weight is not None and policy != "blocks":
        raise click.BadParameter("only blocks has one", param_hint="--prefill-weight")
    cost = None if prefill_weight is None else partial(blocks, prefill_weight=prefill_weight)
    rng = np.random.default_rng(0)
    found = Comparison()
    async for record in recording.read(redis, keyspace):
        if record.seen is None:
            continue
        found.add(record, policy, cost, rng)
        if found.decisions == last:
            break
    if not found.decisions:
        raise click.ClickException("no decision is kept with its candidates: see --details-per-s")
    if as_json:
        click.echo(_json(found.means()))
        return
    click.echo(f"{found.decisions:,} decisions; {found.changed:,} would have gone elsewhere")
    rows = [
        (name, _short(mean["were"]), _short(mean["would be"]))
        for name, mean in found.means()["mean"].items()
    ]
    click.echo(_table(("mean", "were", "would be"), rows))


class Comparison:
    """Choices as they were, and as another policy would have made them."""

    def __init__(self) -> None:
        self.decisions = 0
        self.changed = 0
        self._sums = {
            name: [0.0, 0.0]
            for name in ("overlap blocks", "predicted start, s", "requests on the worker")
        }

    def add(
        self, record: Record, policy: str, cost: CostFunction | None, rng: np.random.Generator
    ) -> None:
        seen = record.seen
        assert seen is not None
        eligible = np.array(seen.eligible, dtype=bool)
        try:
            choice = choose(
                policy,
                seen.candidates,
                record.size,
                eligible=eligible,
                rng=rng,
                turn=self.decisions,
                cost=seen.priced(cost or POLICIES[policy]),
            )
            was = seen.workers.index(record.worker)
        except (RoutingError, ValueError):
            return
        c = seen.candidates
        overlap = c.overlap_device + c.overlap_host + c.overlap_disk
        start = c.prefill_s + predicted_prefill_s(c, record.size)
        for name, values in zip(self._sums, (overlap, start, c.active_requests), strict=True):
            self._sums[name][0] += float(values[was])
            self._sums[name][1] += float(values[choice.index])
        self.decisions += 1
        self.changed += was != choice.index

    def means(self) -> dict[str, Any]:
        return {
            "decisions": self.decisions,
            "changed": self.changed,
            "mean": {
                name: {"were": were / self.decisions, "would be": would / self.decisions}
                for name, (were, would) in self._sums.items()
            },
        }
