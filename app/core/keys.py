"""Names and types of all Redis keys; lua/README.md says what they hold. Nothing else spells a key.

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

NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_KEY = re.compile(
    r"kvroute:1:\{(?P<namespace>[^#}]+)(?:#(?P<shard>\d{1,9}))?\}:(?P<name>.*)", re.DOTALL
)
DATA_VERSION = 5
"""Version of what keys hold, recorded in `meta`. Raise it with the first change after a release
that other versions would read wrongly. Version 1 recorded none."""
MODELS = f"kvroute:1:models:{DATA_VERSION}"
"""The one key outside all namespaces: a hash, model or adapter -> `<namespace> <last announced, s>`
of each namespace that claims the name, the first to do so first. Each data version has its own."""
METRICS_MAXLEN = 4096
METRICS_INTERVAL_S = 0.1
METRICS_WORKERS = 256
"""Workers up to which all publish every METRICS_INTERVAL_S: reading an entry takes each router 40
µs, and Redis 4 µs."""


def metrics_interval_s(workers: int) -> float:
    """Returns the seconds between two of a worker's reports, if there are so many workers."""
    return METRICS_INTERVAL_S * max(1.0, workers / METRICS_WORKERS)


KEY_TYPES = {
    "meta": "hash",
    "workers": "hash",
    "current": "hash",
    "leases": "zset",
    "writers": "hash",
    "load": "hash",
    "versions": "zset",
    "verdicts": "hash",
    "engines:": "string",
    "reservations": "hash",
    "expiry": "zset",
    "requests:": "hash",
    "prefills:": "list",
    "fetches": "zset",
    "fetching": "hash",
    "line": "hash",
    "flows": "zset",
    "easy_flows": "zset",
    "waiting:": "zset",
    "picky:": "zset",
    "sessions": "hash",
    "metrics": "stream",
    "decisions": "stream",
    "endings": "stream",
    "computing:": "hash",
    "planner": "hash",
    "agents:": "hash",
    "proposals": "stream",
    "replicas": "hash",
    "history": "stream",
    "history_minutes": "stream",
    "events": "stream",
    "errors": "stream",
    "limits:": "hash",
    "usage:": "hash",
}
"""Key, or prefix of a family, under the namespace's tag -> Redis type."""
SHARD_KEY_TYPES = {
    "shard": "hash",
    "applied": "hash",
    "dead": "set",
    "sweep": "hash",
    "blocks:": "hash",
    "predictions": "hash",
    "predicted:": "hash",
    "routed:": "hash",
}


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Keys of one namespace, or, with `shard`, of one shard of its index. Raises ConfigError for a
    name that cannot be a hash tag."""

    namespace: str
    shard: int | None = None

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"namespace {self.namespace!r}: 1-128 letters, digits and . _ / - are allowed"
            )

    def __getitem__(self, name: str) -> str:
        """Returns the key `name`, or for a family like `blocks:` the prefix its members share."""
        return f"kvroute:1:{{{self.tag}}}:{name}"

    @property
    def tag(self) -> str:
        return self.namespace if self.shard is None else f"{self.namespace}#{self.shard}"

    def of_shard(self, shard: int) -> Keyspace:
        return _of_shard(self.namespace, shard)

    @property
    def pattern(self) -> str:
        """Pattern by which SCAN finds all keys of the namespace, and some of others."""
        return f"kvroute:1:{{{self.namespace}[#}}]*"

    def parse(self, key: bytes) -> tuple[int | None, str] | None:
        """Returns shard (None: the namespace's own tag) and name of a key; None: of another
        namespace."""
        match = _KEY.fullmatch(key.decode(errors="replace"))
        if not match or match["namespace"] != self.namespace:
            return None
        return (int(match["shard"]) if match["shard"] else None), match["name"]


@lru_cache(maxsize=4096)
def _of_shard(namespace: str, shard: int) -> Keyspace:
    return Keyspace(namespace, shard)
