"""The files in deploy/ name what exists, and give no part more than it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from app.cli import main
from app.core import settings
from app.core.agent_settings import EngineAgentSettings
from app.core.outcomes import NEVER_CAME, matching
from app.core.router_settings import RouterSettings
from app.core.worker_report import Role
from app.door.metrics import SECONDS
from app.edge.app import create_app
from app.local.redis_server import free_port
from app.planner.metrics import PlannerMetrics
from app.simulation.engine import SimEngine
from app.simulation.profiles import USUAL
from tests.redis_servers import default_kind, require_binary, require_redis
from workers.bridge.metrics import FAMILIES
from workers.engines.sim.runner import EngineRunner
from workers.metrics import registry_of

DEPLOY = Path(__file__).parents[1] / "deploy"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
VARIABLES = {
    "$__rate_interval": "5m",
    "$routers": "routers",
    "$workers": "workers",
    "$planners": "planners",
    "$worker": "w0:0",
    "$target_s": "5.0",
}


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
    engine = EngineRunner(SimEngine(USUAL, block_size=16, now=time.monotonic))
    router = create_app(RouterSettings()).replica.router
    known = series(router.telemetry.registry) | series(registry_of(engine))
    known |= series(PlannerMetrics("n").registry) | {family.name for family in FAMILIES}
    asked = set(re.findall(r"kvroute_\w+", expression))
    assert asked
    assert asked <= known


DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())


def test_no_two_panels_share_an_id_or_a_place_and_none_is_wider_than_the_page() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = Counter[tuple[int, int]]()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        assert x + w <= 24
        taken.update((column, row) for column in range(x, x + w) for row in range(y, y + h))
    assert taken.most_common(1)[0][1] == 1


def test_each_variable_of_the_dashboard_is_used_and_each_that_is_used_is_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(DASHBOARD["panels"])))
    used |= {panel["repeat"] for panel in DASHBOARD["panels"] if "repeat" in panel}
    assert used - {"__rate_interval"} == defined


def test_the_dashboard_promises_first_tokens_within_bounds_that_are_counted() -> None:
    [target] = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "target_s"]
    assert set(target["query"].split(",")) <= {str(bound) for bound in SECONDS}


def test_the_dashboard_counts_as_late_the_first_tokens_that_never_came() -> None:
    in_time = next(p for p in DASHBOARD["panels"] if p["title"] == "First token in time")
    assert f'outcome=~"{matching(*NEVER_CAME)}"' in in_time["targets"][0]["expr"]


OWN_VARIABLES = {"POD_IP", "REDIS_PASSWORD"}
"""What the manifest gives a container only for others of its variables."""
MANIFESTS = (
    "kubernetes.yaml",
    "planner.kubernetes.yaml",
    "vllm.kubernetes.yaml",
    "split.kubernetes.yaml",
)
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
RESOURCES = [
    resource
    for name in MANIFESTS
    for document in yaml.safe_load_all((DEPLOY / name).read_text())
    for resource in document.get("items", [document])
]
POLICIES = [r["spec"] for r in RESOURCES if r["kind"] == "NetworkPolicy"]
PODS = {
    r["metadata"]["name"].removeprefix("kvroute-"): r["spec"]["template"]
    for r in RESOURCES
    if r["kind"] == "Deployment"
}
LABELS: dict[str, dict[str, str]] = {
    "client": {"app": "any"},
    "elsewhere": {},
    **{part: pod["metadata"]["labels"] for part, pod in PODS.items()},
}
PORTS: dict[str, set[int]] = {
    part: {port["containerPort"] for one in pod["spec"]["containers"] for port in one["ports"]}
    for part, pod in PODS.items()
}
CONFINED = ("redis", "router", "worker")
PLANNER = {r["kind"]: r for r in RESOURCES if r["metadata"]["name"] == "kvroute-planner"}


def test_the_planner_may_do_what_its_connector_does_and_reaches_what_it_needs() -> None:
    allowed = {
        (group, resource): rule["verbs"]
        for rule in PLANNER["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {("apps", "deployments/scale"): ["get", "patch"], ("", "pods"): ["patch"]}
    deployment = PLANNER["Deployment"]["spec"]["template"]
    account = PLANNER["ServiceAccount"]["metadata"]["name"]
    assert deployment["spec"]["serviceAccountName"] == account
    assert PLANNER["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]


def test_a_planner_is_told_of_deployments_that_there_are() -> None:
    told = re.findall(r"deployment/([\w-]+)", (DEPLOY / "planner.kubernetes.yaml").read_text())
    there = {r["metadata"]["name"] for r in RESOURCES if r["kind"] == "Deployment"}
    assert set(told) == there - {"redis", "kvroute-router", "kvroute-planner"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_agent_of_a_split_fleet_has_the_role_of_its_deployment(role: Role) -> None:
    pod = PODS[role]
    agent = next(each for each in pod["spec"]["containers"] if each["name"] == "agent")
    said = {entry["name"]: entry for entry in agent["env"]}
    field = said["KVROUTE_ROLE"]["valueFrom"]["fieldRef"]["fieldPath"]
    [label] = re.findall(r"metadata\.labels\['(\w+)'\]", field)
    assert pod["metadata"]["labels"][label] == role
    assert said["KVROUTE_KV_TRANSFER"]["value"] == "nixl"


def environment(part: str) -> Iterator[tuple[str, Any]]:
    """Name and entry of each variable of a container."""
    for pod in PODS.values():
        for container in pod["spec"]["containers"]:
            if container["name"] == part:
                yield from ((entry["name"], entry) for entry in container["env"])


def variables() -> Iterator[tuple[str, str]]:
    for part in ("redis", "router", "worker", "planner"):
        yield from ((part, name) for name, _ in environment(part))
    for part, service in SERVICES.items():
        yield from ((part, name) for name in service.get("environment", {}))


@pytest.mark.parametrize(("part", "variable"), sorted({*variables()}))
def test_each_part_reads_the_variables_that_it_is_given(part: str, variable: str) -> None:
    if part == "balancer":
        assert f"${{{variable}}}" in (DEPLOY / "haproxy.cfg").read_text()
    elif part == "redis":
        assert variable in REDIS_VARIABLES
    elif variable not in OWN_VARIABLES:
        command = main.commands[part]
        assert variable in {getattr(option, "envvar", None) for option in command.params}


@pytest.mark.parametrize("name", CONFINED)
def test_a_pod_can_do_no_more_than_it_needs(name: str) -> None:
    pod = PODS[name]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def connections() -> set[tuple[str, str, int]]:
    """(from, to, port) of each that the parts make; client: any pod of theirs, Prometheus too."""
    engines = ("vllm", "prefill", "decode")
    parts = ("router", "worker", "planner", *engines)
    made = {(part, "redis", 6379) for part in parts} | {(part, "elsewhere", 53) for part in parts}
    made |= {("router", "worker", 8081)} | {("router", engine, 8000) for engine in engines}
    for part, ports in PORTS.items():
        made |= {("client", part, port) for port in ports if part != "redis"}
    made |= {("planner", "elsewhere", 443), ("planner", "elsewhere", 6443)}  # the API server
    made |= {(part, "elsewhere", 443) for part in ("router", *engines)}  # tokenizers and models
    for pair in (("prefill", "decode"), ("decode", "prefill")):
        made |= {(*pair, port) for port in PORTS[pair[1]] | {22}}  # KV, at any port
    return made


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def lets(way: str, pod: str, peer: str, port: int) -> bool:
    """Whether the policies of `pod` let it talk with `peer`. way: Ingress or Egress."""
    policies = [
        policy
        for policy in POLICIES
        if way in policy["policyTypes"] and selects(policy["podSelector"], LABELS[pod])
    ]
    rules = [rule for policy in policies for rule in policy.get(way.lower(), [])]
    peers = "from" if way == "Ingress" else "to"
    return not policies or any(
        port in [each["port"] for each in rule.get("ports", [{"port": port}])]
        and any(
            selects(each["podSelector"], LABELS[peer]) and peer != "elsewhere"
            for each in rule[peers]
        )
        if peers in rule
        else port in [each["port"] for each in rule["ports"]]
        for rule in rules
    )


def test_policies_let_the_parts_connect_to_each_other_as_they_do_and_in_no_other_way() -> None:
    ports = PORTS | {"elsewhere": {53, 80, 443, 6443}}
    let = {
        (pod, peer, port)
        for pod in PORTS
        for peer in ports
        for port in ports[peer] | {22}
        if pod != peer and lets("Egress", pod, peer, port) and lets("Ingress", peer, pod, port)
    }
    let |= {
        ("client", peer, port)
        for peer in PORTS
        for port in PORTS[peer] | {22}
        if lets("Ingress", peer, "client", port)
    }
    assert let == connections()
    assert not any(
        lets("Ingress", peer, "elsewhere", port) for peer in PORTS for port in ports[peer]
    )


def test_monitors_name_pods_and_ports_that_there_are_and_a_key_where_one_is_asked_for() -> None:
    monitors = list(yaml.safe_load_all((DEPLOY / "monitors.kubernetes.yaml").read_text()))
    seen = set()
    for monitor in monitors:
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        for container in containers_of(monitor["spec"]["selector"]):
            if endpoint["port"] not in [port.get("name") for port in container.get("ports", [])]:
                continue
            seen.add(container["name"])
            keys = {
                entry["valueFrom"]["secretKeyRef"]["key"]
                for entry in container["env"]
                if entry["name"] == "KVROUTE_METRICS_KEY"
            }
            asked = endpoint.get("authorization", {}).get("credentials", {})
            assert {asked["key"]} == keys if asked else not keys
    assert seen == {"router", "worker", "agent", "planner"}


def containers_of(selector: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for pod in PODS.values():
        if selects(selector, pod["metadata"]["labels"]):
            yield from pod["spec"]["containers"]


def test_prometheus_is_told_of_each_service_that_has_metrics_and_its_port() -> None:
    file = DEPLOY / "prometheus.yaml"
    command = [require_binary("promtool"), "check", "config", "--syntax-only", file]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = {}
    for job in yaml.safe_load(file.read_text())["scrape_configs"]:
        [where] = job["dns_sd_configs"]
        [service] = where["names"]
        assert where["port"] in PORTS["vllm" if service == "agent" else service]
        found[service] = "authorization" in job
    assert found == {"router": True, "worker": True, "agent": False, "planner": False}
    keyed = {s for s in SERVICES if "KVROUTE_METRICS_KEY" in SERVICES[s].get("environment", {})}
    assert keyed == {"router", "worker"}


def images() -> Iterator[str]:
    for name in ("compose.yaml", "vllm.compose.yaml", "vllm.router-patch.yaml", *MANIFESTS):
        yield from re.findall(r"image: (\S+)", (DEPLOY / name).read_text())
    for match in re.finditer(r"(?m)^FROM (\S+:\S+) AS", (DEPLOY.parent / "Dockerfile").read_text()):
        yield match[1]


def test_images_have_a_whole_version_and_ours_are_of_this_one() -> None:
    ours = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    for image in images():
        name, _, version = image.partition(":")
        assert re.match(r"v?\d+\.\d+\.\d+(-|$)", version), image
        assert "kvroute" not in name or version == ours, image


def test_routers_and_workers_ask_for_keys() -> None:
    for part in ("router", "worker"):
        assert "KVROUTE_WORKER_KEY" in dict(environment(part))
    assert "KVROUTE_API_KEY" in dict(environment("router"))
    assert "KVROUTE_ENGINE_API_KEY" in dict(environment("agent"))
    assert not any("NO_AUTH" in path.read_text() for path in DEPLOY.glob("*.*"))


@pytest.mark.parametrize("part", SERVICES)
def test_a_service_can_do_no_more_than_it_needs(part: str) -> None:
    service = SERVICES[part]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert ("redis" in service["networks"]) == (part != "balancer")
    assert ("default" in service["networks"]) == (part != "redis")


def test_parts_log_in_to_redis_as_their_own_user() -> None:
    for part in ("router", "worker"):
        url = SERVICES[part]["environment"]["REDIS_URL"]
        assert url.startswith(f"redis://kvroute-{part}:${{{part.upper()}_PASSWORD}}@")
        env = dict(environment(part))
        secret = {"name": "kvroute-redis", "key": part}
        assert env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == secret
        assert env["REDIS_URL"]["value"].startswith(f"redis://kvroute-{part}:$(REDIS_PASSWORD)@")


REDIS_VARIABLES = {
    "KVROUTE_NAMESPACE": "prod",
    "WORKER_PASSWORD": "a/b|c&d$e worker",
    "ROUTER_PASSWORD": "router\\1",
    "OPERATOR_PASSWORD": "operator",
}


def started(*arguments: str, without: str = "") -> subprocess.Popen[str]:
    """deploy/redis.sh, started as in the containers."""
    given = {name: value for name, value in REDIS_VARIABLES.items() if name != without}
    server = require_redis(default_kind())
    folder = Path(arguments[1])
    (folder / "redis-server").symlink_to(server)
    return subprocess.Popen(
        ["sh", str(DEPLOY / "redis.sh"), *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_redis_starts_with_users_confined_to_a_namespace_by_their_passwords(
    tmp_path: Path,
) -> None:
    port = free_port()
    users = str(DEPLOY / "users.acl")
    with started(users, str(tmp_path), "--port", str(port), "--save", "") as process:
        try:
            for role in ("worker", "router", "operator"):
                redis = Redis(
                    port=port,
                    username=f"kvroute-{role}",
                    password=REDIS_VARIABLES[f"{role.upper()}_PASSWORD"],
                    retry=Retry(ConstantBackoff(0.1), 50),
                )
                with redis:
                    assert redis.ping()
                    assert redis.hget("kvroute:1:{prod}:meta", "block_size") is None
                    assert redis.hget("kvroute:1:{prod#3}:blocks:0", "0") is None
                    with pytest.raises(NoPermissionError):
                        redis.hget("kvroute:1:{other}:meta", "block_size")
            with Redis(port=port) as nobody, pytest.raises(AuthenticationError):
                nobody.ping()
        finally:
            process.terminate()
    assert "router\\1" not in (tmp_path / "users.acl").read_text()


def test_redis_does_not_start_without_a_password(tmp_path: Path) -> None:
    users = str(DEPLOY / "users.acl")
    with started(users, str(tmp_path), without="ROUTER_PASSWORD") as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "ROUTER_PASSWORD is not set" in output


def _containers() -> dict[str, dict[str, str]]:
    """The environment of each agent in the examples with a real engine."""
    service = yaml.safe_load((DEPLOY / "vllm.compose.yaml").read_text())["services"]["agent"]
    names = {name: str(entry.get("value", "")) for name, entry in environment("agent")}
    return {"compose": service["environment"], "kubernetes": names}


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_an_agent_in_the_examples_is_told_only_what_it_knows(where: str) -> None:
    known = {settings.variable(field) for field in fields(EngineAgentSettings)}
    environment = _containers()[where]
    ours = {name for name in environment if name.startswith("KVROUTE_")} | {"REDIS_URL"}
    assert ours <= known
    assert environment["KVROUTE_ENGINE_URL"].startswith("http://")


def test_the_engines_of_the_examples_publish_events_that_can_be_asked_for_again() -> None:
    for name in ("vllm.compose.yaml", "vllm.kubernetes.yaml", "split.kubernetes.yaml"):
        [config] = re.findall(r"--kv-events-config=(\{.*?\})'?\n", (DEPLOY / name).read_text())
        said = json.loads(config)
        assert said["enable_kv_cache_events"]
        assert said["publisher"] == "zmq"
        assert said["endpoint"].startswith("tcp://*:")
        assert said["replay_endpoint"].startswith("tcp://*:")
