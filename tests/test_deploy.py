"""The files in deploy/ name what exists, and give no part more than it needs."""

import json
import os
import re
import subprocess
import time
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import promql_parser
import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from app.cli import main
from app.core.outcomes import NEVER_CAME, matching
from app.core.settings import kinds
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.router import RouterSettings
from app.door.told.metrics import SECONDS
from app.edge.app import create_app
from app.local.redis_server import free_port
from app.planner.metrics import PlannerMetrics
from app.simulation.engine import SimEngine
from app.simulation.profiles import USUAL
from tests.chart.rendering import EXAMPLES, golden
from tests.redis_servers import default_kind, require_binary, require_redis
from workers import engine_agent
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


def alerts():
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def panels():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            yield expression


def series(registry):
    return {
        family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]
    }


@pytest.mark.parametrize("expression", [*alerts(), *panels()])
def test_what_is_watched_is_valid_and_exists(expression):
    promql_parser.parse(expression)
    engine = EngineRunner(SimEngine(USUAL, block_size=16, now=time.monotonic))
    router = create_app(RouterSettings()).replica.router
    known = series(router.telemetry.registry) | series(registry_of(engine))
    known |= series(PlannerMetrics("n").registry)
    known |= {family.name for family in (*FAMILIES, *engine_agent.FAMILIES)}
    asked = set(re.findall(r"kvroute_\w+", expression))
    assert asked
    assert asked <= known


DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())


def test_no_two_panels_share_an_id_or_a_place_and_none_is_wider_than_the_page():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = Counter[tuple[int, int]]()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        assert x + w <= 24
        taken.update((column, row) for column in range(x, x + w) for row in range(y, y + h))
    assert taken.most_common(1)[0][1] == 1


def test_each_variable_of_the_dashboard_is_used_and_each_that_is_used_is_defined():
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$([a-z_]\w*)", json.dumps(DASHBOARD["panels"])))
    used |= {panel["repeat"] for panel in DASHBOARD["panels"] if "repeat" in panel}
    assert used - {"__rate_interval"} == defined


def test_the_dashboard_promises_first_tokens_within_bounds_that_are_counted():
    [target] = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "target_s"]
    assert set(target["query"].split(",")) <= {str(bound) for bound in SECONDS}


def test_the_dashboard_counts_as_late_the_first_tokens_that_never_came():
    in_time = next(p for p in DASHBOARD["panels"] if p["title"] == "First token in time")
    assert f'outcome=~"{matching(*NEVER_CAME)}"' in in_time["targets"][0]["expr"]


SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def variables():
    for part, service in SERVICES.items():
        yield from ((part, name) for name in service.get("environment", {}))


@pytest.mark.parametrize(("part", "variable"), sorted({*variables()}))
def test_each_part_reads_the_variables_that_it_is_given(part, variable):
    if part == "balancer":
        assert f"${{{variable}}}" in (DEPLOY / "haproxy.cfg").read_text()
    elif part == "redis":
        assert variable in REDIS_VARIABLES
    else:
        command = main.commands[part]
        assert variable in {getattr(option, "envvar", None) for option in command.params}


def test_prometheus_is_told_of_each_service_that_has_metrics_and_its_port():
    file = DEPLOY / "prometheus.yaml"
    command = [require_binary("promtool"), "check", "config", "--syntax-only", file]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = {}
    for job in yaml.safe_load(file.read_text())["scrape_configs"]:
        [where] = job["dns_sd_configs"]
        [service] = where["names"]
        options = {option.name: option.default for option in main.commands[service].params}
        assert where["port"] == options["port"]
        found[service] = "authorization" in job
    assert found == {"router": True, "worker": True, "agent": False, "planner": False}
    keyed = {s for s in SERVICES if "KVROUTE_METRICS_KEY" in SERVICES[s].get("environment", {})}
    assert keyed == {"router", "worker"}


def images():
    files = [DEPLOY / name for name in ("compose.yaml", "vllm.compose.yaml")]
    for file in [*files, *map(golden, EXAMPLES)]:
        yield from re.findall(r"image: (\S+)", file.read_text())
    for match in re.finditer(r"(?m)^FROM (\S+:\S+) AS", (DEPLOY.parent / "Dockerfile").read_text()):
        yield match[1]


def test_images_have_a_whole_version_and_ours_are_of_this_one():
    ours = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    for image in images():
        name, _, version = image.rpartition(":")
        assert re.match(r"v?\d+\.\d+\.\d+(-|$)", version), image
        assert "kvroute" not in name or version == ours, image


def test_no_file_opens_a_router_to_all():
    assert not any("NO_AUTH" in path.read_text() for path in DEPLOY.glob("*.*"))


@pytest.mark.parametrize("part", SERVICES)
def test_a_service_can_do_no_more_than_it_needs(part):
    service = SERVICES[part]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert ("redis" in service["networks"]) == (part != "balancer")
    assert ("default" in service["networks"]) == (part != "redis")


def test_parts_log_in_to_redis_as_their_own_user():
    for part in ("router", "worker"):
        url = SERVICES[part]["environment"]["REDIS_URL"]
        assert url.startswith(f"redis://kvroute-{part}:${{{part.upper()}_PASSWORD}}@")


REDIS_VARIABLES = {
    "KVROUTE_NAMESPACE": "prod",
    "WORKER_PASSWORD": "a/b|c&d$e worker",
    "ROUTER_PASSWORD": "router\\1",
    "OPERATOR_PASSWORD": "operator",
}


def started(*arguments, without=""):
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


def test_redis_starts_with_users_confined_to_a_namespace_by_their_passwords(tmp_path):
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


def test_redis_does_not_start_without_a_password(tmp_path):
    users = str(DEPLOY / "users.acl")
    with started(users, str(tmp_path), without="ROUTER_PASSWORD") as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "ROUTER_PASSWORD is not set" in output


def test_an_agent_in_the_examples_is_told_only_what_it_knows():
    known = {kinds.variable(field) for field in fields(EngineAgentSettings)}
    services = yaml.safe_load((DEPLOY / "vllm.compose.yaml").read_text())["services"]
    assert services["agent"]["environment"].keys() <= known


def test_the_engines_of_the_examples_publish_events_that_can_be_asked_for_again():
    for file in (DEPLOY / "vllm.compose.yaml", DEPLOY / "chart/templates/engines.yaml"):
        [config] = re.findall(r"--kv-events-config=(\{.*?\})'?\n", file.read_text())
        said = json.loads(config)
        assert said["enable_kv_cache_events"]
        assert said["publisher"] == "zmq"
        assert said["endpoint"].startswith("tcp://*:")
        assert said["replay_endpoint"].startswith("tcp://*:")
