"""`kvroute up`: a cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib
import json
import shlex
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import click

from app.config_file import start_log, with_config_file
from app.core.errors import ConfigError
from app.core.extras import extra
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import COMMON, LOG_LEVELS, Text, parse_engines
from app.core.settings.planner import PlannerSettings
from app.core.settings.router import CARRIAGE_SETTINGS, RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.errors import TAKES_NO_KEY
from app.local.child import INTERRUPTS, START_DEADLINE_S, ClusterError, heed_interrupts
from app.local.cluster import Cluster
from app.options import CLUSTER, PORT, Command, Option, cluster_size, option_type, options, pick

AGENT_SETTINGS = ("engine_api_key", "namespace", "log_level", "max_requests", "drain_s")
"""Settings that agents and workers share."""
POLL_S = 0.5
REDIS_TIMEOUT_S = 5.0
_USUAL = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
"""Sources of a value that nobody has typed."""
_option = partial(click.option, cls=Option, heading=CLUSTER, show_default=True, show_envvar=True)


@click.command(cls=Command)
@with_config_file
@cluster_size(least_workers=0)
@_option(
    "--engine",
    default="sim",
    type=option_type(Text("sim|torch|URL,...", parse_engines, ",")),
    envvar="KVROUTE_ENGINE",
    help="Engine of the workers that are started, sim or torch; or the base URL of an engine that "
    "runs already, such as vLLM or SGLang, or of several, which are the workers then, with one "
    "router unless --replicas says otherwise.",
)
@_option(
    "--engine-api-key",
    default="",
    envvar="KVROUTE_ENGINE_API_KEY",
    help="API key that the engines ask for, if they do.",
)
@_option(
    "--redis",
    "--redis-url",
    "redis_url",
    envvar="REDIS_URL",
    help="Redis to use; unset: an embedded one.",
)
@_option(
    "--balancer-host",
    default="127.0.0.1",
    envvar="KVROUTE_BALANCER_HOST",
    help="Address the balancer listens on.",
)
@_option(
    "--port",
    default=8080,
    type=PORT,
    envvar="KVROUTE_BALANCER_PORT",
    help="Port the balancer listens on; 0 takes a free one.",
)
@_option(
    "--haproxy/--no-haproxy",
    default=None,
    help="Balance with HAProxy. Default: if it is installed.",
)
@_option(
    "--gateway",
    default="",
    type=click.Choice(("", "envoy")),
    help="Have Envoy, which must be installed, carry the requests. It asks the replicas, which are "
    "pickers then, where each goes.",
)
@options(
    RouterSettings,
    without=("redis_url", "port", "shared_fd", "log_level", "tls_cert", "tls_key"),
)
@options(
    WorkerSettings,
    without=(
        *("redis_url", "namespace", "host", "log_level", "port", "worker_id", "address"),
        *("worker_key", "metrics_key", "role", "kv_port", "engine", "drain_s"),
    ),
)
@_option(
    "--prefill-workers",
    "num_prefill",
    default=0,
    type=click.IntRange(0, 1000),
    help="Number of workers that only compute prompts for others; with --kv-transfer.",
)
@_option(
    "--decode-workers",
    "num_decode",
    default=0,
    type=click.IntRange(0, 1000),
    help="Number of workers that compute no prompts for others; with --kv-transfer.",
)
@_option(
    "--planner/--no-planner",
    "with_planner",
    default=False,
    show_default=False,
    help="Have a planner start and stop the workers, and keep --workers of them at least; 0 lets "
    "the last one leave.",
)
@options(
    PlannerSettings,
    without=(
        *("redis_url", "namespace", "host", "log_level", "port", "connector", "min_workers"),
        *("worker_flags", "local_folder", "exec_command"),
        *("kubernetes_scale", "kubernetes_prefill_scale", "kubernetes_namespace"),
    ),
)
@_option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    envvar="KVROUTE_LOG_LEVEL",
    help="Minimum severity to log.",
    heading=COMMON,
)
def up(**values: Any) -> None:
    """Run a cluster on this machine until Ctrl-C."""
    from app.http.keys import Keys, check_open

    start_log(values["log_level"])
    engines = parse_engines(values["engine"])
    _check_up(values, engines)
    asking = pick(RouterSettings, values, without=("redis_url", "port"))
    if engines and not asking.worker_key:
        asking = replace(asking, worker_key=values["engine_api_key"])
    keys = Keys(asking.api_key, asking.api_key_file)
    check_open(values["balancer_host"], keys, no_auth=asking.no_auth)
    if values["redis_url"] is not None:
        asyncio.run(_reach(values["redis_url"]))
    of_agents = {name: values[name] for name in AGENT_SETTINGS}
    of_agents |= {"model": values["model_name"], "capacity_tokens": values["kv_pool_tokens"]}
    heed_interrupts()
    with (
        suppress(KeyboardInterrupt),
        Cluster(
            num_workers=values["num_workers"],
            num_replicas=values["num_replicas"],
            redis_url=values["redis_url"],
            host=values["balancer_host"],
            port=values["port"],
            haproxy=values["haproxy"],
            gateway=values["gateway"],
            router=asking,
            worker=pick(WorkerSettings, values, without=("redis_url", "port")),
            engines=engines,
            agent=pick(EngineAgentSettings, of_agents, without=()),
            planner=(
                pick(PlannerSettings, values, without=("redis_url", "port"))
                if values["with_planner"]
                else None
            ),
            num_prefill=values["num_prefill"],
            num_decode=values["num_decode"],
        ) as cluster,
    ):
        try:
            click.echo(_listening(cluster))
            _until_stopped(cluster)
        finally:
            # A second signal leaves no process behind either.
            for number in INTERRUPTS:
                signal.signal(number, lambda *_: cluster.kill())
    click.echo("stopped")


def _check_up(values: dict[str, Any], engines: list[str]) -> None:
    """Raises ConfigError for settings with which processes could not start."""
    with extra("worker"):
        importlib.import_module("workers.main")
    if values["with_planner"]:
        with extra("planner"):
            importlib.import_module("app.planner.main")
    if values["gateway"]:
        _check_gateway(values)
    if engines:
        _check_engines(values)
    elif not values["num_workers"] and not (values["with_planner"] and values["wait_queue"]):
        raise ConfigError(
            "workers: 0 needs --planner, which starts a worker for a request, and --wait-queue, in "
            "which the request waits"
        )


def _check_gateway(values: dict[str, Any]) -> None:
    """Raises ConfigError for settings of what a gateway does in the routers' place."""
    with extra("gateway"):
        importlib.import_module("app.gateway.processor")
    given = click.get_current_context().get_parameter_source
    refused = {"haproxy": "--haproxy", "with_planner": "--planner"}
    refused |= {name: f"--{name.replace('_', '-')}" for name in CARRIAGE_SETTINGS if name in values}
    for name, spelt in refused.items():
        if given(name) not in _USUAL and values[name]:
            raise ConfigError(f"{spelt}: not together with --gateway {values['gateway']}")


def _check_engines(values: dict[str, Any]) -> None:
    """Let engines that run already be the only workers. Raises ConfigError for other settings."""
    given = click.get_current_context().get_parameter_source
    for name, flag in (("num_workers", "--workers"), ("with_planner", "--planner")):
        if values[name] and given(name) not in _USUAL:
            raise ConfigError(f"{flag}: not together with --engine URL, which names the workers")
    values["num_workers"], values["engine"] = 0, "sim"
    if given("num_replicas") in _USUAL:
        values["num_replicas"] = 1


async def _reach(redis_url: str) -> None:
    """Raises RedisUnavailable, and ConfigError for a Redis that cannot be used."""
    from app.state.connect import check_server, connect, naming

    with naming(redis_url):
        async with connect(redis_url, timeout_s=REDIS_TIMEOUT_S) as redis:
            await check_server(redis, REDIS_TIMEOUT_S)


def _listening(cluster: Cluster) -> str:
    from app.state.connect import shown_url

    redis_url = shown_url(cluster.redis_url)
    balancer = "haproxy" if cluster.balancer else "a socket shared by the replicas"
    if cluster.balancer and cluster.balancer.name == "envoy":
        balancer = "envoy, which asks the pickers"
    running = [*cluster.routers, *cluster.workers, *cluster.agents]
    lines = [
        f"balancer   {cluster.balancer_url}   ({balancer})",
        *(f"{m.name:<10} {m.url}" for m in running),
        f"redis      {redis_url}",
        *([f"console    {cluster.console_url}"] if cluster.console_url else []),
        "",
        "Try:",
        f"  {_example(cluster)}",
        f"  curl -s {cluster.replica_url}/v1/workers",
        f"  curl -s {cluster.replica_url}/v1/route -H 'content-type: application/json' "
        """-d '{"token_ids": [1, 2, 3], "explain": true, "reserve": false}'""",
        f"  kvroute doctor --redis-url {redis_url} --namespace {cluster.keyspace.namespace}",
        "",
        "Press Ctrl-C to stop.",
    ]
    return "\n".join(lines)


def _until_stopped(cluster: Cluster) -> None:
    """Wait for SIGINT or SIGTERM; report any process of the cluster that ends before."""
    reported: set[str] = set()
    while True:
        for name, status in cluster.ended().items():
            if name not in reported or name == "planner":
                reported.add(name)
                click.echo(f"{name} exited with status {status}", err=True)
            if name == "planner":
                cluster.start_planner()
        time.sleep(POLL_S)


class _PathRequest(NamedTuple):
    path: str
    body: Mapping[str, Any]


_MODELS = _PathRequest("models", {})
_CHAT = _PathRequest("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
_TEXT = _PathRequest("completions", {"prompt": "hi"})
_IDS = _PathRequest("completions", {"prompt": [1, 2, 3]})


def _example(cluster: Cluster) -> str:
    """Returns a command that gets an answer. Engines are asked: not each has a chat template."""
    if not cluster.engines:
        return _curl(cluster, _CHAT if cluster.takes_text else _IDS, cluster.model)
    listed = _ask(cluster, _MODELS)
    if not listed or not listed["data"]:
        raise ClusterError("the engines list no model any more")
    # Adapters come with what they adapt.
    model = min(listed["data"], key=lambda card: bool(card.get("parent")))["id"]
    short = {"model": model, "max_tokens": 1}
    answered = (one for one in (_CHAT, _TEXT) if _ask(cluster, one, short) is not None)
    return _curl(cluster, next(answered, _IDS), model)


def _curl(cluster: Cluster, asked: _PathRequest, model: str) -> str:
    body = json.dumps({"model": model, **asked.body})
    has_keys = cluster.router.api_key or cluster.router.api_key_file
    key = ' -H "Authorization: Bearer $KEY"' if has_keys else ""
    return f"curl -s {cluster.balancer_url}/v1/{asked.path}{key} -d {shlex.quote(body)}"


def _ask(cluster: Cluster, asked: _PathRequest, more: Mapping[str, Any] | None = None) -> Any:
    """Returns a replica's answer, or None if its status is not 200. Raises ClusterError if the
    engine takes no key of the router's."""
    key = cluster.router.api_key
    request = urllib.request.Request(  # noqa: S310 - our own http URL
        f"{cluster.balancer_url}/v1/{asked.path}",
        json.dumps({**asked.body, **(more or {})}).encode() if asked.body else None,
        {"authorization": f"Bearer {key}"} if key else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=START_DEADLINE_S) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if TAKES_NO_KEY in (said := error.read().decode(errors="replace")):
            message = json.loads(said)["error"]["message"]
            raise ClusterError(f"{message} It is sent --engine-api-key.") from None
    except (OSError, ValueError):
        pass
    return None
