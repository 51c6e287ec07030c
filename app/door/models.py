"""The models behind this replica: which names clients may ask for, and who serves each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from app.core.errors import (
    InvalidRequest,
    NoWorkers,
    cut,
)
from app.core.roles import Role
from app.core.types import WorkerKey
from app.core.verdicts import CALLER, LACKS
from app.core.worker_report import WorkerInfo
from app.door.errors import ModelUnavailable, UnknownModel
from app.door.session_places import SessionPlaces, point_of
from app.http.supervisor import supervised
from app.policy.decision import RouteRequest
from app.policy.spread import Availability, Groups, owner_of, pick, spread, standings
from app.router.router import Router
from app.router.routers import Routers
from app.state.models import Claims

NAMED = 10
"""Models that a message names at most."""
VIEW_INTERVAL_S = 0.25
FIRST_LOOKS, FIRST_LOOK_EVERY_S = 100, 0.02
"""How long a request waits at most for what a replica that has just started is yet to learn."""


@dataclass(frozen=True, slots=True)
class Model:
    """One name that clients may ask for, as long as the same workers serve it.

    workers: those that do. others: names of the workers of its namespace that do not. lora_name:
    that of the adapter which it is; None: it is none. max_tokens: that a prompt and its answer may
    have together at the worker which takes most; 0: one does not say.
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
        """What of its tries each worker failed lately; 1.0: it is left alone for now."""
        names = LACKS + self.name, LACKS + path, CALLER + caller
        return self.router.fleet.failed_shares(*names)

    def failed(self, path: str) -> Set[WorkerKey]:
        """The workers that failed that path, and have not answered there since."""
        return self.router.fleet.marked(LACKS + path)

    @property
    def base(self) -> str:
        """The name that most of its workers give first to the model that they have loaded."""
        first = Counter(worker.models[0] for worker in self.workers if worker.models)
        return max(first, key=lambda name: (first[name], name), default=self.name)


@dataclass(frozen=True, slots=True)
class ServedName:
    """One name, and who answers for it. models: by namespace, and weights: of each. is_shared:
    whether there is, or will be, more than one."""

    models: Mapping[str, Model]
    weights: Mapping[str, float]
    is_shared: bool

    @property
    def first(self) -> Model:
        """Of the namespace with the largest weight."""
        return self.models[max(self.weights, key=lambda name: self.weights[name])]

    def among(self, without: Collection[str]) -> dict[str, float]:
        """The weights of those namespaces alone that are not in `without`, and get some."""
        return {n: weight for n, weight in self.weights.items() if weight and n not in without}


class Models:
    """Follows what workers announce, while `run` runs.

    aliases: other names for models. groups: namespaces that share their names.
    """

    def __init__(
        self,
        routers: Routers,
        aliases: Mapping[str, str],
        groups: Groups,
    ) -> None:
        self.aliases = aliases
        self.groups = groups
        self._routers = routers
        self._served: dict[str, ServedName] = {}
        self._sleeping: dict[str, Router] = {}
        """Those that have no live worker, and who starts one for a request."""
        self._owners: dict[str, str] = {}
        """Name -> the namespace that it belongs to, of all names that have workers."""
        self._claims: Claims = {}
        self._known = set[str]()
        """All names that the directory has, and those that workers had since it has changed."""
        self._seen: object = None
        """What all that was made of."""
        self._sessions = SessionPlaces(routers)

    def adopt(self, aliases: Mapping[str, str], groups: Groups) -> None:
        """Go by these from now on."""
        self.aliases, self.groups = aliases, groups
        self._look()

    async def run(self) -> None:
        """Run until cancelled."""
        failures = self._routers.own.telemetry.task_failures
        await supervised("models", self._follow_workers, failures)

    def __iter__(self) -> Iterator[Model]:
        """Those with a live worker, by name; of each the one that gets the most requests."""
        self._look()
        return (self._served[name].first for name in sorted(self._served))

    async def until_known(self) -> None:
        """Returns at once, but for the first moment after a start, when models are not known yet:
        balancers send requests as soon as something listens."""
        for _ in range(FIRST_LOOKS):
            if self._routers.has_looked:
                return
            await asyncio.sleep(FIRST_LOOK_EVERY_S)

    def sleeping(self) -> list[str]:
        """Names of those that have no live worker, and that a request wakes."""
        self._look()
        return sorted(self._sleeping)

    def named(self, name: object) -> tuple[str, ServedName]:
        """The name behind a name or alias, and who answers for it; None, "": the only one. Raises
        InvalidRequest if there is another; UnknownModel; ModelUnavailable if no worker of it is
        alive."""
        if name is None or name == "":
            name = self._only()
        if not isinstance(name, str):
            raise UnknownModel(name)
        alias = name if name in self.aliases else ""
        name = self.aliases.get(name, name)
        for look_again in (True, False):
            if name in self._served:
                return name, self._served[name]
            if look_again:
                self._look()
        if name in self._known:
            raise ModelUnavailable(name)
        raise UnknownModel(name, alias)

    def find(self, asked_for: object, without: Collection[str] = ()) -> Model:
        """That of a name or alias; None: the only one. Any of those that serve it, by weight, but
        not of the namespaces in `without`. Raises as `named`."""
        name, served = self.named(asked_for)
        return served.models[self._chosen(name, served, without, random.random())]

    async def find_for(
        self, asked_for: object, session: str, without: Collection[str] = ()
    ) -> Model:
        """As `find`, but where a session has begun it stays, as long as there are workers.
        session: "": it is of none."""
        if not session:
            return self.find(asked_for, without)
        name, served = self.named(asked_for)
        is_alone = len(served.models) == 1
        place = None if is_alone else await self._sessions.find(session, served.models)
        if place is None or place in without:
            place = self._chosen(name, served, without, point_of(session))
        self._sessions.note(session, place)
        return served.models[place]

    def has_other(self, model: Model, without: Collection[str]) -> bool:
        """Whether a namespace that is not in `without` serves the name of a model as well."""
        self._look()
        served = self._served.get(model.name)
        return bool(served and served.among(without))

    def is_shared(self, model: Model) -> bool:
        """Whether other namespaces share its name."""
        served = self._served.get(model.name)
        return served is not None and served.is_shared

    def _chosen(self, name: str, served: ServedName, without: Collection[str], point: float) -> str:
        if not (weights := served.among(without)):
            raise ModelUnavailable(name, self._why_not(served))
        return pick(weights, point)

    def _why_not(self, served: ServedName) -> str:
        given = ", ".join(f"{name}={weight:g}" for name, weight in served.weights.items())
        return f"in a namespace that gets its requests (namespace_weights has {given})"

    async def wake(self, error: ModelUnavailable, asks: RouteRequest) -> None:
        """Wait, in the line as that request would, for a worker of that model where a planner
        starts one. Raises `error` if none comes, and AllWorkersBusy if too many wait."""
        router = self._sleeping.get(error.model)
        if router is None or not router.fleet.sleeps:
            raise error
        try:
            await router.wake(asks)
        except NoWorkers:
            raise error from None

    def answers_any(self) -> bool:
        """Whether requests for any name are answered; if workers name no models, there are none
        to be asked for."""
        self._look()
        is_answered = any(served.among(()) for served in self._served.values())
        return is_answered or bool(self._sleeping) or not self._owners

    def remarks(self) -> list[str]:
        """Of what the settings say, and workers announce, that which has no effect."""
        self._look()
        said = []
        for alias, name in self.aliases.items():
            if name not in self._served and name not in self._sleeping:
                what = "no live worker serves" if name in self._known else "nobody has"
                said.append(f"model_alias: {alias}={name}: {what} a model of that name")
        infos = {name: router.fleet.infos for name, router in self._routers.by_namespace.items()}
        for name, weight in ((n, w) for group in self.groups for n, w in group.items()):
            if not infos.get(name):
                said.append(
                    f"namespace_weights: {name}={weight:g}: no worker is alive in that namespace"
                )
        left_out: dict[tuple[str, str], list[str]] = {}
        for namespace, workers in infos.items():
            served = {name for info in workers for name in (*info.models, *info.adapters)}
            for name in sorted(served & self._owners.keys()):
                if namespace not in self._weights_of(name):
                    left_out.setdefault((namespace, self._owners[name]), []).append(name)
        for (namespace, owner), names in left_out.items():
            said.append(
                f"models: {cut(', '.join(names))}: none of its requests go to namespace "
                f"{namespace}, as {owner} claimed it first, and namespace_weights has no group of "
                "both"
            )
        return said

    def _weights_of(self, name: str) -> Mapping[str, float]:
        owner = self._owners[name]
        return next((group for group in self.groups if owner in group), {owner: 1.0})

    def shares(self) -> dict[str, dict[str, float]]:
        """Name -> namespace -> the weight by which it gets requests, of those that have workers."""
        self._look()
        return {name: dict(served.weights) for name, served in sorted(self._served.items())}

    def _only(self) -> str:
        self._look()
        if len(self._known) != 1:
            some = ", ".join(sorted(self._known)[:NAMED]) or "none yet"
            raise InvalidRequest("model", f"is missing; there is {cut(some)}")
        return next(iter(self._known))

    async def _follow_workers(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(VIEW_INTERVAL_S)

    def _look(self) -> None:
        """Learn who serves what, if that has changed."""
        by_namespace, claims = self._routers.by_namespace, self._routers.claims
        states = {name: _state(router) for name, router in by_namespace.items()}
        if (seen := (states, claims, self.groups)) == self._seen:
            return
        self._seen = seen
        if claims is not self._claims:
            self._claims, self._known = claims, {*claims}
        everywhere: dict[str, dict[str, Availability]] = {}
        for namespace, router in by_namespace.items():
            for name, standing in _standings(router).items():
                everywhere.setdefault(name, {})[namespace] = standing
        for name, namespaces in claims.items():
            for namespace in namespaces:
                if namespace in by_namespace and by_namespace[namespace].fleet.sleeps:
                    everywhere.setdefault(name, {}).setdefault(namespace, Availability.SLEEPS)
        self._known |= everywhere.keys()
        self._served, self._sleeping, self._owners = {}, {}, {}
        for name, standing_of in everywhere.items():
            # Its workers may be there before the directory is read again.
            order = [*claims.get(name, ()), *standing_of]
            self._owners[name] = owner_of(order, standing_of) or ""
            weights = spread(order, standing_of, self.groups)
            there = {n: w for n, w in weights.items() if standing_of[n] is not Availability.SLEEPS}
            if there:
                models = {n: _model(by_namespace[n], name) for n in there}
                is_shared = len(self._weights_of(name)) > 1
                self._served[name] = ServedName(models, there, is_shared)
            elif weights:
                self._sleeping[name] = by_namespace[next(iter(weights))]


def _state(router: Router) -> object:
    """Equal as long as nothing that matters here changes."""
    view, fleet = router.fleet.last_view, router.fleet
    if view is None:
        return fleet.sleeps
    paused = [(info, view.verdict(inc).state) for inc, info in view.paused.items()]
    lapsed = [*view.lapsed.values()]
    return view.infos, paused, lapsed, fleet.is_missing, fleet.sleeps


def _standings(router: Router) -> dict[str, Availability]:
    view = router.fleet.last_view
    by_name = standings(view) if view is not None else {}
    return dict.fromkeys(by_name, Availability.LEAVES) if router.fleet.is_missing else by_name


def _model(router: Router, name: str) -> Model:
    """Of a namespace in which some worker serves that name."""
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
    """Tokens that the one which takes most takes of a prompt and its answer; 0: one does not say.
    What only computes prompts for others does not count beside those."""
    by_role: dict[bool, list[int]] = {True: [], False: []}
    for worker in workers:
        by_role[worker.role is Role.PREFILL].append(worker.max_model_len)
    lengths = by_role[False] or by_role[True]
    return 0 if 0 in lengths else max(lengths, default=0)
