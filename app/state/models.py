"""The names of models that workers announce, and which namespace has each: a directory that
outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.core.keys import MODELS, NAMESPACE, Keyspace
from app.core.worker_report import WorkerInfo
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, command

TIMEOUT_S = 1.0
GONE_S = 600
"""How long a namespace has a name after it was last announced there: longer than a restart of all
its workers takes."""
KEPT_S = 24 * 3600
"""How long a name is known that nobody announces any more."""
MOST = 10_000
"""Names that are kept, and read: anybody may write there."""
PAGE = 1000


def announce(namespace: str, names: Iterable[str]) -> Call[dict[str, str]]:
    """Say that workers of `namespace` serve models and adapters of these names.

    Returns which of them are not its own, and the namespace that has each; "": none, as MOST names
    are known already.
    """

    def parse(reply: list[bytes]) -> dict[str, str]:
        texts = [text.decode() for text in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    args = (namespace, GONE_S, KEPT_S, MOST, *names)
    return Call("announce", (MODELS,), args, parse)


async def directory(redis: RedisClient) -> dict[str, str]:
    """Name -> the namespace that has it. Raises RedisUnavailable."""
    found: dict[str, str] = {}
    cursor = -1
    while cursor != 0 and len(found) < MOST:
        async with deadline(TIMEOUT_S):
            reply: Any = await redis.hscan(MODELS, max(cursor, 0), count=PAGE)
        cursor, page = reply
        for name, entry in page.items():
            namespace = entry.partition(b" ")[0].decode(errors="replace")
            if NAMESPACE.fullmatch(namespace):
                found[name.decode(errors="replace")] = namespace
    return found


def taken(holders: Mapping[str, str], namespace: str, infos: Iterable[WorkerInfo]) -> list[str]:
    """Names under which workers of `namespace` get no requests, as another one has them.

    holders: as `directory` returns them. Each: `<name> is namespace <holder>'s (<worker>)`.
    """
    return [
        f"{name} is namespace {holder}'s ({info.key})"
        for info in infos
        for name in (*info.models, *info.adapters)
        if (holder := holders.get(name, namespace)) != namespace
    ]


def exists(namespace: str) -> Call[bool]:
    """Whether a worker has registered in `namespace`."""
    return command("exists", "EXISTS", Keyspace(namespace)["meta"], parse=bool)
