"""Between which workers KV may travel. Pure.

KV is bytes without a name. An engine that takes another's for its own answers with wrong text, or
fails each time: so only workers of which everything that decides is known, and equal, are paired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from app.core.worker_report import UNKNOWN, WorkerInfo


class KvGroup(NamedTuple):
    """Whose members may use each other's KV."""

    protocol: str
    fingerprint: tuple[str, ...]
    name: str
    """That operators gave it."""
    revision: str
    """Of its engines."""


def group_of(info: WorkerInfo) -> KvGroup | None:
    """None: it is in none, as it hands on nothing, or its engine does not tell what that is."""
    if not info.kv_transfer or (unknown_of(info) and not info.kv_compatible):
        return None
    return KvGroup(info.kv_transfer, info.kv_fingerprint, info.kv_compatible, info.revision)


def unknown_of(info: WorkerInfo) -> list[str]:
    """What decides, and its engine does not tell."""
    if not info.kv_fingerprint:
        return ["fingerprint"]
    return [name for name, value in _facts(info) if value == UNKNOWN]


def differences(infos: Sequence[WorkerInfo]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """What is not equal in all of them: its name, and who has which value."""
    names = dict.fromkeys(name for info in infos for name, _ in _facts(info))
    told = [(str(info.key), dict(_facts(info))) for info in infos]
    for name in names:
        values: dict[str, list[str]] = {}
        for key, facts in told:
            values.setdefault(facts.get(name, UNKNOWN), []).append(key)
        if len(values) > 1:
            yield name, values


def _facts(info: WorkerInfo) -> Iterable[tuple[str, str]]:
    told = [one.partition("=") for one in info.kv_fingerprint]
    given = [("kv-compatible", info.kv_compatible), ("revision", info.revision)]
    return [*((name, value) for name, _, value in told), *given]
