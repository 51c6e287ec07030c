"""deploy/alerts.yaml and deploy/grafana.json ask for metrics that routers and workers have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from app.telemetry import Telemetry
from workers.engines.profiles import PROFILES
from workers.engines.runner import EngineRunner
from workers.engines.sim import SimEngine
from workers.telemetry import registry_of

ROOT = Path(__file__).parents[1]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
VARIABLES = {"$__rate_interval": "5m", "$routers": "routers", "$workers": "workers"}


def alerts() -> Iterator[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def panels() -> Iterator[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            yield expression


def series(registry: CollectorRegistry) -> set[str]:
    return {
        family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]
    }


@pytest.mark.parametrize("expression", [*alerts(), *panels()])
def test_what_is_watched_is_valid_and_exists(expression: str) -> None:
    promql_parser.parse(expression)
    engine = EngineRunner(SimEngine(next(iter(PROFILES.values())), block_size=16))
    known = series(Telemetry().registry) | series(registry_of(engine))
    asked = set(re.findall(r"kvroute_\w+", expression))
    assert asked
    assert asked <= known
