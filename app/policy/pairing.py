"""Workers between which KV may travel.

KV is bytes without a name, and an engine that takes another's for its own answers with wrong text:
so only workers of which everything that decides is known, and equal, are paired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.core.roles import Role
from app.core.worker_report import UNKNOWN, WorkerInfo

Mask = NDArray[np.bool_]
OWN_TRANSFER = "kvroute"
"""Protocol between our own engines."""
TOGETHER = "sglang"
"""Protocol of two engines that get a request at once: neither answers one alone."""


class KvGroup(NamedTuple):
    """A set of workers that may use each other's KV. name: given by operators. revision: of its
    engines."""

    protocol: str
    fingerprint: tuple[str, ...]
    name: str
    revision: str


def group_of(info: WorkerInfo) -> KvGroup | None:
    """Returns a worker's group; None: it hands on nothing, or its engine does not tell what that
    is."""
    if not info.kv_transfer or (unknown_of(info) and not info.kv_compatible):
        return None
    return KvGroup(info.kv_transfer, info.kv_fingerprint, info.kv_compatible, info.revision)


def unknown_of(info: WorkerInfo) -> list[str]:
    """Returns the names of what decides and the worker's engine does not tell."""
    if not info.kv_fingerprint:
        return ["fingerprint"]
    return [name for name, value in _facts(info) if value == UNKNOWN]


def differences(infos: Sequence[WorkerInfo]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yields what is not equal in all workers: its name, and which workers have which value."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """Roles of the workers, (workers,) each.

    prefill, decode: those that do nothing else. groups: KV can travel within each.
    fetches: whether a target may fetch a prefix, and compute the rest; the source then hands it on
    without a request in its queue. (A vLLM that is told of fewer tokens than its prompt has dies.)
    together: whether none answers a request alone.
    """

    prefill: Mask
    decode: Mask
    groups: tuple[Mask, ...]
    fetches: bool
    together: bool = False
    targets: Mask = field(init=False)
    sources: Mask = field(init=False)
    receivers: Mask = field(init=False)

    def __post_init__(self) -> None:
        # Once for all decisions among the same workers.
        object.__setattr__(self, "targets", ~self.prefill)
        transfers = np.logical_or.reduce((np.zeros_like(self.prefill), *self.groups))
        object.__setattr__(self, "sources", transfers & ~self.decode)
        object.__setattr__(self, "receivers", transfers & ~self.prefill)


def roles_of(infos: Sequence[WorkerInfo]) -> Roles | None:
    """Returns the roles; None: every worker does both, and no KV can travel between any two.

    KV travels between workers of one protocol, the first that any of them names, and within groups
    of `group_of`.
    """
    protocol = next((info.kv_transfer for info in infos if info.kv_transfer), "")
    roles = [info.role for info in infos]
    groups = [group_of(info) for info in infos]
    number = Counter(group for group in groups if group is not None and group.protocol == protocol)
    pairing = [group for group, members in number.items() if members > 1]
    if set(roles) <= {Role.BOTH} and not pairing:
        return None
    return Roles(
        prefill=np.array([role is Role.PREFILL for role in roles]),
        decode=np.array([role is Role.DECODE for role in roles]),
        groups=tuple(np.array([one == group for one in groups]) for group in pairing),
        fetches=protocol == OWN_TRANSFER,
        together=protocol == TOGETHER,
    )
