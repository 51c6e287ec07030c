"""The front door of one replica: what carries requests to engines, and tells of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from app.core.settings.kinds import parse_aliases, parse_names, parse_sharing
from app.core.settings.router import RouterSettings
from app.core.types import Incarnation
from app.door.any_worker import AnyWorker
from app.door.engine.signs import MissingWorkers
from app.door.engine.upstream import Upstream
from app.door.engine.words import EngineWords
from app.door.models import Models
from app.door.prompts.prompts import Prompts
from app.door.record import RequestRecord
from app.door.told.access_log import AccessLog
from app.door.told.last_errors import LastErrors
from app.door.told.metrics import Outcomes
from app.door.told.tracing import Tracing
from app.door.transfer.kv_lease import KvLeases
from app.door.transfer.nixl import nudge
from app.door.transfer.sources import Sources
from app.http.supervisor import attempted, supervised
from app.router.routers import Routers

log = logging.getLogger(__name__)

MAX_REFUSING = 4096
"""Engines that are remembered for members of requests that they do not take."""
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. answer: until an answer begins, over all tries. whole: until one has come that comes
    in one piece. between: between pieces of one."""

    answer_s: float
    whole_s: float
    between_s: float


class Door:
    """Models, their tokenizers and their engines, while `run` runs."""

    def __init__(
        self, settings: RouterSettings, routers: Routers, tracing: Tracing, upstream: Upstream
    ) -> None:
        """upstream: closed when `run` ends."""
        self.settings = settings
        self.tracing = tracing
        self.upstream = upstream
        self.models = Models(
            routers,
            parse_aliases(settings.model_alias),
            parse_sharing(settings.namespace_weights),
        )
        sources = parse_names(settings.tokenizers)
        self.prompts = Prompts(upstream, sources, settings.worker_key, self._beside)
        self.patience = Patience(
            settings.answer_timeout_s, settings.whole_timeout_s, settings.gap_timeout_s
        )
        self.words = EngineWords()
        self.missing = MissingWorkers(upstream)
        self.any_worker = AnyWorker(upstream, settings.gap_timeout_s, self.words)
        self.sources = Sources(upstream, settings.kv_lease_s)
        self.leases = KvLeases(partial(nudge, upstream))
        self._refused = dict[tuple[str, Incarnation], frozenset[str]]()
        self._routers = routers
        self._tasks: asyncio.TaskGroup
        self._task_failures = routers.own.telemetry.task_failures
        self._last_errors = LastErrors(routers.runner, settings.namespace)
        self._outcomes = Outcomes(
            routers.own.telemetry.registry,
            AccessLog(
                on=settings.access_log,
                hashes=settings.log_identities == "hash",
                replica=f"{socket.gethostname()}:{settings.port}",
            ),
            self._last_errors,
            self.prompts.apart,
        )
        self.apart = self.prompts.apart
        self.reported = self._outcomes.reported
        self.keep_workers = self._outcomes.keep_workers

    def adopt(self, settings: RouterSettings) -> None:
        """Takes over settings that may change while a replica runs; logs which have no effect."""
        self.settings = settings
        self.models.adopt(
            parse_aliases(settings.model_alias), parse_sharing(settings.namespace_weights)
        )
        for remark in self.models.remarks():
            log.warning("%s", remark)

    async def run(self) -> None:
        """Runs until cancelled."""
        beside = {
            "models": self.models.run,
            "missing_workers": self.missing.run,
            "kv_leases": self.leases.run,
            "last_errors": self._last_errors.run,
        }
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for name, run in beside.items():
                    self._tasks.create_task(supervised(name, run, self._task_failures))
        finally:
            await self.upstream.close()
            await asyncio.to_thread(self.tracing.close)

    def refused_by(self, namespace: str, engine: Incarnation) -> frozenset[str]:
        """Returns members, of those that routers add to requests, that an engine does not take."""
        return self._refused.get((namespace, engine), _NONE)

    def note_refused(self, namespace: str, engine: Incarnation, members: frozenset[str]) -> None:
        """Remembers members that an engine does not take; the engine noted first makes room."""
        if len(self._refused) >= MAX_REFUSING:
            del self._refused[next(iter(self._refused))]
        self._refused[namespace, engine] = members

    def _beside(self, task: str, run: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        return self._tasks.create_task(attempted(task, run, self._task_failures))

    def ended(self, record: RequestRecord) -> None:
        """Tells of a request, and learns from it."""
        used = record.used
        self._outcomes.ended(record, used)
        if used is not None:
            router = record.model.router if record.model is not None else self._routers.own
            router.count(*used)
        if record.spending is not None:
            self._routers.own.limiter.ended(record.spending, *record.spent)
        media = record.ids.media if record.ids is not None else None
        if media is not None and record.model and record.usage and not record.usage.by_router:
            self.prompts.learn(record.model, media, record.usage.prompt)

    def remarks(self) -> list[str]:
        """Returns what is not as it should be, although requests are answered: `<what>: <why>`."""
        live = {model.name for model in self.models}
        not_here = self.prompts.state().items()
        said = [f"tokenizer of {name}: {why}" for name, why in not_here if name in live]
        return [*self.models.remarks(), *said, *self._outcomes.alarm.remarks()]
