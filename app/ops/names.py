"""Names of models, and the share of their requests that each namespace gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

from app.core.check import Check
from app.core.errors import KvrouteError, cut
from app.core.keys import Keyspace
from app.core.settings.kinds import parse_sharing
from app.core.worker_report import WorkerInfo
from app.ops import workers
from app.policy.spread import AVAILABILITY, Availability, Groups, owner_of, spread
from app.state import models, replicas
from app.state.client import RedisClient

MOST = 64
"""Namespaces that are looked at, as each takes some round trips."""
SHOWN = 5
"""Names that are listed of all that are spread alike."""


@dataclass(frozen=True, slots=True)
class Names:
    """Shares of the requests for names of models.

    weights: by name and namespace. owners: the namespace that has each name. told: routers'
    settings of shares, with a router that has each.
    """

    weights: Mapping[str, Mapping[str, float]]
    owners: Mapping[str, str]
    told: Mapping[str, str]

    def taken(self, namespace: str, infos: Iterable[WorkerInfo]) -> list[str]:
        """Returns the names under which workers of `namespace` get no requests, as `<name> is
        namespace <owner>'s (<worker>)`."""
        return [
            f"{name} is namespace {self.owners[name]}'s ({info.key})"
            for info in infos
            for name in (*info.models, *info.adapters)
            if namespace not in self.weights.get(name, {namespace: 1.0})
        ]


async def names_of(redis: RedisClient, namespace: str, infos: Iterable[WorkerInfo]) -> Names:
    """Returns the names that live workers of a namespace serve. Raises RedisUnavailable."""
    claims = await models.directory(redis)
    served = {name for info in infos for name in (*info.models, *info.adapters)}
    claims = {name: (*claims.get(name, ()), namespace) for name in sorted(served)}
    standings = {name: {namespace: Availability.SERVES} for name in claims}
    told: dict[str, str] = {}
    involved = dict.fromkeys((namespace, *chain(*claims.values())))
    for one in islice(involved, MOST):
        keyspace = Keyspace(one)
        with suppress(KvrouteError):  # as one of another version is nobody's concern here
            if one != namespace:
                for status in await workers.everyone(redis, keyspace):
                    _note(standings, one, status)
            for replica, figures in (await replicas.present(redis, keyspace)).items():
                told.setdefault(str(figures.get("namespace_weights", "")), replica)
    groups = _groups(told)
    weights = {name: spread(claims[name], standings[name], groups) for name in claims}
    owners = {name: owner_of(claims[name], standings[name]) or namespace for name in claims}
    return Names(weights, owners, told)


def _note(
    standings: dict[str, dict[str, Availability]], namespace: str, status: workers.WorkerStatus
) -> None:
    standing = AVAILABILITY.get(status.verdict.state) if status.current else None
    if status.info is None or standing is None:
        return
    for name in standings.keys() & {*status.info.models, *status.info.adapters}:
        there = standings[name]
        there[namespace] = max(there.get(namespace, standing), standing)


def _groups(told: Mapping[str, str]) -> Groups:
    for text in told:
        with suppress(ValueError):
            return parse_sharing(text)
    return ()


def check(names: Names, namespace: str, infos: Iterable[WorkerInfo]) -> Check:
    """Checks whether the workers of a namespace get requests for all that they serve."""
    about = "model names"
    if len(names.told) > 1:
        said = [f"{repr(text) if text else 'none'} ({who})" for text, who in names.told.items()]
        return Check(
            about,
            False,
            cut(f"routers have different --namespace-weights: {'; '.join(said)}", 200),
            "give all routers the same",
        )
    if taken := names.taken(namespace, infos):
        return Check(
            about,
            False,
            cut("; ".join(taken)),
            "name both namespaces in the routers' --namespace-weights, if they are to share it; "
            "else give the model another name, or stop the other workers",
        )
    return Check(about, True, cut("; ".join(_parts(names.weights)), 200))


def _parts(weights: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields names that are spread alike, as `llama, sql: old 90 %, new 10 %`."""
    alike: dict[str, list[str]] = {}
    for name, of_name in weights.items():
        total = sum(of_name.values()) or 1.0
        parts = [f"{namespace} {weight / total:.0%}" for namespace, weight in of_name.items()]
        alike.setdefault(", ".join(parts) or "nobody", []).append(name)
    for text, names in alike.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{', '.join(names[:SHOWN])}{more}: {text}"
