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


KEY_TYPES = {
    **dict.fromkeys(
        (
            "meta workers current writers load verdicts reservations requests: fetching line "
            "sessions computing: planner agents: replicas limits: usage:"
        ).split(),
        "hash",
    ),
    **dict.fromkeys(
        ("leases versions expiry fetches flows easy_flows waiting: picky:").split(),
        "zset",
    ),
    "engines:": "string",
    "prefills:": "list",
    **dict.fromkeys(
        ("metrics decisions endings proposals history history_minutes events errors").split(),
        "stream",
    ),
}
"""Key, or prefix of a family, with the namespace's tag -> its Redis type."""
SHARD_KEY_TYPES = {
    **dict.fromkeys(
        ("shard applied sweep blocks: predictions predicted: routed:").split(),
        "hash",
    ),
    "dead": "set",
}
"""Key, or prefix of a family, of each shard of the index -> its Redis type."""


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
