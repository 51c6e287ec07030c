"""The paths by which operators and balancers look at a replica: health, workers, usage, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from app.console.kept import CachedAnswer
from app.core.errors import NamespaceMissing, RedisUnavailable, WrongVersion
from app.core.keys import Keyspace
from app.door.door import Door
from app.edge import answers
from app.edge.reload import WatchedFiles
from app.edge.schemas import UsageAsked
from app.edge.services import Replica, Rules, errors
from app.http.keys import HEALTH, USAGE, Keys
from app.http.metrics import Family, Sampled, ScrapeCollector
from app.ops.usage import answer, hours_in
from app.policy.view import View, load_statistics
from app.router.metrics import text_of
from app.router.router import Router
from app.router.routers import Routers
from app.state import planner

KEPT_S = 0.5
"""Seconds for which a look serves everybody: anybody may ask, and each reads the loads of all
workers."""
FILES_REFUSED = Family(
    "kvroute_files_refused",
    "gauge",
    "1 while what the files with keys, settings or certificates say does not count, since it was "
    "refused, else 0.",
    ("what",),
)
NO_KEY_LEFT = Family(
    "kvroute_no_key_left",
    "gauge",
    "1 if nobody is let in, since a key is asked for and the file has none any more, else 0.",
)
ROUTER = APIRouter()
State = tuple[bool, list[str]]
"""Whether a namespace can be served, and what is missing."""


class ReadinessCheck:
    """Tells whether a replica can route requests of any namespace that it serves."""

    def __init__(self, routers: Routers, door: Door) -> None:
        self._routers = routers
        self._door = door
        self._looked = CachedAnswer(self._look, KEPT_S)

    async def now(self) -> State:
        """Returns the state of the whole replica, KEPT_S old at most."""
        states = await self._looked.now()
        missing = [what for _, lacks in states for what in lacks]
        if not states:
            missing = ["workers: none is alive"]
        missing += self._door.remarks()
        if danger := self._routers.own.danger_of_eviction:
            missing.append(f"redis: {danger}")
        is_ready = any(is_ready for is_ready, _ in states) and self._door.models.answers_any()
        return is_ready, [*dict.fromkeys(missing)]

    async def _look(self) -> list[State]:
        by_namespace = dict(self._routers.by_namespace)
        states = await asyncio.gather(
            *(
                _state(router, f" in namespace {name}" if len(by_namespace) > 1 else "")
                for name, router in by_namespace.items()
            )
        )
        return [state for state in states if state is not None]


async def _state(router: Router, where: str) -> State | None:
    """Returns the state of a namespace; None if it does not exist, as far as is known. where: its
    name in words."""
    fleet = router.fleet
    missing = []
    view: View | None = None
    try:
        view = await router.refresh()
    except WrongVersion as error:
        return False, [f"namespace: {error}"]  # which it names
    except (RedisUnavailable, NamespaceMissing) as error:
        # Without Redis a router still routes, by the last loads it saw.
        view = fleet.last_view
        if view is None and isinstance(error, NamespaceMissing):
            return None
        missing.append(f"redis: {error}")
    if view is not None and view.away:
        away = f"{sum(away_s is not None for away_s in view.away_s)} of {len(view.infos)}"
        missing.append(f"agents: {away} are away{where}; their engines answer")
    if view is not None and (view.infos or fleet.wakes):
        return True, missing
    missing.append(f"workers: none is alive{where}")
    return False, [*missing, *(f"workers: {what}" for what in fleet.strangers.values())]


class Health(TypedDict):
    status: str


class Readiness(BaseModel):
    """Readiness of a router, which may be ready without Redis, or with one that may drop keys."""

    ready: bool
    missing: list[str] = Field(description="each entry is `<what>: <why>`")


class UsageRow(BaseModel):
    name: str
    requests: int
    failed: int = Field(description="engines failed them, or their answers broke off")
    refused: int = Field(description="by the router")
    prompt_tokens: int
    cached_tokens: int
    cached_share: float | None = Field(description="null: there were no tokens")
    output_tokens: int
    waited_ms: int = Field(description="for a worker that could take them")
    by_router: int = Field(
        description="requests whose tokens the router counted, as their engine did not tell"
    )


class UsageShown(BaseModel):
    by: str
    hours: int = Field(description="how many hours back, the present one included")
    rows: list[UsageRow] = Field(description="those with most tokens first")
    total: dict[str, Any]


@ROUTER.get(HEALTH)
async def health() -> Health:
    """Confirm that the process answers."""
    return {"status": "ok"}


@ROUTER.get("/readiness", responses=errors(503, error=Readiness))
async def readiness(replica: Replica, response: Response) -> Readiness:
    """Say whether requests can be routed in any namespace (503 if not), and what is missing. It
    looks at most twice a second."""
    ready, missing = await replica.readiness.now()
    if replica.is_stopping:
        ready, missing = False, ["router: it is stopping", *missing]
    if not ready:
        response.status_code = 503
    return Readiness(ready=ready, missing=missing)


@ROUTER.get("/v1/workers", responses=errors(401, 503))
async def workers(replica: Replica, rules: Rules) -> answers.Workers:
    """List the live workers and the load on each, and those that are left alone for a while."""
    router = replica.router
    try:
        view = await router.refresh()
    except NamespaceMissing:
        return answers.Workers(workers=[], paused=[], load_avg=0.0, load_std=0.0)
    values = await planner.values(router.redis, Keyspace(router.namespace))
    return answers.workers(view, values, rules)


@ROUTER.get(USAGE, responses=errors(401, 422, 503), response_model=UsageShown)
async def usage(asked: Annotated[UsageAsked, Query()], replica: Replica) -> dict[str, Any]:
    """Tell operators what each key, tenant or model has used."""
    router = replica.router
    return await answer(router.redis, router.keyspace, asked.by, hours_in(asked.since))


@ROUTER.get("/metrics", response_class=PlainTextResponse, responses=errors(401))
async def metrics(replica: Replica) -> Response:
    """Metrics in Prometheus text format, with a label `namespace` where it is not the own one."""
    own, by_namespace = replica.routers.own, dict(replica.routers.by_namespace)
    await asyncio.gather(*map(_take_stock, by_namespace.values()))
    replica.door.keep_workers(
        {str(info.key) for router in by_namespace.values() for info in router.fleet.infos}
    )
    del by_namespace[own.namespace]
    others = {name: router.telemetry for name, router in sorted(by_namespace.items())}
    text = await text_of(own.telemetry, others)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _take_stock(router: Router) -> None:
    """Sets the gauges of what a router sees."""
    telemetry, fleet = router.telemetry, router.fleet
    try:
        view = await router.refresh()
    except (RedisUnavailable, NamespaceMissing, WrongVersion):
        # Gauges of workers that nobody can vouch for are left out.
        telemetry.view = None
        telemetry.workers.set(0)
    else:
        telemetry.view = view
        telemetry.workers.set(len(view.infos))
        telemetry.keep_workers({str(i.key) for i in (*view.infos, *view.paused.values())})
        load_avg, load_std = load_statistics(view)
        telemetry.load_mean.set(load_avg)
        telemetry.load_std.set(load_std)
    telemetry.sleeps.set(telemetry.view is not None and fleet.sleeps)
    telemetry.metrics_age.set(fleet.measurements.age_s)


def show_files(registry: CollectorRegistry, watched: Sequence[WatchedFiles], keys: Keys) -> None:
    """Registers the metrics of files. watched: looked through at each scrape."""

    def samples() -> Iterator[Sampled]:
        for files in watched:
            yield FILES_REFUSED, (files.what,), float(bool(files.problem))
        yield NO_KEY_LEFT, (), float(keys.is_locked)

    registry.register(ScrapeCollector([FILES_REFUSED, NO_KEY_LEFT], samples))
