"""Each part of the chart gets what it reads, and may do no more than it needs."""

import re

import promql_parser
import pytest

from app.cli import main
from app.core.roles import Role
from app.core.settings.agent import EngineAgentSettings
from app.planner.metrics import PlannerMetrics
from tests.chart.installed import INSTALLED, selects
from tests.chart.rendering import golden
from workers.discovery.kubernetes import engine_of

OURS = ("router", "picker", "worker", "agent", "planner")
OWN_VARIABLES = {"POD_IP", "REDIS_PASSWORD", "OTEL_EXPORTER_OTLP_ENDPOINT"}


def environment(container):
    return {entry["name"]: entry for entry in container["env"]}


def test_each_part_reads_the_variables_and_the_flags_that_it_is_given(installed):
    for container in installed.containers():
        if (part := container["name"]) not in OURS:
            continue
        command = main.commands[part]
        known = {getattr(option, "envvar", None) for option in command.params}
        assert environment(container).keys() - OWN_VARIABLES <= known
        program, name, *flags = container["args"]
        assert (program, name) == ("kvroute", part)
        options = {text for option in command.params for text in option.opts}
        assert {flag.split("=")[0] for flag in flags} <= options


def test_routers_and_workers_ask_for_keys(installed):
    of_routers = {"KVROUTE_API_KEY", "KVROUTE_WORKER_KEY", "KVROUTE_METRICS_KEY"}
    asked = {
        "router": of_routers,
        "picker": of_routers,
        "worker": {"KVROUTE_WORKER_KEY", "KVROUTE_METRICS_KEY"},
        "agent": {"KVROUTE_ENGINE_API_KEY"},
        "vllm": {"VLLM_API_KEY"},
    }
    for container in installed.containers():
        given = environment(container)
        for name in asked.get(container["name"], ()):
            secret = given[name]["valueFrom"]["secretKeyRef"]
            is_own = installed.example == "production-stack" and secret["key"] == "vllmApiKey"
            name = "vllm-secrets" if is_own else "kvroute-keys"
            assert secret == {"name": name, "key": secret["key"]}
    assert "NO_AUTH" not in golden(installed.example).read_text()


def test_parts_log_in_to_redis_as_their_own_user(installed):
    users = dict.fromkeys(("router", "picker", "planner"), "router")
    users |= dict.fromkeys(("worker", "agent"), "worker")
    for container in installed.containers():
        if (user := users.get(container["name"])) is None:
            continue
        given = environment(container)
        password = given.get("REDIS_PASSWORD", given["REDIS_URL"])
        secret = {"name": "kvroute-redis", "key": user}
        assert password["valueFrom"]["secretKeyRef"] == secret
        if url := given["REDIS_URL"].get("value"):
            assert url == f"redis://kvroute-{user}:$(REDIS_PASSWORD)@kvroute-redis:6379/0"


def test_secrets_are_made_where_none_are_named(installed):
    made = {each["metadata"]["name"]: set(each["data"]) for each in installed.of_kind("Secret")}
    keys = {"kvroute-keys": {"api", "worker", "metrics"}}
    redis = {"kvroute-redis": {"router", "worker", "operator"}}
    expected = {"redis": keys, "ha": {}}
    assert made == expected.get(installed.example, keys | redis)


def test_a_pod_can_do_no_more_than_it_needs(installed):
    for part, template in installed.pods.items():
        pod = template["spec"]
        account = pod.get("serviceAccountName", "")
        asks_the_api = account.startswith("kvroute-") and account.endswith(("-planner", "-agent"))
        assert asks_the_api or pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            if container["name"] == "vllm":
                continue
            confined = container["securityContext"]
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["readOnlyRootFilesystem"] is True
            assert confined["capabilities"] == {"drop": ["ALL"]}
            for_user = {**pod["securityContext"], **confined}
            assert for_user.get("runAsNonRoot") or for_user["runAsUser"], part
            assert container["resources"]["limits"].keys() == {"cpu", "memory"}
        mounted = {
            mount["name"]
            for container in pod["containers"] + pod.get("initContainers", [])
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_every_container_has_probes_and_a_start_has_time(installed):
    for container in installed.containers():
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe"):
            [how] = container[probe].keys() & {"httpGet", "tcpSocket"}
            assert container[probe][how]["port"] in ports
        ready = container.get("readinessProbe")
        assert ready or container["name"] == "vllm"  # Its agent says for both whether it is ready.


def test_a_roll_out_takes_no_router_away_first_and_a_drain_one_pod_at_a_time(installed):
    deployments = {
        each["metadata"]["name"]: each["spec"] for each in installed.of_kind("Deployment")
    }
    assert deployments["kvroute-router"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    [router] = installed.pods["router"]["spec"]["containers"]
    assert router["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in installed.of_kind("PodDisruptionBudget")
    }
    assert budgets.keys() == deployments.keys() - {"kvroute-redis"}
    for name, budget in budgets.items():
        assert budget == {"maxUnavailable": 1, "selector": deployments[name]["selector"]}
        pod = deployments[name]["template"]["spec"]
        for spread in pod["topologySpreadConstraints"]:
            labels = deployments[name]["template"]["metadata"]["labels"]
            assert selects(spread["labelSelector"], labels)


def test_replicas_are_left_to_what_scales(installed):
    fixed = {
        each["metadata"]["name"].removeprefix("kvroute-")
        for each in installed.of_kind("Deployment")
        if "replicas" in each["spec"]
    }
    examples = {"split": {"prefill", "decode"}, "ha": {"router", "engine"}}
    scaled = examples.get(installed.example, set())
    assert installed.pods.keys() - fixed == scaled
    targets = {
        each["spec"]["scaleTargetRef"]["name"].removeprefix("kvroute-")
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for each in installed.of_kind(kind)
    }
    if installed.example != "split":  # There the planner scales.
        assert targets == scaled


def test_the_planner_may_do_what_its_connector_does_to_the_pools_alone():
    split = INSTALLED["split"]
    [role], [account], [binding] = (
        split.of_kind(kind) for kind in ("Role", "ServiceAccount", "RoleBinding")
    )
    scale, pods = role["rules"]
    assert (scale["apiGroups"], scale["resources"]) == (["apps"], ["deployments/scale"])
    assert scale["verbs"] == ["get", "patch"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    [planner] = split.pods["planner"]["spec"]["containers"]
    given = {name: entry.get("value", "") for name, entry in environment(planner).items()}
    prefill, decode = given["KVROUTE_KUBERNETES_PREFILL_SCALE"], given["KVROUTE_KUBERNETES_SCALE"]
    assert [decode, prefill] == [f"deployment/{name}" for name in scale["resourceNames"]]
    assert scale["resourceNames"] == ["kvroute-decode", "kvroute-prefill"]
    assert split.pods["planner"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kvroute-planner"}]


def test_keda_asks_for_what_planners_propose():
    ha = INSTALLED["ha"]
    [scaled] = ha.of_kind("ScaledObject")
    [trigger] = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    [metric] = re.findall(r"kvroute_\w+", query)
    assert metric in {family.name for family in PlannerMetrics("n").registry.collect()}
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 8)
    [planner] = ha.pods["planner"]["spec"]["containers"]
    assert environment(planner)["KVROUTE_CONNECTOR"]["value"] == "advise"
    assert not ha.of_kind("Role")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_agent_of_a_split_fleet_has_the_role_of_its_pool(role):
    containers = INSTALLED["split"].pods[role]["spec"]["containers"]
    engine, agent = sorted(containers, key=lambda each: each["name"] == "agent")
    given = environment(agent)
    assert given["KVROUTE_ROLE"]["value"] == role
    assert given["KVROUTE_KV_TRANSFER"]["value"] == "nixl"
    [config] = [arg for arg in engine["args"] if arg.startswith("--kv-transfer-config=")]
    assert f'"kv_lease_duration":{given["KVROUTE_KV_LEASE_S"]["value"]}}}' in config
    [router] = INSTALLED["split"].pods["router"]["spec"]["containers"]
    assert environment(router)["KVROUTE_KV_LEASE_S"] == given["KVROUTE_KV_LEASE_S"]


def test_agents_that_discover_may_only_see_pods_and_look_for_those_of_engines():
    discovery = INSTALLED["discovery"]
    [role], [account], [binding] = (
        discovery.of_kind(kind) for kind in ("Role", "ServiceAccount", "RoleBinding")
    )
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert discovery.pods["agent"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kvroute-agent"}]
    [agent] = discovery.pods["agent"]["spec"]["containers"]
    given = environment(agent)
    asked = given["KVROUTE_KUBERNETES_SELECTOR"]["value"].split(",")
    labels = dict(text.split("=") for text in asked)
    found = {
        part
        for part, pod in discovery.pods.items()
        if labels.items() <= pod["metadata"]["labels"].items()
    }
    assert found == discovery.engines() == {"prefill", "decode"}
    for part in found:
        pod = discovery.pods[part]
        [engine] = pod["spec"]["containers"]
        assert given["KVROUTE_PORT_NAME"]["value"] in [port["name"] for port in engine["ports"]]
        shown = {
            "metadata": pod["metadata"] | {"name": part, "uid": part},
            "spec": pod["spec"],
            "status": {"podIP": "10.0.0.1"},
        }
        process = EngineAgentSettings(port_name=given["KVROUTE_PORT_NAME"]["value"])
        told = engine_of(shown, process)
        assert told is not None
        assert (told.settings.role, told.settings.kv_transfer) == (part, "nixl")
        assert told.settings.engine_url == "http://10.0.0.1:8000"


def test_a_gateway_is_told_who_picks_among_which_pods():
    gateway = INSTALLED["gateway"]
    [pool], [route] = gateway.of_kind("InferencePool"), gateway.of_kind("HTTPRoute")
    asked = pool["spec"]["endpointPickerRef"]
    assert asked["failureMode"] == "FailClose"
    [service] = [
        each for each in gateway.of_kind("Service") if each["metadata"]["name"] == asked["name"]
    ]
    [port] = service["spec"]["ports"]
    assert port["port"] == asked["port"]["number"]
    router = gateway.pods["router"]
    assert service["spec"]["selector"].items() <= router["metadata"]["labels"].items()
    [container] = router["spec"]["containers"]
    assert {port["targetPort"]: 9002}.items() <= {
        each["name"]: each["containerPort"] for each in container["ports"]
    }.items()
    assert container["args"][:2] == ["kvroute", "picker"]
    members = {
        part
        for part, pod in gateway.pods.items()
        if selects(pool["spec"]["selector"], pod["metadata"]["labels"])
    }
    assert members == {"worker"}
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [*gateway.ports("worker")]
    [rule] = route["spec"]["rules"]
    assert [each["name"] for each in rule["backendRefs"]] == [pool["metadata"]["name"]]


@pytest.mark.parametrize("example", ["ha", "split", "discovery"])
def test_monitors_name_pods_and_ports_that_there_are_and_a_key_where_one_is_asked_for(example):
    installed, seen = INSTALLED[example], set()
    for monitor in installed.of_kind("PodMonitor"):
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        asked = endpoint.get("authorization", {}).get("credentials")
        for pod in installed.pods.values():
            if not selects(monitor["spec"]["selector"], pod["metadata"]["labels"]):
                continue
            [container] = [
                each
                for each in pod["spec"]["containers"]
                if endpoint["port"] in [port["name"] for port in each["ports"]]
            ]
            seen.add(container["name"])
            key = environment(container).get("KVROUTE_METRICS_KEY")
            assert asked == (key and key["valueFrom"]["secretKeyRef"])
            assert (endpoint.get("scheme") == "https") == (
                "KVROUTE_TLS_CERT" in environment(container)
            )
    assert seen == {"router", "agent", "planner"} & {"agent", *installed.pods}


def test_alerts_and_dashboard_are_those_of_deploy():
    [rule] = INSTALLED["ha"].of_kind("PrometheusRule")
    assert rule["spec"] == "deploy/alerts.yaml"
    files = {
        name: text
        for each in INSTALLED["ha"].of_kind("ConfigMap")
        for name, text in each["data"].items()
    }
    assert files == {"kvroute.json": "deploy/grafana.json", "tokenizer.sh": "deploy/tokenizer.sh"}
    [users] = INSTALLED["default"].of_kind("ConfigMap")
    assert users["data"] == {"users.acl": "deploy/users.acl", "redis.sh": "deploy/redis.sh"}


def test_who_answers_late_is_not_killed(installed):
    for container in installed.containers():
        for name in ("livenessProbe", "readinessProbe"):
            probe = container.get(name, {})
            if "httpGet" in probe or "exec" in probe:
                # Kubernetes itself waits for one second.
                assert probe["timeoutSeconds"] >= (30 if container["name"] == "vllm" else 5)
