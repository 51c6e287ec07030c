"""Every Redis key: its name, type, members, writers and lifetime. Nothing else spells a key.

A namespace is one model, block size and hash settings. Its keys share a hash tag, except those of
the index, which are in shards, each with its own tag. A script touches the keys of only one tag, so
a namespace may be spread over a Redis Cluster. The names are a public contract; the `1` in them is
its version, and DATA_VERSION that of what they hold. Fields and values are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from app.core.errors import ConfigError
from app.core.loads import LOAD_FIELDS

NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_KEY = re.compile(
    r"kvroute:1:\{(?P<namespace>[^#}]+)(?:#(?P<shard>\d{1,9}))?\}:(?P<name>.*)", re.DOTALL
)
DATA_VERSION = 5
"""Of what keys hold, as `meta` records it. Parts of other versions write there what this one cannot
read, or reads wrongly: raise it with the first such change after a release. Version 1
recorded none."""
MODELS = f"kvroute:1:models:{DATA_VERSION}"
"""The one key outside all namespaces: a hash, model or adapter -> `<namespace> <when it was last
announced there, seconds since 1970 by the Redis clock>` of each namespace that claims it, the first
to do so first. Each version of the data model has its own: routers could not use the workers of
another one, and its names are no business of theirs."""
METRICS_MAXLEN = 4096
METRICS_INTERVAL_S = 0.1
METRICS_WORKERS = 256
"""More workers than this publish less often: an entry takes each router that reads it 40 µs, and
Redis 4 µs."""


def metrics_interval_s(workers: int) -> float:
    """How often each of so many workers publishes what it measures."""
    return METRICS_INTERVAL_S * max(1.0, workers / METRICS_WORKERS)


@dataclass(frozen=True, slots=True)
class Key:
    """A key, or a family of keys whose names end in a member's.

    writers: operations, mostly scripts, without those that only remove. in_shard: each shard of the
    index has one.
    """

    name: str
    type: str
    holds: str
    writers: tuple[str, ...]
    until: str
    in_shard: bool = False

    @property
    def prefix(self) -> str:
        """The name or, of a family, what the names of all members begin with."""
        return self.name.partition("<")[0]


KEYSPACE = (
    Key(
        "meta",
        "hash",
        "`version` of the data model, `block_size`, `shards`, `incarnations` (last number given),"
        " `workers_ms` (when a worker was last registered or its entry restored), `rounds` (of"
        " reservations so far, in millionths: each adds 1 / workers)",
        ("register", "renew", "reserve"),
        "for good",
    ),
    Key(
        "workers",
        "hash",
        "`<inc>` → JSON: worker, address, block size, capacity, lease, version of the data model",
        ("register", "renew"),
        "retired",
    ),
    Key(
        "current",
        "hash",
        "`<worker_id>:<dp_rank>` → the `<inc>` that is routed to",
        ("activate", "renew"),
        "retired",
    ),
    Key(
        "leases",
        "zset",
        "`<inc>` by expiry, ms, Redis clock",
        ("register", "renew", "suspend", "activate", "drain", "vouch", "fetched_late"),
        "retired",
    ),
    Key(
        "writers",
        "hash",
        "`<inc>` → nonce of the process that acts as that incarnation",
        ("register",),
        "retired",
    ),
    Key(
        "load",
        "hash",
        f"`<inc>` → `{' '.join(LOAD_FIELDS)}`",
        (
            *("activate", "renew", "reserve", "extend", "prefill_complete", "release", "expire"),
            *("retire", "retire_lapsed"),
        ),
        "retired",
    ),
    Key(
        "versions",
        "zset",
        "`<inc>` by version: of the last change of its load or registration. Routers ask for what"
        " changed since the last version that they know",
        (
            *("register", "activate", "renew", "reserve", "extend", "prefill_complete"),
            *("release", "expire", "retire", "retire_lapsed"),
        ),
        "retired",
    ),
    Key(
        "verdicts",
        "hash",
        "`<worker_id>:<dp_rank>` → JSON: what speaks against the worker, by name, each with "
        "`since_ms`, `until_ms`, `cause` and `witnesses` (`lua/lib/verdict.lua`): `tainted`, "
        "`draining`, `ill`, `away`, `failed`, `lacks <model or path>`, `caller <who>`. "
        "A worker that serves has no field",
        (
            *("suspend", "answers_again", "release", "prefill_complete", "renew", "activate"),
            *("drain", "vouch", "fetched_late", "retire", "retire_lapsed"),
        ),
        "answered, undone, begun anew or retired; then for a day if it drains or is tainted",
    ),
    Key(
        "engines:<engine>",
        "string",
        "the `<worker_id>:<dp_rank>` that an engine is: under another one it gets no requests",
        ("renew",),
        "not renewed for a minute",
    ),
    Key(
        "reservations",
        "hash",
        "reservation → `<inc>`. A reservation is named like its request; if another request had "
        "that id, `<request id>~<tag>`",
        ("reserve", "extend", "activate"),
        "released or expired",
    ),
    Key(
        "expiry",
        "zset",
        "reservation by expiry, ms, Redis clock; while a door carries the request, 10 s after the "
        "door last said so",
        ("reserve", "extend", "prefill_complete"),
        "released or expired",
    ),
    Key(
        "requests:<inc>",
        "hash",
        "reservation → `prefill_tokens prefill_us blocks state attempt`; state `p` "
        "prefilling, `d` decoding, `h` holding blocks to be fetched; the source of a reservation "
        "has ` source` behind its name, and that one an `s` at the end; attempt "
        "`<began, ms>-<tag>[.<nonce>]` says when the try began and tells it from others with the "
        "same request id",
        ("reserve", "extend", "prefill_complete", "activate"),
        "released or expired",
    ),
    Key(
        "prefills:<inc>",
        "list",
        "reservations still prefilling, oldest first",
        ("reserve", "extend", "activate", "renew"),
        "released or expired",
    ),
    Key(
        "fetches",
        "zset",
        "attempt of a request with a source that keeps its KV for a time, by until when, ms, Redis "
        "clock: what its target may begin to fetch later may be other prompts' KV",
        ("reserve", "prefill_complete"),
        "fetched by then, an answer shows that nothing came too late, or ten minutes later",
    ),
    Key(
        "fetching",
        "hash",
        "the same attempt → `<source> <target> <life of each engine> <leases that had ended>`",
        ("reserve",),
        "as `fetches`",
    ),
    Key(
        "line",
        "hash",
        "`tag`, the virtual time of the last turn of a request that waited; `<replica>`"
        " → until when its tickets hold",
        ("wait", "turns", "leave"),
        "no request waits, or no replica calls for a second",
    ),
    Key(
        "flows",
        "zset",
        "`<priority>:<tenant>` of requests that wait, by the tag of the first request",
        ("wait", "turns", "leave"),
        "as `line`",
    ),
    Key(
        "easy_flows",
        "zset",
        "the same, by the tag of the first request that every worker could take",
        ("wait", "turns", "leave"),
        "as `line`",
    ),
    Key(
        "waiting:<flow>",
        "zset",
        "`<replica>-<number> <charge> -` by the time since which the request waits, ms,"
        " Redis clock",
        ("wait",),
        "they leave, or none is named for ten seconds",
    ),
    Key(
        "picky:<flow>",
        "zset",
        "`<replica>-<number> <charge> x`, likewise, for requests that exclude workers, "
        "or for which some workers are too small",
        ("wait",),
        "as `waiting:`",
    ),
    Key(
        "sessions",
        "hash",
        "session → `<inc> <when, ms>`: where it last went, and when",
        ("remember",),
        "600 s later, or there are too many",
    ),
    Key(
        "metrics",
        "stream",
        "worker, incarnation, measurements and, as `gpu_...`, its GPU's readings; every"
        " 100 ms, less often with more than 256 workers",
        ("agents",),
        "trimmed",
    ),
    Key(
        "decisions",
        "stream",
        "one entry per routed request, of one field `decision` in JSON: the worker it went to, "
        "its overlap there, which worker had the longest overlap and why that one was not chosen, "
        "and what came of it if it ended soon (`app/policy/record.py`)",
        ("record",),
        "trimmed",
    ),
    Key(
        "endings",
        "stream",
        "one entry per routed request that ended after its decision was written: its output "
        "tokens, and the time to its first token",
        ("record",),
        "trimmed",
    ),
    Key(
        "computing:<hash>",
        "hash",
        "attempt → `<inc> <until, ms, Redis clock> <hash>...`: the worker that computes a long "
        "prompt in flight, and some blocks of it, from the one that the key names on",
        ("compute",),
        "its first token or its end is reported, or `--prediction-ttl-s` after the last",
    ),
    Key(
        "planner",
        "hash",
        "`holder`, `token` and `until_ms` (by the Redis clock) of the planner that leads; its "
        "`state`, JSON for the next one; `desired`, `size`, `reason` and `victim` of the last "
        "proposal, `desired_prefill` and `desired_decode` where workers have roles; `wakes`: 1 if "
        "a worker is started for requests that find none; `values`, JSON: worker → seconds of "
        "prefill that losing it would cost",
        ("lead", "propose"),
        "for good",
    ),
    Key(
        "agents:<source>",
        "hash",
        "`agent <process>` → until when it holds what it has claimed, ms, Redis clock; `engine "
        "<engine>` → the process that is its agent, of agents that discover engines",
        ("claim",),
        "a day after the last process called",
    ),
    Key(
        "proposals",
        "stream",
        "`proposal`, JSON: what a planner proposed, and why (`app/planner/rules/state.py`)",
        ("propose",),
        "trimmed",
    ),
    Key(
        "replicas",
        "hash",
        "`<replica>` → `<when it said so, ms> <JSON>`: what a router replica measured lately "
        "(`app/ops/figures.py`)",
        ("beat",),
        "15 s after its last word",
    ),
    Key(
        "history",
        "stream",
        "`sample`, JSON: the figures of all replicas and each worker's queue, every 5 s; the id of "
        "an entry is the time of its step",
        ("sample",),
        "trimmed: an hour",
    ),
    Key(
        "history_minutes",
        "stream",
        "the same without queues: the mean of each minute",
        ("sample",),
        "trimmed: a day",
    ),
    Key(
        "events",
        "stream",
        "`kind`, `subject` and `text`: workers, replicas and Redis that come and go, drains, and "
        "what planners propose",
        (
            *("activate", "renew", "retire", "retire_lapsed", "suspend", "fetched_late"),
            *("drain", "propose", "beat", "record", "vouch"),
        ),
        "trimmed: about a thousand",
    ),
    Key(
        "errors",
        "stream",
        "`model`, `worker`, `cause`, `words`, `request_id` and `count`: what requests failed of "
        "lately, in the engine's own words if it said any; never a prompt",
        ("record",),
        "trimmed: about a thousand",
    ),
    Key(
        "limits:<key>",
        "hash",
        "of each limit, `requests`, `tokens` and `uncached` → `<what may be used at once> <when, "
        "ms, Redis clock>`, negative if it is overdrawn; `cached_share` of its prompts lately, in "
        "thousandths; `held <replica>` → `<requests under way there> <until, ms> <number of the "
        "call>`",
        ("admit",),
        "two days after its last request",
    ),
    Key(
        "usage:<hour>",
        "hash",
        "`<key> <tenant> <model>` → `requests failed refused prompt_tokens cached_tokens "
        "output_tokens waited_ms by_router` of the hour, counted since 1970, `-` for none; a "
        "replica's process → the number of its last call",
        ("count",),
        "`--usage-days` after its first request",
    ),
    Key(
        "shard",
        "hash",
        "`bucket_bits`; `swept_ms`, when the last pass ended; `stepped_ms`, when the "
        "last step of the sweep was made",
        ("open_shard", "sweep"),
        "for good",
        in_shard=True,
    ),
    Key(
        "applied",
        "hash",
        "`<inc>` → `<seq> <nonce>` of its last batch; an incarnation that is not in it "
        "cannot publish",
        ("open_shard", "apply"),
        "swept",
        in_shard=True,
    ),
    Key(
        "dead",
        "set",
        "every `<inc>` whose entries are not swept yet",
        ("sweep",),
        "swept",
        in_shard=True,
    ),
    Key(
        "sweep",
        "hash",
        "`cursor` (next bucket), `within` (position in that bucket, if it is large), "
        "`targets` (`<inc>`, space-separated)",
        ("sweep",),
        "the end of the pass",
        in_shard=True,
    ),
    Key(
        "blocks:<bucket>",
        "hash",
        "sequence hash, 16 hex digits → where engines go on, owners",
        ("apply", "sweep"),
        "no owner is left",
        in_shard=True,
    ),
    Key(
        "predictions",
        "hash",
        "slice letter → number of its entries; `cutoff`, the oldest slice that counts; "
        "`bucket_bits`; `cursor` of prune",
        ("predict", "confirm_predicted", "withdraw_predicted", "prune"),
        "for good",
        in_shard=True,
    ),
    Key(
        "predicted:<bucket>",
        "hash",
        "sequence hash → `<inc><slice letter>...`, for some of the blocks that were routed; an "
        "upper-case letter until the first token of a request with them is out",
        ("predict", "confirm_predicted", "withdraw_predicted", "prune"),
        "pruned",
        in_shard=True,
    ),
    Key(
        "routed:<attempt>",
        "hash",
        "`inc`, `blocks`, the hashes predicted for the request, and `added`, those among them that"
        " were not predicted before",
        ("predict",),
        "its first token or its end is reported, or the reservation would have ended",
        in_shard=True,
    ),
)
"""`<inc>` is the number of an incarnation."""


def keyspace_table() -> str:
    """KEYSPACE in Markdown, as in lua/README.md."""
    lines = ["| key | type | fields and values | written by | until |", "|---|---|---|---|---|"]
    lines += [
        f"| `{key.name}` | {key.type} | {key.holds} | {', '.join(key.writers)} | {key.until} |"
        for key in KEYSPACE
    ]
    return "\n".join(lines)


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
        return _of_shard(self.namespace, shard)

    @property
    def pattern(self) -> str:
        """A pattern by which SCAN finds all keys of the namespace, and some of others."""
        return f"kvroute:1:{{{self.namespace}[#}}]*"

    def parse(self, key: bytes) -> tuple[int | None, str] | None:
        """Shard (None: the namespace's own tag) and name of a key; None: of another namespace."""
        match = _KEY.fullmatch(key.decode(errors="replace"))
        if not match or match["namespace"] != self.namespace:
            return None
        return (int(match["shard"]) if match["shard"] else None), match["name"]


@lru_cache(maxsize=4096)
def _of_shard(namespace: str, shard: int) -> Keyspace:
    return Keyspace(namespace, shard)
