"""What a replica tells a scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from app.core.errors import NamespaceMissing, RedisUnavailable, WrongVersion
from app.edge.services import Replica, errors
from app.edge.watched_files import WatchedFiles
from app.http.keys import Keys
from app.http.metrics import Family, Sampled, ScrapeCollector
from app.policy.view import load_statistics
from app.router.metrics import text_of
from app.router.router import Router

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


def show_files(registry: CollectorRegistry, watched: Sequence[WatchedFiles], keys: Keys) -> None:
    """watched: looked through at each scrape."""

    def samples() -> Iterator[Sampled]:
        for files in watched:
            yield FILES_REFUSED, (files.what,), float(bool(files.problem))
        yield NO_KEY_LEFT, (), float(keys.is_locked)

    registry.register(ScrapeCollector([FILES_REFUSED, NO_KEY_LEFT], samples))


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
    """Set the gauges of what a router sees."""
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
