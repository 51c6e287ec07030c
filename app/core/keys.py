"""Every Redis key: its name, type, members, writer and lifetime. Nothing else spells a key.

A namespace is one model, block size and hash settings. Its keys share a hash tag, except those of
the index, which are in shards, each with its own tag. A script touches the keys of only one tag, so
a namespace may be spread over a Redis Cluster. The names are a public contract; the `1` in them is
its version. Fields and values are text. `<inc>` is the number of an incarnation. "By" names the
scripts that write a key, without those that only remove.

    kvroute:1:{<namespace>}:...
    meta                hash    block_size, shards, incarnations (last number issued), workers_ms
                                (when one was last registered or repaired); by register,
                                renew; for good
    workers             hash    <inc> -> JSON of WorkerInfo, and lease_ttl_ms; by register,
                                renew; until retired
    current             hash    <worker_id>:<dp_rank> -> <inc> that is routed to; by activate,
                                renew; until retired
    leases              zset    <inc> scored by expiry, ms, Redis clock; by register, renew,
                                retire_lapsed, suspend; until retired
    writers             hash    <inc> -> nonce of the process that acts as it; by register; until
                                retired
    load                hash    <inc> -> "prefill_tokens prefill_us head_us head_since_ms blocks
                                requests decoding total", integers; by activate, renew,
                                reserve, prefill_complete, release, expire; until retired. An
                                incarnation without it is not routed to.
    reservations        hash    request_id -> <inc>; by reserve, activate, renew; until
                                released or expired
    expiry              zset    request_id scored by expiry, ms, Redis clock; by reserve, activate,
                                renew, expire; until released or expired
    requests:<inc>      hash    request_id -> "prefill_tokens prefill_us blocks state attempt",
                                state one of p(refilling) d(ecoding), attempt a word that
                                distinguishes reservations of the same request; by reserve,
                                prefill_complete, activate; until released or expired
    prefills:<inc>      list    request_ids still prefilling, oldest first; by reserve, activate,
                                renew; until released or expired
    line                hash    tag, virtual time of the last turn of a request that waited;
                                <replica> -> until when its tickets are valid, ms, Redis clock; by
                                wait, turns, leave; until nobody waits, or no replica has called
                                for a second
    flows               zset    <flow> scored by the tag of its first ticket; a flow is the
                                "<priority>:<tenant>" of waiting requests; as line
    easy_flows          zset    <flow> scored by the tag of its first ticket that every worker
                                could take; as line
    waiting:<flow>      zset    "<replica>-<number> <charge> -" scored by when the request began to
                                wait, ms, Redis clock; by wait; until they leave, or none is named
                                for ten seconds
    picky:<flow>        zset    "<replica>-<number> <charge> x", of requests that not every worker
                                could take, as they exclude some or some are too small; as waiting
    sessions            hash    <session> -> "<inc> <when it last went there, ms, Redis clock>"; by
                                remember; until --session-ttl-s later, or there are too many
    metrics             stream  worker, incarnation, and the fields of ForwardPassMetrics, Speed
                                and, prefixed "gpu_", of GpuReadings as far as read; by
                                agents, each after metrics_interval_s; trimmed to about
                                METRICS_MAXLEN entries
    decisions           stream  one routed request each: see app/policy/record.py; by record;
                                trimmed

    kvroute:1:{<namespace>#<shard>}:...
    shard               hash    bucket_bits, by open_shard, for good; swept_ms, end of the last
                                pass, and stepped_ms, of the last step, by sweep
    applied             hash    <inc> -> "<seq> <nonce>" of its last batch; by open_shard, apply;
                                until swept. An incarnation that is not in it cannot publish.
    dead                set     <inc> whose entries are not swept yet; by sweep
    sweep               hash    cursor (next bucket), within (where in it, if it is large), targets
                                (<inc>, space-separated); by sweep; for one pass
    blocks:<bucket>     hash    sequence hash, 16 hex digits -> owners, "<inc><tier>..." by
                                ascending inc, tier one of d(evice) h(ost) k (disk); 16
                                successive blocks of a chain form a group and share one bucket,
                                named by the top bucket_bits of the first one's hash, in the hex
                                digits that hold them, the rest of the last digit 0; by apply,
                                sweep; until removed
    predictions         hash    slice letter -> entries of it; cutoff, the oldest slice that counts;
                                bucket_bits; cursor of prune; by predict, prune; for good
    predicted:<bucket>  hash    sequence hash -> "<inc><slice letter>...", of some routed blocks;
                                by predict, prune; until pruned
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.errors import ConfigError

NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_KEY = re.compile(
    r"kvroute:1:\{(?P<namespace>[^#}]+)(?:#(?P<shard>\d{1,9}))?\}:(?P<name>.*)", re.DOTALL
)
METRICS_MAXLEN = 4096
METRICS_INTERVAL_S = 0.1
METRICS_WORKERS = 256
"""More workers than this publish less often: every router reads all of their entries, and an entry
takes it 40 µs, and Redis 4 µs."""


def metrics_interval_s(workers: int) -> float:
    """How often each of so many workers publishes what it measures."""
    return METRICS_INTERVAL_S * max(1.0, workers / METRICS_WORKERS)


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The keys of one namespace, or, with `shard`, of one shard of its index.

    Raises ConfigError for a name that cannot be a hash tag.
    """

    namespace: str
    shard: int | None = None

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"namespace {self.namespace!r}: 1-128 letters, digits and . _ / - are allowed"
            )

    def __getitem__(self, name: str) -> str:
        """The key `name`, or for a family like `blocks:` the prefix its members share."""
        return f"kvroute:1:{{{self.tag}}}:{name}"

    @property
    def tag(self) -> str:
        return self.namespace if self.shard is None else f"{self.namespace}#{self.shard}"

    def of_shard(self, shard: int) -> Keyspace:
        return Keyspace(self.namespace, shard)

    @property
    def pattern(self) -> str:
        """A pattern by which SCAN finds all keys of the namespace, and some of others."""
        return f"kvroute:1:{{{self.namespace}[#}}]*"

    def parse(self, key: bytes) -> tuple[int | None, str] | None:
        """Shard (None: the namespace's own tag) and name of a key; None: of another namespace."""
        found = _KEY.fullmatch(key.decode(errors="replace"))
        if not found or found["namespace"] != self.namespace:
            return None
        return (int(found["shard"]) if found["shard"] else None), found["name"]
