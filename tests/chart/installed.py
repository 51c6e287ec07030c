"""The chart's examples as it renders them: committed files that `make test-chart` compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from tests.chart.rendering import EXAMPLES, golden

POOL = "kvroute.io/pool"
"""The label of engines."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An example's resources, and its pods by the name of their Deployment."""

    example: str
    resources: list[dict[str, Any]]
    pods: dict[str, dict[str, Any]]

    def of_kind(self, kind):
        return [resource for resource in self.resources if resource["kind"] == kind]

    def containers(self):
        for pod in self.pods.values():
            yield from pod["spec"]["containers"]

    def engines(self):
        return {name for name, pod in self.pods.items() if POOL in pod["metadata"]["labels"]}

    def downloads(self):
        """Whether routers fetch a tokenizer."""
        pod = self.pods["router"]["spec"]
        return any("tokenizer.sh" in str(each) for each in pod.get("initContainers", []))

    def ports(self, part):
        containers = self.pods[part]["spec"]["containers"]
        return {port["containerPort"] for one in containers for port in one["ports"]}


def _installed(example):
    resources = list(yaml.load_all(golden(example).read_text(), yaml.CSafeLoader))
    deployments = [each for each in resources if each["kind"] == "Deployment"]
    return Installed(
        example,
        resources,
        {
            d["metadata"]["name"].removeprefix("kvroute-"): d["spec"]["template"]
            for d in deployments
        },
    )


INSTALLED = {example: _installed(example) for example in EXAMPLES}


def selects(selector, labels):
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
