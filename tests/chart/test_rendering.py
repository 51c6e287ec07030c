"""The chart as the real helm renders it: `make test-chart`."""

import subprocess

import pytest
import yaml

from tests.chart.rendering import (
    CHART,
    EXAMPLES,
    TOOLS,
    comparable,
    golden,
    helm,
    rendered,
    template,
)

pytestmark = pytest.mark.chart

VERSIONS = ("1.27", "1.37")
"""Versions of Kubernetes: the oldest that the chart names, and the newest known here."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_renders_as_is_committed(example):
    assert comparable(rendered(example)) == golden(example).read_text(), (
        "run python -m tests.chart.rendering"
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_knows_each_field_of_it(example, version, tmp_path):
    manifests = tmp_path / "manifests.yaml"
    manifests.write_text(rendered(example))
    command = [TOOLS / "kubernetes-validate", "--strict", "-k", version, manifests]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_oldest_version_is_the_one_that_the_chart_names():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_helm_finds_nothing_wrong_with_it():
    linted = helm("lint", "--strict", str(CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("router.replica=3", "at '/router': additional properties 'replica' not allowed"),
        ("routers.replicas=3", "additional properties 'routers' not allowed"),
        ("router.replicas=many", "at '/router/replicas': got string, want integer"),
        ("engines.pools[0].role=both", "missing properties 'name', 'replicas'"),
        ("redis.external.caSecret=ca", "redis.external.caSecret: redis.external.secret is needed"),
        ("planner.keda.prometheus=http://p", "planner.keda.prometheus: planner.enabled is needed"),
        ("gateway.enabled=true", "gateway.enabled: gateway.parentRefs is needed too"),
        ("namespaceWeights.next=-1", "at '/namespaceWeights/next': minimum: got -1, want 0"),
        (
            "engines.enabled=false",
            "engines.selector.matchLabels is needed too: the labels of their",
        ),
        (
            "engines.enabled=false,engines.selector.matchLabels.app=vllm,planner.enabled=true",
            "planner.enabled: planner.scale is needed too",
        ),
        ("planner.scale=deployment/x", "planner.scale: is for engines that run already"),
        ("planner.scale=job/x", "at '/planner/scale': 'job/x' does not match pattern"),
        ("engines.type=tgi", "at '/engines/type': value must be one of"),
        ("tokenizer.source=volume", "tokenizer.source volume: tokenizer.volume is needed too"),
        ("tokenizer.source=image", "tokenizer.image and tokenizer.path are needed too"),
        ("models[0].name=a,model=m", "models: each has its own model"),
        ("models[0].model=m", "at '/models/0': missing property 'name'"),
        ("models[0].name=a,models[1].name=a", "is the name of something else, too"),
        ("models[0].name=a,models[0].engines.keySecret.name=s,models[1].name=b", "send one key to"),
        ("router.pod.affinities.x=1", "additional properties 'affinities' not allowed"),
        ("gateway.failureMode=Open", "at '/gateway/failureMode': value must be one of"),
    ],
)
def test_what_is_not_known_is_refused_by_name(given, why):
    refused = template("--set", given)
    assert refused.returncode != 0
    assert why in refused.stderr


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ([("a", "both"), ("a", "both")], 'engines.pools: the name "a" is taken'),
        ([("router", "both")], 'engines.pools: the name "router" is taken'),
        ([("a", "prefill")], "planner.enabled: engines.pools must be one of the role both"),
        ([("a", "both"), ("b", "decode")], "planner.enabled: engines.pools must be one"),
    ],
)
def test_pools_that_cannot_be_are_refused(pools, why):
    given = ["planner.enabled=true", "model=m"]
    for index, (name, role) in enumerate(pools):
        pool = {"name": name, "role": role, "replicas": 1}
        given += [f"engines.pools[{index}].{key}={value}" for key, value in pool.items()]
    refused = template("--set", ",".join(given))
    assert refused.returncode != 0
    assert why in refused.stderr


def test_a_revision_is_weighed_and_sized_by_values_alone():
    values = ("--values", str(CHART / "examples/canary.yaml"))
    given = "namespaceWeights.next=5,planner.enabled=true"
    made = [each for each in yaml.safe_load_all(template(*values, "--set", given).stdout) if each]
    [told] = [each["data"]["router.toml"] for each in made if "router.toml" in each.get("data", {})]
    assert told == 'namespace-weights = "default=9,next=5"\n'
    specs = {
        each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Deployment"
    }
    # The planner sizes the pool of its own namespace.
    assert "replicas" not in specs["kvroute-engine"]
    assert specs["kvroute-next"]["replicas"] == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            'engines.pools=[{"name": "a", "role": "both", "replicas": 1, "namespace": "other"}]',
            "engines.pools: namespaceWeights has no other",
        ),
        ("agent.discovery=true", "engines.pools: namespace next: agent.discovery follows those of"),
    ],
)
def test_a_revision_that_would_get_nothing_is_refused(given, why):
    refused = template("--values", str(CHART / "examples/canary.yaml"), "--set-json", given)
    assert refused.returncode != 0
    assert why in refused.stderr


@pytest.mark.parametrize("mode", ["FailOpen", "FailClose"])
def test_what_a_gateway_does_without_pickers_is_a_value(mode):
    given = f"gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.failureMode={mode}"
    pools = (each for each in yaml.safe_load_all(template("--set", given).stdout) if each)
    [pool] = [each for each in pools if each["kind"] == "InferencePool"]
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == mode


def test_a_gateway_and_pools_that_split_prompts_are_refused():
    values = str(CHART / "examples/split.yaml")
    given = "gateway.enabled=true,gateway.parentRefs[0].name=g"
    refused = template("--values", values, "--set", given)
    assert refused.returncode != 0
    assert "gateway.enabled: a gateway sends each request to one engine" in refused.stderr


def test_the_chart_that_is_packed_has_the_files_of_deploy(tmp_path):
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    [packed] = tmp_path.iterdir()
    done = helm("template", "kvroute", str(packed))
    assert comparable(done.stdout) == golden("default").read_text()
