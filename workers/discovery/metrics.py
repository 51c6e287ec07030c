"""Prometheus metrics of an agent that discovers engines, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry

from app.http.metrics import Family, Sampled, ScrapeCollector
from workers.bridge.metrics import registry_of
from workers.discovery.fleet import Fleet

ENGINES = Family(
    "kvroute_agent_engines",
    "gauge",
    "Engines that were discovered: seen, whoever is their agent; followed, by this one; "
    "without_agent, as it has as many as it takes.",
    ("what",),
)
AGE = Family(
    "kvroute_agent_discovery_age_seconds",
    "gauge",
    "How long ago the file, the name server or Kubernetes last said which engines there are.",
)
FAMILIES = (ENGINES, AGE)


def _samples(fleet: Fleet) -> Iterator[Sampled]:
    yield ENGINES, ("seen",), len(fleet.engines or ())
    yield ENGINES, ("followed",), len(fleet.followers)
    yield ENGINES, ("without_agent",), len(fleet.claims.free)
    yield AGE, (), fleet.age_s()


def registry_of_fleet(fleet: Fleet) -> CollectorRegistry:
    registry = registry_of(lambda: fleet.followers.values())
    registry.register(ScrapeCollector(FAMILIES, partial(_samples, fleet)))
    return registry
