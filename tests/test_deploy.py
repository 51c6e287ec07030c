"""The files in deploy/ name what exists: metrics, and variables that the parts read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from app.cli import main
from app.router.metrics import Telemetry
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.profiles import PROFILES
from workers.engines.sim.runner import EngineRunner
from workers.metrics import registry_of

DEPLOY = Path(__file__).parents[1] / "deploy"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
VARIABLES = {"$__rate_interval": "5m", "$routers": "routers", "$workers": "workers"}


def alerts() -> Iterator[str]:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def panels() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
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


def kubernetes_variables() -> Iterator[tuple[str, str]]:
    for resource in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        if resource["kind"] == "Deployment":
            for container in resource["spec"]["template"]["spec"]["containers"]:
                for variable in container.get("env", []):
                    yield container["name"], variable["name"]


def compose_variables() -> Iterator[tuple[str, str]]:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for part, service in services.items():
        for name in service.get("environment", {}):
            yield part, name


@pytest.mark.parametrize(
    ("part", "variable"), sorted({*kubernetes_variables(), *compose_variables()})
)
def test_each_part_reads_the_variables_that_it_is_given(part: str, variable: str) -> None:
    if part == "balancer":
        assert f"${{{variable}}}" in (DEPLOY / "haproxy.cfg").read_text()
    elif variable != "POD_IP":  # the manifest itself uses it
        command = main.commands[part]
        assert variable in {getattr(option, "envvar", None) for option in command.params}
