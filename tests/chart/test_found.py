"""Engines that run already: of the pods that others make, agents take those that listen, and these
are what routers and agents may reach. engines/ has pods as their controllers label them."""

import subprocess
from pathlib import Path

import pytest
import yaml

from app.cli import main
from app.core.settings.agent import EngineAgentSettings
from tests.chart.installed import INSTALLED
from tests.chart.rendering import TOOLS
from tests.chart.test_manifests import environment
from workers.discovery.kubernetes import engine_of

FOLDER = Path(__file__).parent / "engines"
KINDS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def pods(kind):
    told = yaml.safe_load((FOLDER / f"{kind}.yaml").read_text())
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{kind}-{number}",
                "uid": str(number),
                "labels": each["labels"],
                "namespace": each.get("namespace", "default"),
            },
            "spec": each["spec"],
            "status": {"podIP": "10.0.0.1"},
            "listens": each.get("listens"),
        }
        for number, each in enumerate(told)
    ]


def variables(found):
    [agent] = found.pods["agent"]["spec"]["containers"]
    return {name: entry.get("value", "") for name, entry in environment(agent).items()}


def selected(found, kind):
    """The pods that agents are told of."""
    given = variables(found)
    labels = dict(text.split("=") for text in given["KVROUTE_KUBERNETES_SELECTOR"].split(","))
    namespaces = given.get("KVROUTE_KUBERNETES_NAMESPACE", "default").split(",")
    return [
        pod
        for pod in pods(kind)
        if labels.items() <= pod["metadata"]["labels"].items()
        if pod["metadata"]["namespace"] in namespaces
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_pods_that_others_make_those_that_listen_are_engines(kind):
    found = INSTALLED[kind]
    process = EngineAgentSettings(port_name=variables(found)["KVROUTE_PORT_NAME"])
    engines = [engine_of(pod, process) for pod in selected(found, kind)]
    urls = [engine.settings.engine_url for engine in engines if engine is not None]
    assert urls == [pod["listens"] for pod in pods(kind) if pod["listens"]]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_made_for_engines_that_run(kind):
    found = INSTALLED[kind]
    assert found.pods.keys() == {"router", "agent", "redis"}
    names = {each["metadata"]["name"] for each in found.of_kind("NetworkPolicy")}
    assert names == {"kvroute-router", "kvroute-agent", "kvroute-redis"}


@pytest.mark.parametrize("kind", KINDS)
def test_agents_and_routers_may_reach_engines_and_agents_may_list_them(kind):
    found = INSTALLED[kind]
    given = variables(found)
    namespaces = given.get("KVROUTE_KUBERNETES_NAMESPACE", "").split(",")
    roles = found.of_kind("Role")
    assert [each["metadata"].get("namespace", "") for each in roles] == namespaces
    for role in roles:
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
        ]
    for binding in found.of_kind("RoleBinding"):
        [subject] = binding["subjects"]
        assert subject.get("namespace", "default") == "default"
    port = given["KVROUTE_PORT_NAME"]
    for part in ("router", "agent"):
        [policy] = [
            each
            for each in found.of_kind("NetworkPolicy")
            if each["metadata"]["name"] == f"kvroute-{part}"
        ]
        labels = dict(text.split("=") for text in given["KVROUTE_KUBERNETES_SELECTOR"].split(","))
        [rule] = [
            each
            for each in policy["spec"]["egress"]
            if {"matchLabels": labels} in [peer["podSelector"] for peer in each.get("to", ())]
        ]
        [peer] = rule["to"]
        if namespaces != [""]:
            [expression] = peer["namespaceSelector"]["matchExpressions"]
            assert expression["values"] == namespaces
        open_ports = [str(each["port"]) for each in rule["ports"]]
        assert open_ports[0] == port
        listens = part == "agent" and given.get("KVROUTE_EVENTS_ENDPOINT") != "none"
        assert (len(open_ports) > 1) == listens


def test_routers_and_agents_send_the_key_that_engines_ask_for():
    found = INSTALLED["production-stack"]
    secret = {"name": "vllm-secrets", "key": "vllmApiKey"}
    for part, name in (("router", "KVROUTE_WORKER_KEY"), ("agent", "KVROUTE_ENGINE_API_KEY")):
        [container] = found.pods[part]["spec"]["containers"]
        assert environment(container)[name]["valueFrom"]["secretKeyRef"] == secret


def test_the_kinds_of_engines_are_those_of_the_agent():
    kinds = {kind: variables(INSTALLED[kind]).get("KVROUTE_ENGINE_KIND") for kind in KINDS}
    assert kinds == {"kserve": None, "lws": "sglang", "production-stack": "vllm", "ray": "openai"}
    [option] = [o for o in main.commands["agent"].params if o.name == "engine_kind"]
    assert {kind for kind in kinds.values() if kind} <= set(option.type.choices)


@pytest.mark.chart
@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_are_pods(kind, tmp_path):
    file = tmp_path / "pods.yaml"
    for pod in pods(kind):
        del pod["listens"]
        file.write_text(yaml.safe_dump(pod))
        command = [TOOLS / "kubernetes-validate", "--strict", "-k", "1.37", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
