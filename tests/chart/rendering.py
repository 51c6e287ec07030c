"""Renderings of deploy/chart with each of its examples, and the committed files that say so.

python -m tests.chart.rendering writes these anew. Needs what `make test-chart` installs.
"""

import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
TOOLS = Path(os.environ.get("KVROUTE_TEST_CHART") or ROOT / ".venv-chart") / "bin"
TEXTS = {path.read_text(): f"deploy/{path.name}" for path in (CHART / "files").iterdir()}
ALERTS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
TIMEOUT_S = 60


def golden(example):
    return Path(__file__).parent / f"golden/{example}.yaml"


def helm(*arguments):
    command = [TOOLS / "helm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def template(*arguments):
    """The chart, installed under the name kvroute into the namespace default."""
    return helm("template", "kvroute", str(CHART), *arguments)


def rendered(example):
    """Renders the chart with an example's values. Raises RuntimeError if helm refuses."""
    done = template("--values", str(CHART / f"examples/{example}.yaml"))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def comparable(manifests):
    """Returns the text without random values, and with the names of the files of deploy/ in place
    of their text."""
    resources = [resource for resource in yaml.safe_load_all(manifests) if resource]
    for resource in resources:
        _shorten(resource)
    return yaml.safe_dump_all(resources, sort_keys=False, width=1000)


def _shorten(resource):
    if resource["kind"] == "Secret":
        resource["data"] = dict.fromkeys(resource["data"], "random")
    if resource["kind"] == "ConfigMap":
        resource["data"] = {name: TEXTS.get(text, text) for name, text in resource["data"].items()}
    if resource["kind"] == "PrometheusRule" and resource["spec"] == ALERTS:
        resource["spec"] = "deploy/alerts.yaml"
    pod = resource.get("spec", {}).get("template", {}) if resource["kind"] == "Deployment" else {}
    annotations = pod.get("metadata", {}).get("annotations", {})
    annotations.update(dict.fromkeys((n for n in annotations if n.startswith("checksum/")), "sha"))


if __name__ == "__main__":
    for each in EXAMPLES:
        golden(each).write_text(comparable(rendered(each)))
