"""Resources that are none of Kubernetes' own, against the types of those who define them:
`make test-chart`."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.rendering import EXAMPLES, TOOLS, rendered

pytestmark = pytest.mark.chart

TYPES = {
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "InferencePool": str(Path(__file__).with_name("inference_pool.js")),
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
}
OF_KUBERNETES = {"v1", "apps", "autoscaling", "networking.k8s.io", "policy"}
OF_KUBERNETES |= {"rbac.authorization.k8s.io"}
FLAGS = ("--noEmit", "--strict", "--skipLibCheck", "--pretty", "false")
MODULES = ("--module", "nodenext", "--moduleResolution", "nodenext", "--target", "es2022")


def custom():
    for example in EXAMPLES:
        for each in yaml.safe_load_all(rendered(example)):
            if each and each["apiVersion"].split("/")[0] not in OF_KUBERNETES:
                yield each


def wrong(resources, folder):
    (folder / "node_modules").symlink_to(TOOLS.parent / "node_modules")
    (folder / "package.json").write_text('{"type": "module"}')
    imports = (f'import type {{ I{kind} }} from "{path}";' for kind, path in TYPES.items())
    given = (
        f"export const r{at}: I{each['kind']} = {json.dumps(each)};"
        for at, each in enumerate(resources)
    )
    (folder / "all.ts").write_text("\n".join([*imports, *given]))
    command = [TOOLS.parent / "node_modules/.bin/tsc", *FLAGS, *MODULES, "all.ts"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    said = re.findall(r"^all\.ts\((\d+),\d+\): error (.*)$", done.stdout, re.MULTILINE)
    assert bool(done.returncode) == bool(said), done.stdout + done.stderr
    return {int(line) - 1 - len(TYPES): text for line, text in said}


def test_each_field_is_one_that_its_definition_has(tmp_path):
    resources = [*custom()]
    assert {each["kind"] for each in resources} == TYPES.keys()
    assert wrong(resources, tmp_path) == {}


def test_a_field_that_is_misspelt_is_found(tmp_path):
    resources = [*{each["kind"]: each for each in custom()}.values()]
    for each in resources:
        name = next(iter(each["spec"]))
        each["spec"][f"{name}x"] = each["spec"][name]
    assert wrong(resources, tmp_path).keys() == {*range(len(TYPES))}
