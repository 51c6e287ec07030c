"""The models behind this replica: which names clients may ask for, and who serves each."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

from app.core.errors import InvalidRequest, NoWorkers, RedisUnavailable, cut
from app.core.worker_report import WorkerInfo
from app.door.errors import ModelUnavailable, UnknownModel
from app.router.router import Router
from app.router.routers import Routers
from app.state import models
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

DIRECTORY_INTERVAL_S = 2.0
LOOKED_AT = 1000
"""New namespaces that are looked at each time."""
NAMED = 10
"""Models that a message names at most."""
VIEW_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Model:
    """One name that clients may ask for, as long as the same workers serve it.

    workers: those that do. others: names of the workers of its namespace that do not. lora_name:
    that of the adapter which it is; None: it is none. max_tokens: the length of a prompt and its
    answer together; 0: unknown.
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

    @property
    def root(self) -> WorkerInfo:
        """A worker that serves it."""
        return self.workers[0]


class Models:
    """Follows what workers announce, while `run` runs."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        self._routers = routers
        self._timeout_s = timeout_s
        self._live: dict[str, Model] = {}
        self._holders: dict[str, str] = {}
        """Name -> the namespace that has it, as Redis says; of what Redis does not say yet, the
        first one in which a worker serves it."""
        self._seen: dict[str, tuple[WorkerInfo, ...]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_directory())
            tasks.create_task(self._follow_workers())

    def __iter__(self) -> Iterator[Model]:
        """Those with a live worker, by name."""
        self._look()
        return (self._live[name] for name in sorted(self._live))

    def sleeping(self) -> list[str]:
        """Names of those that have no live worker, and that a request wakes."""
        self._look()
        by_namespace = self._routers.by_namespace
        return sorted(
            name
            for name, namespace in self._holders.items()
            if name not in self._live
            and namespace in by_namespace
            and by_namespace[namespace].fleet.is_asleep
        )

    def find(self, name: object) -> Model:
        """None: the only one. Raises InvalidRequest if there is another; UnknownModel;
        ModelUnavailable if no worker of it is alive."""
        if name is None:
            name = self._only()
        if isinstance(name, str):
            for look_again in (True, False):
                if name in self._live:
                    return self._live[name]
                if look_again:
                    self._look()
        if isinstance(name, str) and name in self._holders:
            raise ModelUnavailable(name)
        raise UnknownModel(name)

    async def wake(self, error: ModelUnavailable, tenant: str, priority: str) -> None:
        """Wait, in the line, for a worker of that model where a planner starts one. Raises `error`
        if none comes, and AllWorkersBusy if too many wait."""
        router = self._routers.by_namespace.get(self._holders.get(error.model, ""))
        if router is None or not router.fleet.is_asleep:
            raise error
        try:
            await router.awake(tenant, priority)
        except NoWorkers:
            raise error from None

    def _only(self) -> str:
        names = self._holders.keys() | {model.name for model in self}
        if len(names) != 1:
            some = ", ".join(sorted(names)[:NAMED]) or "none yet"
            raise InvalidRequest("model", f"is missing; there is {cut(some)}")
        return names.pop()

    async def _follow_directory(self) -> None:
        runner = ScriptRunner(self._routers.own.redis, self._timeout_s)
        while True:
            try:
                holders = await models.directory(runner.redis)
                wanted, served = set(holders.values()), self._routers.by_namespace.keys()
                # Anybody may write there: only those count in which there are workers.
                new = list(wanted - served)
                new = random.sample(new, min(LOOKED_AT, len(new)))
                exist = await runner.run([models.exists(namespace) for namespace in new])
                if holders != self._holders:
                    self._holders, self._seen = holders, {}
                self._routers.serve([*(wanted & served), *compress(new, exist)])
            except RedisUnavailable as error:
                log.debug("models not read: %s", error)
            await asyncio.sleep(DIRECTORY_INTERVAL_S)

    async def _follow_workers(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(VIEW_INTERVAL_S)

    def _look(self) -> None:
        """Learn who serves what, if that has changed."""
        by_namespace = self._routers.by_namespace
        now = {name: router.fleet.infos for name, router in by_namespace.items()}
        if now == self._seen:
            return
        self._seen = now
        self._live = {}
        for namespace, infos in now.items():
            for model in _models(by_namespace[namespace], infos):
                # Its workers may be gone before the directory is read again.
                if self._holders.setdefault(model.name, namespace) == namespace:
                    self._live.setdefault(model.name, model)


def _models(router: Router, infos: tuple[WorkerInfo, ...]) -> Iterator[Model]:
    """Each name that some of the workers serve."""
    adapters = {name for info in infos for name in info.adapters}
    for name in dict.fromkeys(name for info in infos for name in (*info.models, *info.adapters)):
        serving = tuple(info for info in infos if name in info.models or name in info.adapters)
        lengths = [info.max_model_len for info in serving if info.max_model_len]
        yield Model(
            name,
            router,
            serving,
            frozenset(str(info.key) for info in infos if info not in serving),
            name if name in adapters else None,
            min(lengths, default=0),
        )
