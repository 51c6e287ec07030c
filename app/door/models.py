"""Models behind a replica: names that clients may ask for, and the workers that serve each."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

from app.core.errors import InvalidRequest, NoWorkers, RedisUnavailable, cut
from app.core.keys import Keyspace
from app.door.errors import ModelUnavailable, UnknownModel
from app.door.model import Model, ServedName, chosen, model_of
from app.policy.decision import RouteRequest
from app.policy.spread import Availability, Groups, owner_of, spread, standings
from app.router.history import SESSION_TTL_S
from app.router.router import Router
from app.router.routers import Routers
from app.state import sessions
from app.state.models import Claims
from app.state.scripts import ScriptRunner

NAMED = 10
"""Models that a message names at most."""
VIEW_INTERVAL_S = 0.25
FIRST_LOOKS, FIRST_LOOK_EVERY_S = 100, 0.02
"""A request waits so long at most for what a replica that has just started is yet to learn."""


class Models:
    """Follows what workers announce, while `run` runs. aliases: other names for models. groups:
    namespaces that share their names."""

    def __init__(self, routers: Routers, aliases: Mapping[str, str], groups: Groups) -> None:
        self.aliases = aliases
        self.groups = groups
        self._routers = routers
        self._served: dict[str, ServedName] = {}
        self._sleeping: dict[str, Router] = {}
        """Routers that start a worker for a request, by the names that have no live one."""
        self._owners: dict[str, str] = {}
        """Name -> the namespace that it belongs to, of all names that have workers."""
        self._claims: Claims = {}
        self._known = set[str]()
        """Names in the directory, and those that workers had since it changed."""
        self._seen: object = None
        """The state from which all of these were made."""
        self._sessions = SessionPlaces(routers)

    def adopt(self, aliases: Mapping[str, str], groups: Groups) -> None:
        self.aliases, self.groups = aliases, groups
        self._look()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(VIEW_INTERVAL_S)

    def __iter__(self) -> Iterator[Model]:
        """Yields the models with a live worker, by name; of several namespaces, the one that gets
        the most requests."""
        self._look()
        return (self._served[name].first for name in sorted(self._served))

    async def until_known(self) -> None:
        """Returns once models are known, which a first request after a start waits for: balancers
        send requests as soon as something listens."""
        for _ in range(FIRST_LOOKS):
            if self._routers.has_looked:
                return
            await asyncio.sleep(FIRST_LOOK_EVERY_S)

    def sleeping(self) -> list[str]:
        """Returns the names that have no live worker, and that a request wakes."""
        self._look()
        return sorted(self._sleeping)

    def named(self, name: object) -> tuple[str, ServedName]:
        """Returns the name behind a name or alias, and what serves it; of None or "", the only one.
        Raises InvalidRequest if there is another; UnknownModel; ModelUnavailable if no worker of it
        is alive."""
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
        """Returns the model of a name or alias, by weight, in none of the namespaces `without`; of
        None, the only one. Raises as `named`."""
        name, served = self.named(asked_for)
        return served.models[chosen(name, served, without, random.random())]

    async def find_for(
        self, asked_for: object, session: str, without: Collection[str] = ()
    ) -> Model:
        """Returns the model of a name or alias where its session has begun, as long as there are
        workers; else by weight. session: "" for none. Raises as `named`."""
        if not session:
            return self.find(asked_for, without)
        name, served = self.named(asked_for)
        is_alone = len(served.models) == 1
        place = None if is_alone else await self._sessions.find(session, served.models)
        if place is None or place in without:
            place = chosen(name, served, without, point_of(session))
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

    async def wake(self, error: ModelUnavailable, asks: RouteRequest) -> None:
        """Waits in the line, as the request would, for a worker that a planner starts. Raises
        `error` if none comes, and AllWorkersBusy if too many wait."""
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
        """Returns what has no effect of the settings and of what workers announce."""
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

    def _only(self) -> str:
        self._look()
        if len(self._known) != 1:
            some = ", ".join(sorted(self._known)[:NAMED]) or "none yet"
            raise InvalidRequest("model", f"is missing; there is {cut(some)}")
        return next(iter(self._known))

    def _look(self) -> None:
        """Learns which workers serve what, if that has changed."""
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
                models = {n: model_of(by_namespace[n], name) for n in there}
                is_shared = len(self._weights_of(name)) > 1
                self._served[name] = ServedName(models, there, is_shared)
            elif weights:
                self._sleeping[name] = by_namespace[next(iter(weights))]


def _state(router: Router) -> object:
    """Returns what is equal as long as nothing that matters here changes."""
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


TIMEOUT_S = 0.25
MOST = 65_536
"""Sessions that a replica keeps in mind, in some 10 MB; the one that came longest ago makes
room."""


def point_of(session: str) -> float:
    """Returns a number in [0, 1), equal at all replicas."""
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


class SessionPlaces:
    """Namespaces of sessions: as this replica has seen, else as the routers of each namespace wrote
    down. Redis is asked for the first request of each session alone, and only if several namespaces
    serve its model."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> its namespace, and when it was last there, monotonic seconds."""

    async def find(self, session: str, namespaces: Collection[str]) -> str | None:
        """Returns which of the namespaces the session was in last; None if unknown or too long
        ago."""
        place, at_s = self._places.get(session, ("", 0.0))
        if place in namespaces and time.monotonic() - at_s < SESSION_TTL_S:
            return place
        own = self._routers.own
        calls = [sessions.recall(Keyspace(name), [session]) for name in namespaces]
        try:
            visits = await ScriptRunner(own.redis, TIMEOUT_S).run(calls)
        except RedisUnavailable:
            return None
        oldest_ms = (own.fleet.redis_now_ms or 0) - 1000 * SESSION_TTL_S
        latest = [
            (visit.at_ms, name)
            for name, (visit,) in zip(namespaces, visits, strict=True)
            if visit is not None and visit.at_ms > oldest_ms
        ]
        return max(latest)[1] if latest else None

    def note(self, session: str, namespace: str) -> None:
        self._places[session] = namespace, time.monotonic()
        self._places.move_to_end(session)
        if len(self._places) > MOST:
            self._places.popitem(last=False)
