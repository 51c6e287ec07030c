"""A model, as the workers of a namespace serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from app.core.roles import Role
from app.core.types import WorkerKey
from app.core.verdicts import CALLER, LACKS
from app.core.worker_report import WorkerInfo
from app.door.errors import ModelUnavailable
from app.policy.spread import pick
from app.router.router import Router


@dataclass(frozen=True, slots=True)
class Model:
    """One name that clients may ask for, as long as the same `workers` serve it.

    others: names of the other workers of its namespace. lora_name: of the adapter which it is.
    max_tokens: of a prompt and its answer at the worker that takes most; 0: one does not say.
    """

    name: str
    router: Router
    workers: tuple[WorkerInfo, ...]
    others: frozenset[str]
    lora_name: str | None
    max_tokens: int

    @property
    def namespace(self) -> str:
        return self.router.namespace

    def failed_shares(self, path: str, caller: str) -> Mapping[WorkerKey, float]:
        """Returns the share of its tries that each worker failed lately; 1.0 if it is left alone
        for now."""
        names = LACKS + self.name, LACKS + path, CALLER + caller
        return self.router.fleet.failed_shares(*names)

    def failed(self, path: str) -> Set[WorkerKey]:
        """Returns the workers that failed that path, and have not answered there since."""
        return self.router.fleet.marked(LACKS + path)

    @property
    def base(self) -> str:
        """The name that most of its workers give first to the model that they have loaded."""
        first = Counter(worker.models[0] for worker in self.workers if worker.models)
        return max(first, key=lambda name: (first[name], name), default=self.name)


@dataclass(frozen=True, slots=True)
class ServedName:
    """One name, and its models and their weights by namespace. is_shared: there are, or will be,
    several."""

    models: Mapping[str, Model]
    weights: Mapping[str, float]
    is_shared: bool

    @property
    def first(self) -> Model:
        """The model of the namespace with the largest weight."""
        return self.models[max(self.weights, key=lambda name: self.weights[name])]

    def among(self, without: Collection[str]) -> dict[str, float]:
        """Returns the weights of namespaces that get requests and are not in `without`."""
        return {n: weight for n, weight in self.weights.items() if weight and n not in without}


def chosen(name: str, served: ServedName, without: Collection[str], point: float) -> str:
    """Returns a namespace. Raises ModelUnavailable if none gets requests for the name."""
    if weights := served.among(without):
        return pick(weights, point)
    given = ", ".join(f"{name}={weight:g}" for name, weight in served.weights.items())
    where = f"in a namespace that gets its requests (namespace_weights has {given})"
    raise ModelUnavailable(name, where)


def model_of(router: Router, name: str) -> Model:
    infos = router.fleet.infos
    serving = tuple(_serving(name, infos))
    view = router.fleet.last_view
    # What fits only into a worker that is not heard of for a moment is not too long for ever.
    unheard = _serving(name, view.lapsed.values()) if view else ()
    return Model(
        name,
        router,
        serving,
        frozenset(str(info.key) for info in infos if info not in serving),
        name if any(name in info.adapters for info in infos) else None,
        longest_context((*serving, *unheard)),
    )


def _serving(name: str, infos: Iterable[WorkerInfo]) -> Iterator[WorkerInfo]:
    return (info for info in infos if name in info.models or name in info.adapters)


def longest_context(workers: Iterable[WorkerInfo]) -> int:
    """Returns the tokens of a prompt and its answer at the worker that takes most; 0: one does not
    say. Workers that only compute prompts do not count beside others."""
    by_role: dict[bool, list[int]] = {True: [], False: []}
    for worker in workers:
        by_role[worker.role is Role.PREFILL].append(worker.max_model_len)
    lengths = by_role[False] or by_role[True]
    return 0 if 0 in lengths else max(lengths, default=0)
