"""Names of models that workers announce, and the namespaces that claim each: a directory that
outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.core.keys import MODELS, NAMESPACE, Keyspace
from app.core.limits import MAX_MODELS, MAX_NAMESPACES
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, command

TIMEOUT_S = 1.0
GONE_S = 600
"""Time after a name's last announcement for which a namespace's claim comes before later ones:
longer than a restart of all its workers."""
KEPT_S = 24 * 3600
"""Time for which a name is known that nobody announces any more."""
PAGE = 1000

Claims = Mapping[str, tuple[str, ...]]
"""Name -> the namespaces that claim it, the first to do so first."""


def announce(namespace: str, names: Iterable[str]) -> Call[dict[str, str]]:
    """Announces that workers of `namespace` serve models and adapters of these names. Returns those
    that another namespace claimed first, and which; "": the claim is not kept, as MAX_MODELS names
    are known already, or MAX_NAMESPACES namespaces claim that one."""

    def parse(reply: list[bytes]) -> dict[str, str]:
        texts = [text.decode() for text in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    args = (namespace, GONE_S, KEPT_S, MAX_MODELS, MAX_NAMESPACES, *names)
    return Call("announce", (MODELS,), args, parse)


async def directory(redis: RedisClient) -> dict[str, tuple[str, ...]]:
    """Returns the claims on all names. Raises RedisUnavailable."""
    names: dict[str, tuple[str, ...]] = {}
    cursor = -1
    while cursor != 0 and len(names) < MAX_MODELS:
        async with deadline(TIMEOUT_S):
            reply: Any = await redis.hscan(MODELS, max(cursor, 0), count=PAGE)
        cursor, page = reply
        for name, entry in page.items():
            if namespaces := claims_in(entry):
                names[name.decode(errors="replace")] = namespaces
    return names


def claims_in(entry: bytes) -> tuple[str, ...]:
    """Returns the namespaces in a name's entry, without what is none."""
    words = entry.decode(errors="replace").split(" ")
    return tuple(dict.fromkeys(filter(NAMESPACE.fullmatch, words[::2])))[:MAX_NAMESPACES]


def exists(namespace: str) -> Call[bool]:
    return command("exists", "EXISTS", Keyspace(namespace)["meta"], parse=bool)
